"""A small paged harness: drives a model step by step without a scheduler, on shuffled blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from quire.ipc.spec.config import EngineConfig
from quire.ipc.spec.model_spec import has_dynamic_rope
from quire.kernels.program.native import is_switched_off
from quire.worker.attention.metadata import AttentionMetadata, KVCaches, StepStates, make_metadata
from quire.worker.kv_cache import allocate_kv_caches, find_table_groups
from quire.worker.models.model import Model
from torch import Tensor


@dataclass
class Request:
    """One request: its tokens, how many are in the cache, and its blocks."""

    token_ids: list[int]
    prompt_len: int
    num_computed: int = 0
    state_slot: int = 0
    blocks: list[int] = field(default_factory=list[int])


_NUM_STATE_SLOTS = 8


class PagedRun:
    """Requests by name over one KV cache. `step` computes given numbers of tokens of several at once."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        num_blocks: int = 64,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self._model = model
        self._device = device or torch.device("cpu")
        self._block_size = config.cache.block_size
        spec = config.model.spec
        self._is_dynamic = has_dynamic_rope(spec)
        # NaN where nothing was written: a read outside a request's own tokens would show.
        num_groups = max(1, len(spec.kv_windows))
        caches = allocate_kv_caches(config, num_blocks * num_groups, self._device)
        # Block b of a request is another id in each KV group, since layers of groups share memory.
        scales = [group.scale for group in find_table_groups(config, caches)] or [1]
        self._ids = [(num_groups * scale, group * scale) for group, scale in enumerate(scales)]
        self.kv_caches: KVCaches = [
            (_fill_with_nan(k_cache), _fill_with_nan(v_cache)) for k_cache, v_cache in caches
        ]
        self._free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self.requests: dict[str, Request] = {}
        # NaN in those of nobody, too.
        self._states = torch.full((_NUM_STATE_SLOTS, spec.state_size), torch.nan, device=self._device)

    def add(self, name: str, token_ids: Sequence[int], prompt_len: int | None = None) -> None:
        """A request whose tokens are all known (so that every position's logits can be compared)."""
        slot = _NUM_STATE_SLOTS - 1 - len(self.requests)
        self.requests[name] = Request(list(token_ids), prompt_len or len(token_ids), state_slot=slot)

    def take_block(self) -> int:
        """A block that nobody has."""
        return self._free.pop()

    def step(self, num_tokens: Mapping[str, int]) -> dict[str, Tensor]:
        """Compute the next tokens of the named requests together; float32 logits [tokens, vocab] of each."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[list[int]] = [[] for _ in self._ids]
        lengths: list[int] = []
        starts = [0]
        for name, count in num_tokens.items():
            request = self.requests[name]
            end = request.num_computed + count
            while len(request.blocks) * self._block_size < end:
                request.blocks.append(self.take_block())
            for position in range(request.num_computed, end):
                ids.append(request.token_ids[position])
                positions.append(position)
                block, offset = divmod(position, self._block_size)
                for of_group, (factor, first) in zip(slots, self._ids, strict=True):
                    of_group.append((request.blocks[block] * factor + first) * self._block_size + offset)
                lengths.append(max(request.prompt_len, position + 1))
            request.num_computed = end
            starts.append(len(ids))
        metadata = self._metadata(list(num_tokens), starts, slots)
        rope_lengths = torch.tensor(lengths, device=self._device) if self._is_dynamic else None
        with torch.inference_mode():
            inputs = (torch.tensor(part, device=self._device) for part in (ids, positions))
            hidden = self._model.forward(*inputs, self.kv_caches, metadata, rope_lengths)
            logits = self._model.compute_logits(hidden)
        return {
            name: logits[start:end]
            for name, start, end in zip(num_tokens, starts[:-1], starts[1:], strict=True)
        }

    def run(self, name: str, chunk: int | None = None) -> Tensor:
        """Logits of all remaining tokens of one request, `chunk` tokens a step."""
        request = self.requests[name]
        parts: list[Tensor] = []
        while (left := len(request.token_ids) - request.num_computed) > 0:
            parts.append(self.step({name: min(left, chunk or left)})[name])
        return torch.cat(parts)

    def _metadata(self, names: list[str], starts: list[int], slots: list[list[int]]) -> AttentionMetadata:
        requests = [self.requests[name] for name in names]
        widest = max(len(request.blocks) for request in requests)
        # Past a request's own blocks the table is unspecified: a large id would crash a reader.
        tables = torch.full((len(self._ids), len(names), widest), 1 << 30, dtype=torch.int32)
        for table, (factor, first) in zip(tables, self._ids, strict=True):
            for row, request in enumerate(requests):
                ids = torch.tensor(request.blocks, dtype=torch.int32)
                table[row, : len(ids)] = ids * factor + first
        return make_metadata(
            tables.to(self._device),
            torch.tensor(slots, device=self._device),
            query_starts=torch.tensor(starts, dtype=torch.int32, device=self._device),
            seq_lens=torch.tensor(
                [request.num_computed for request in requests], dtype=torch.int32, device=self._device
            ),
            max_query_len=max(np.diff(starts).tolist()),
            max_seq_len=max(request.num_computed for request in requests),
            states=self._find_states(requests),
        )

    def _find_states(self, requests: Sequence[Request]) -> StepStates | None:
        if not self._states.numel():
            return None
        slots = np.array([request.state_slot for request in requests], np.int32)
        arrays = slots, np.zeros(len(slots) + 1, np.int32), np.empty(0, np.int32), np.empty(0, np.int32)
        tensors = (torch.from_numpy(array).to(self._device) for array in arrays)
        return StepStates(self._states, *tensors, *arrays)


def _fill_with_nan(cache: Tensor) -> Tensor:
    """In 8 bits codes of -1 or NaN, and scales of NaN."""
    if cache.is_floating_point():
        return cache.fill_(torch.nan)
    return cache.fill_(-1 if cache.is_signed() else 0xFF)


def compute_alone(
    model: Any, config: EngineConfig, token_ids: Sequence[int], chunk: int | None = None
) -> Tensor:
    """Logits of all tokens of a request by itself, `chunk` tokens a step; the model may be a pipeline."""
    run = PagedRun(model, config, seed=9)
    run.add("alone", token_ids)
    return run.run("alone", chunk)


def assert_same_logits(actual: Tensor, expected: Tensor, config: EngineConfig) -> None:
    """Every bit with the native kernels; torch's sums depend on how many rows there are."""
    if not is_switched_off():
        assert torch.equal(actual, expected)
        return
    spec = config.model.spec
    if config.model.dtype == "float32":
        # Rounding over the sums of every layer, times 8 for the spread.
        terms = 6 * sum(layer.ffn.intermediate_size for layer in spec.layers)
        relative = 8 * torch.finfo(torch.float32).eps * terms**0.5
    else:
        # A layer rounds its values some 20 times, each an independent 2^-9 of what is there.
        relative = 4 * (20 * spec.num_layers) ** 0.5 * 2**-9
    torch.testing.assert_close(actual, expected, rtol=0, atol=relative * expected.abs().max().item())
