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
    """Whether two models give the same hidden states and logits but for roundings."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(config.model.spec.vocab_size, (size,), generator=generator) for size in _LENGTHS]
    hidden, expected = (_compute(each, config, device, prompts, _MIXED) for each in (model, other))
    dtype = getattr(torch, config.model.dtype)
    logits, wanted = (each.compute_logits(hidden.to(dtype)).float() for each in (model, other))
    most = _MOST if dtype is torch.bfloat16 else _MOST_FLOAT32
    pairs = (hidden, expected), (logits, wanted)
    return all(bool((x - y).norm(dim=1).div(y.norm(dim=1)).median() <= most) for x, y in pairs)


def _compute(
    model: Model,
    config: EngineConfig,
    device: torch.device,
    prompts: list[Tensor],
    steps: tuple[list[tuple[int, int, int]], ...],
) -> Tensor:
    """float32 [tokens of all prompts, hidden], each prompt in a block of its own."""
    caches, dtype = KVCaches(), getattr(torch, config.model.dtype)
    for layer in config.model.spec.layers:
        shape = len(prompts), layer.attention.num_kv_heads, _BLOCK, layer.attention.head_size
        caches.append(
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
        )
    rows: list[list[Tensor]] = [[] for _ in prompts]
    for step in steps:
        sizes = [end - first for _, first, end in step]
        positions = torch.cat([torch.arange(first, end) for _, first, end in step])
        blocks = torch.tensor([prompt for prompt, _, _ in step])
        starts = torch.tensor([0, *sizes]).cumsum(0)
        metadata = AttentionMetadata(
            query_starts=starts.int().to(device),
            seq_lens=torch.tensor([end for _, _, end in step], dtype=torch.int32).to(device),
            block_tables=blocks.int()[:, None].to(device),
            slot_mapping=(blocks.repeat_interleave(torch.tensor(sizes)) * _BLOCK + positions).to(device),
            max_query_len=max(sizes),
            max_seq_len=max(end for _, _, end in step),
        )
        metadata.others = (metadata,) * (len(config.model.spec.kv_windows) - 1)
        ids = torch.cat([prompts[prompt][first:end] for prompt, first, end in step])
        hidden = model.forward(ids.to(device), positions.to(device), caches, metadata).float().cpu()
        for (prompt, _, _), part in zip(step, hidden.split(sizes), strict=True):
            rows[prompt].append(part)
    return torch.cat([part for prompt in rows for part in prompt])
