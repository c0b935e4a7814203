"""A loaded model's tokens must not depend on the requests beside them: a check with two short prompts.

What mixes tokens without attention (a convolution, a norm over a sequence, positions that a model counts by
itself) would answer wrong in silence. Here it is refused, since it gives a prompt that is computed in parts
beside another one other numbers than the prompt alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....ipc.errors import ModelError
from ....ipc.spec.config import EngineConfig
from ...attention.metadata import AttentionMetadata, KVCaches
from ..model import Model

_BLOCK = 16
_LENGTHS = (6, 4)
_ALONE = ([(0, 0, 6)], [(1, 0, 4)])  # steps: (prompt, first token, end)
_MIXED = ([(0, 0, 2), (1, 0, 1)], [(1, 1, 2), (0, 2, 6)], [(1, 2, 4)])
_MOST_FLOAT32 = 1e-4
_MOST = 0.05  # of a token's hidden state: roundings, of bfloat16 too, change less
_MOST_OF_ANY = 5.0  # times as much may differ in a single token


@torch.inference_mode()
def check_alone(model: Model, config: EngineConfig, device: torch.device) -> None:
    """ModelError where half of the tokens change with the requests beside them."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(config.model.spec.vocab_size, (size,), generator=generator) for size in _LENGTHS]
    alone, mixed = (_compute(model, config, device, prompts, steps) for steps in (_ALONE, _MIXED))
    errors = (alone - mixed).norm(dim=1) / alone.norm(dim=1)
    if not errors.median() <= _MOST:
        text = "one whose tokens meet in attention alone: other requests of a step would change its answers"
        raise ModelError("config.json architectures", config.model.spec.architecture, text)


@torch.inference_mode()
def compute_alike(model: Model, other: Model, config: EngineConfig, device: torch.device) -> bool:
    """Whether two models give the same hidden states and logits but for roundings, at the first positions and
    at the last, behind keys and values that are random.
    """
    generator = torch.Generator().manual_seed(0)
    dtype, max_len = getattr(torch, config.model.dtype), config.model.max_model_len
    most = _MOST if dtype is torch.bfloat16 else _MOST_FLOAT32
    for start in sorted({0, max_len // 2 // _BLOCK * _BLOCK, max_len // _BLOCK * _BLOCK - _BLOCK}):
        if start < 0 or start + max(_LENGTHS) > max_len:
            continue
        prompts = [
            torch.randint(config.model.spec.vocab_size, (size,), generator=generator) for size in _LENGTHS
        ]
        hidden, expected = (_compute(each, config, device, prompts, _MIXED, start) for each in (model, other))
        logits, wanted = (each.compute_logits(hidden.to(dtype)).float() for each in (model, other))
        for x, y in ((hidden, expected), (logits, wanted)):
            errors = (x - y).norm(dim=1) / y.norm(dim=1)
            if not (errors.median() <= most and errors.max() <= _MOST_OF_ANY * most):
                return False
    return True


def _compute(
    model: Model,
    config: EngineConfig,
    device: torch.device,
    prompts: list[Tensor],
    steps: tuple[list[tuple[int, int, int]], ...],
    start: int = 0,
) -> Tensor:
    """float32 [tokens of all prompts, hidden], each prompt in a block of its own.

    `start`, whole blocks, is how many tokens each prompt has before it: they share a block.
    """
    caches, dtype = KVCaches(), getattr(torch, config.model.dtype)
    generator, before = torch.Generator().manual_seed(0), len(prompts)
    for layer in config.model.spec.layers:
        shape = before + 1, layer.attention.num_kv_heads, _BLOCK, layer.attention.head_size
        # The same number for all of a head: models may keep a head's numbers in different orders.
        numbers = torch.randn((2, before + 1, shape[1], 1, 1), generator=generator).to(device, dtype)
        key, value = (each.expand(shape).contiguous() for each in numbers)
        caches.append((key, value))
    rows: list[list[Tensor]] = [[] for _ in prompts]
    for step in steps:
        sizes = [end - first for _, first, end in step]
        positions = torch.cat([torch.arange(first, end) for _, first, end in step])
        blocks = torch.tensor([prompt for prompt, _, _ in step])
        starts = torch.tensor([0, *sizes]).cumsum(0)
        tables = torch.full((len(step), start // _BLOCK + 1), before, dtype=torch.int32)
        tables[:, -1] = blocks
        metadata = AttentionMetadata(
            query_starts=starts.int().to(device),
            seq_lens=torch.tensor([start + end for _, _, end in step], dtype=torch.int32).to(device),
            block_tables=tables.to(device),
            slot_mapping=(blocks.repeat_interleave(torch.tensor(sizes)) * _BLOCK + positions).to(device),
            max_query_len=max(sizes),
            max_seq_len=start + max(end for _, _, end in step),
        )
        metadata.others = (metadata,) * (len(config.model.spec.kv_windows) - 1)
        ids = torch.cat([prompts[prompt][first:end] for prompt, first, end in step])
        hidden = model.forward(ids.to(device), (start + positions).to(device), caches, metadata).float().cpu()
        for (prompt, _, _), part in zip(step, hidden.split(sizes), strict=True):
            rows[prompt].append(part)
    return torch.cat([part for prompt in rows for part in prompt])
