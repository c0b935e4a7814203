"""A decoder's forward pass as one native call, for decoders whose every piece is one of our CPU kernels.

It holds a table of the decoder's addresses and nothing else of the model: the layers keep the tensors.
Legend: T tokens, S requests that sample, D head size.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...ipc.config import ModelShape
from ...kernels.decoder import (
    ACTIVATIONS,
    DecoderTable,
    LayerTable,
    LinearTable,
    StepTable,
    Workspace,
    check_layout,
    launch_decoder,
)
from ...kernels.native import find_library
from ...kernels.paged_attention import NO_WINDOW
from ..attention.metadata import AttentionMetadata, KVCaches
from ..attention.native_attention import NativeAttention
from ..layers.linear import Linear, NativeLinear
from ..threads import MAX_SINGLE_THREAD_WEIGHT_BYTES

if TYPE_CHECKING:  # it imports this module
    from .decoder import Decoder, DecoderLayer


class NativeForward:
    """Computes what the layers of a `Decoder` compute, to the bit. Made by `make_native_forward`."""

    def __init__(self, library: ctypes.CDLL, decoder: Decoder, shape: ModelShape) -> None:
        check_layout(library)
        self.library = library
        self._hidden_size, self._vocab_size = shape.hidden_size, shape.vocab_size
        self._dtype = decoder.embedding.table.dtype
        self._rotary = decoder.rotary
        self._layers = (LayerTable * shape.num_layers)(*map(_make_layer, decoder.layers))
        self._table = _make_decoder(decoder, shape, self._layers)
        self._kv_caches: KVCaches | None = None
        self._workspace = Workspace()

    def compute_hidden(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: KVCaches,
        metadata: AttentionMetadata,
        rope_lengths: Tensor | None,
    ) -> Tensor:
        """[T, hidden] as `CausalLM.forward`."""
        angles = None if rope_lengths is None else self._rotary(positions, rope_lengths)
        num_requests, table_width = metadata.block_tables.shape
        step = StepTable(
            input_ids=input_ids.data_ptr(),
            positions=positions.data_ptr(),
            slots=metadata.slot_mapping.data_ptr(),
            cos=None if angles is None else angles[0].data_ptr(),
            sin=None if angles is None else angles[1].data_ptr(),
            query_starts=metadata.query_starts.data_ptr(),
            seq_lens=metadata.seq_lens.data_ptr(),
            block_tables=metadata.block_tables.data_ptr(),
            num_tokens=len(input_ids),
            num_requests=num_requests,
            table_width=table_width,
        )
        out = torch.empty((len(input_ids), self._hidden_size), dtype=self._dtype)
        self._launch(step, kv_caches, out)
        return out

    def compute_step_logits(self, step: StepTable, kv_caches: KVCaches) -> Tensor:
        """float32 [S, vocab]: logits of each sampling request's last token. Writes K and V of all tokens."""
        out = torch.empty((step.num_sampling, self._vocab_size), dtype=torch.float32)
        self._launch(step, kv_caches, out)
        return out

    def _launch(self, step: StepTable, kv_caches: KVCaches, out: Tensor) -> None:
        if kv_caches is not self._kv_caches:
            self._bind(kv_caches)
        launch_decoder(self.library, self._table, step, self._workspace, out)

    def _bind(self, kv_caches: KVCaches) -> None:
        """Note where the caches are; a model is used with one set of them, but tests make several."""
        self._table.block_size = kv_caches[0][0].shape[2]
        for layer, (k_cache, v_cache) in zip(self._layers, kv_caches, strict=True):
            layer.k_cache, layer.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
        self._kv_caches = kv_caches


def make_native_forward(decoder: Decoder, shape: ModelShape) -> NativeForward | None:
    """The native pass of `decoder`, None if some piece of it is not one of our CPU kernels."""
    table = decoder.embedding.table
    library = find_library(table.dtype, table.device)
    if library is None or shape.activation not in ACTIVATIONS:
        return None
    for layer in decoder.layers:
        linears = (
            layer.attention.qkv_proj,
            layer.attention.o_proj,
            layer.mlp.gate_up_proj,
            layer.mlp.down_proj,
        )
        if not all(isinstance(linear, NativeLinear) for linear in linears):
            return None
        if not isinstance(layer.attention.backend, NativeAttention):
            return None
    if not isinstance(decoder.lm_head, NativeLinear):
        return None
    return NativeForward(library, decoder, shape)


def _make_decoder(decoder: Decoder, shape: ModelShape, layers: ctypes.Array[LayerTable]) -> DecoderTable:
    cos, sin = decoder.rotary.tables or (None, None)
    qk_norm = decoder.layers[0].attention.qk_norm
    return DecoderTable(
        layers=layers,
        embedding=decoder.embedding.table.data_ptr(),
        last_norm=decoder.norm.weight.data_ptr(),
        cos=None if cos is None else cos.data_ptr(),
        sin=None if sin is None else sin.data_ptr(),
        lm_head=_make_linear(decoder.lm_head),
        is_bf16=decoder.embedding.table.dtype is torch.bfloat16,
        activation=ACTIVATIONS[shape.activation],
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        norm_eps=decoder.norm.eps,
        qk_norm_eps=0.0 if qk_norm is None else qk_norm[2],
        splits_tokens=decoder.weight_bytes <= MAX_SINGLE_THREAD_WEIGHT_BYTES,
    )


def _make_layer(layer: DecoderLayer) -> LayerTable:
    attention = layer.attention
    query_norm, key_norm = (None, None) if attention.qk_norm is None else attention.qk_norm[:2]
    return LayerTable(
        input_norm=layer.input_norm.weight.data_ptr(),
        post_norm=layer.post_norm.weight.data_ptr(),
        query_norm=None if query_norm is None else query_norm.data_ptr(),
        key_norm=None if key_norm is None else key_norm.data_ptr(),
        qkv=_make_linear(attention.qkv_proj),
        o=_make_linear(attention.o_proj),
        gate_up=_make_linear(layer.mlp.gate_up_proj),
        down=_make_linear(layer.mlp.down_proj),
        window=NO_WINDOW if attention.window is None else attention.window,
    )


def _make_linear(linear: Linear) -> LinearTable:
    assert isinstance(linear, NativeLinear)
    return linear.to_table()
