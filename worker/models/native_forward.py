"""A model's forward pass as one native call, for models whose every layer has an operation for it.

It holds a program for hidden states, one for logits if the model has them, and nothing else: the layers keep
the tensors. Legend: T tokens, S requests that sample.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.spec.model_spec import ModelSpec
from ...kernels.attention.narrow_cache import find_format
from ...kernels.choice import choose_kernel, native_library
from ...kernels.group.shared_group import SharedGroup
from ...kernels.program.program import (
    CacheTable,
    NotNativeError,
    Program,
    ProgramTable,
    StepTable,
    Workspace,
    check_layout,
    run_program,
)
from ..attention.metadata import AttentionMetadata, KVCaches
from ..layers.logits import LogitsHead
from ..layers.rotary import RotaryEmbedding

Int64s = NDArray[np.int64]


class NativeForward:
    """Computes what the layers of a decoder compute, to the bit. Made by `make_native_forward`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        spec: ModelSpec,
        hidden: Program,
        logits: Program | None,
        ropes: list[RotaryEmbedding],
        head: LogitsHead | None,
        splits_tokens: bool,
        group: SharedGroup | None,
    ) -> None:
        check_layout(library)
        self.library = library
        self._hidden_size, self._head, self._group = spec.hidden_size, head, group
        self._programs, self._ropes = (hidden, logits), ropes
        self._caches = (CacheTable * spec.num_layers)(
            *(CacheTable(group=layer.attention.kv_group) for layer in spec.layers)
        )
        self._hidden = hidden.finish(self._caches, splits_tokens)
        self._logits = None if logits is None else logits.finish(self._caches, splits_tokens)
        self._kv_caches: KVCaches | None = None
        self._workspace = Workspace()

    def compute_hidden(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: KVCaches,
        metadata: AttentionMetadata,
        rope_lengths: Tensor | None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """[T, hidden] as `Decoder.forward`."""
        angles = None
        if rope_lengths is not None:
            each = [rope(positions, rope_lengths)[:2] for rope in self._ropes]
            angles = [
                torch.stack(parts) for parts in zip(*each, strict=True)
            ]  # cos and sin, [ropes, T, D / 2]
        num_requests, table_width = metadata.block_tables.shape
        groups = metadata, *metadata.others
        tables, slots = metadata.block_tables, metadata.slot_mapping
        if len(groups) > 1:  # as one piece of memory each
            tables = torch.stack([each.block_tables for each in groups])
            slots = torch.stack([each.slot_mapping for each in groups])
        step = StepTable(
            input_ids=input_ids.data_ptr(),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            types=None if token_types is None else token_types.data_ptr(),
            cos=None if angles is None else angles[0].data_ptr(),
            sin=None if angles is None else angles[1].data_ptr(),
            query_starts=metadata.query_starts.data_ptr(),
            seq_lens=metadata.seq_lens.data_ptr(),
            block_tables=tables.data_ptr(),
            num_tokens=len(input_ids),
            num_requests=num_requests,
            table_width=table_width,
            num_groups=len(groups),
        )
        if (states := metadata.states) is not None:
            step.set_states(states.states, *states.host_arrays)
        out = torch.empty((len(input_ids), self._hidden_size), dtype=self._programs[0].dtype)
        self._run(self._hidden, step, kv_caches, out)
        return out

    def compute_step_logits(self, step: StepTable, kv_caches: KVCaches) -> Tensor:
        """float32 [S, vocab]: logits of each sampling request's last token. Writes K and V of all tokens."""
        assert self._logits is not None
        assert self._head is not None
        out = torch.empty((step.num_sampling, self._head.width), dtype=torch.float32)
        self._run(self._logits, step, kv_caches, out)
        return out if self._head.gathered is None else self._head.gathered(out)

    def compute_step_hidden(self, step: StepTable, kv_caches: KVCaches, types: Int64s | None) -> Tensor:
        """[T, hidden] of all tokens. Writes their K and V. `types`: of tokens, None if all are 0."""
        step.types = None if types is None else types.ctypes.data
        out = torch.empty((step.num_tokens, self._hidden_size), dtype=self._programs[0].dtype)
        self._run(self._hidden, step, kv_caches, out)
        step.types = None  # the array is the caller's
        return out

    def _run(self, program: ProgramTable, step: StepTable, kv_caches: KVCaches, out: Tensor) -> None:
        if kv_caches is not self._kv_caches:
            self._bind(kv_caches)
        if not run_program(self.library, program, step, self._workspace, out):
            assert self._group is not None
            self._group.check()  # raises with the reason

    def _bind(self, kv_caches: KVCaches) -> None:
        """Note where the caches are; a model is used with one set of them, but tests make several."""
        for program in (self._hidden, self._logits):
            if program is not None:
                program.block_size = kv_caches[0][0].shape[2]
                program.kv_format = find_format(kv_caches[0][0])
        for layer, (k_cache, v_cache) in zip(self._caches, kv_caches, strict=True):
            layer.k, layer.v = k_cache.data_ptr(), v_cache.data_ptr() if v_cache.numel() else None
        self._kv_caches = kv_caches


def make_native_forward(
    emit: Callable[[Program], None],
    spec: ModelSpec,
    table: Tensor,
    ropes: list[RotaryEmbedding],
    head: LogitsHead | None,
    splits_tokens: bool,
    group: SharedGroup | None = None,
) -> NativeForward | None:
    """The native pass of the model that `emit` emits, None if some layer of it has no operation.

    `table` is the embedding's, whose type and device are the model's. With `group`, of a rank's part of it.
    """
    if choose_kernel("program", table.dtype, table.device) == "torch":
        return None
    # What an earlier stage of a pipeline passes on is the sum of all that its layers have added.
    result = "out" if spec.stage.is_last else "residual"
    hidden = Program(table.dtype, spec.hidden_size, wants_logits=False, out=result)
    logits = None if head is None else Program(table.dtype, head.width, wants_logits=True)
    try:
        emit(hidden)
        if logits is not None:
            emit(logits)
    except NotNativeError:
        return None
    return NativeForward(native_library(), spec, hidden, logits, ropes, head, splits_tokens, group)
