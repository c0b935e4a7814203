"""A decoder's whole forward pass as one call (decoder.cpp): the other kernels of this folder in a row.

The structs mirror decoder.h field by field and hold addresses only: who fills them in keeps the tensors.
The reference is the same layers called from Python (worker/models/decoder.py); bits are equal.
Legend: T tokens, R requests, S of them that sample, D head size.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float

# Names of the activations that the pass computes, as decoder.h numbers them.
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


class LinearTable(ctypes.Structure):
    """QuireLinear."""

    _fields_ = (
        ("packed", _POINTER),
        ("scales", _POINTER),
        ("bias", _POINTER),
        ("num_in", _INT),
        ("num_out", _INT),
        ("variant", _INT),
        ("format", _INT),
    )


class LayerTable(ctypes.Structure):
    """QuireLayer."""

    _fields_ = (
        ("input_norm", _POINTER),
        ("post_norm", _POINTER),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("qkv", LinearTable),
        ("o", LinearTable),
        ("gate_up", LinearTable),
        ("down", LinearTable),
        ("k_cache", _POINTER),
        ("v_cache", _POINTER),
        ("window", _INT),
        ("padding", _INT),
    )


class DecoderTable(ctypes.Structure):
    """QuireDecoder."""

    _fields_ = (
        ("layers", ctypes.POINTER(LayerTable)),
        ("embedding", _POINTER),
        ("last_norm", _POINTER),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("lm_head", LinearTable),
        ("is_bf16", _INT),
        ("activation", _INT),
        ("num_layers", _INT),
        ("num_heads", _INT),
        ("num_kv_heads", _INT),
        ("head_size", _INT),
        ("block_size", _INT),
        ("norm_eps", _FLOAT),
        ("qk_norm_eps", _FLOAT),
        ("splits_tokens", _INT),
    )


class StepTable(ctypes.Structure):
    """QuireStep."""

    _fields_ = (
        ("input_ids", _POINTER),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("query_starts", _POINTER),
        ("seq_lens", _POINTER),
        ("block_tables", _POINTER),
        ("sampling", _POINTER),
        ("num_tokens", _INT),
        ("num_requests", _INT),
        ("num_sampling", _INT),
        ("table_width", _INT),
        ("num_parts", _INT),
        ("padding", _INT),
    )


def check_layout(library: ctypes.CDLL) -> None:
    """Raises RuntimeError if the structs here are not those that the library was compiled with."""
    tables = (LinearTable, LayerTable, DecoderTable, StepTable)
    ours = [ctypes.sizeof(table) for table in tables]
    theirs = [library.quire_decoder_layout(which) for which in range(len(tables))]
    if ours != theirs:
        raise RuntimeError(f"decoder.py's structs have {ours} bytes, decoder.h's {theirs}")


class Workspace:
    """Memory for what a step computes between its inputs and its result; grows to the largest step's size."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size_bytes: int) -> int:
        """Address of at least so many bytes, aligned to 64; what was there before is void."""
        if self._memory.numel() < size_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # first, so that both are never held
            self._memory = torch.empty(size_bytes, dtype=torch.uint8)
        return self._memory.data_ptr()


def launch_decoder(
    library: ctypes.CDLL, decoder: DecoderTable, step: StepTable, workspace: Workspace, out: Tensor
) -> None:
    """Compute a step. `out` is contiguous on the CPU: float32 [S, vocab] logits of the sampling requests, or,
    where `step.sampling` is None, hidden states [T, hidden] of the model's type, after the last norm.

    All K and V of the step are in the caches afterwards.
    """
    addresses = ctypes.addressof(decoder), ctypes.addressof(step)
    size_bytes = library.quire_decoder_workspace(*addresses)
    library.quire_decoder_forward(*addresses, workspace.reserve(size_bytes), out.data_ptr())
