"""From an EngineConfig to a model with its weights on a device: tensors by name, fused, packed, counted.

Of several ranks each builds what its cuts of the weights give, and what joins the ranks' results.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from ...ipc.spec.config import AttentionBackendName, EngineConfig, ModelConfig
from ...ipc.spec.model_spec import (
    NO_FFN,
    AttentionSpec,
    BranchNormsSpec,
    DenseSpec,
    ExpertsSpec,
    KVCacheDtype,
    LatentSpec,
    LayerSpec,
    RopeConfig,
    find_ropes,
)
from ...ipc.spec.recurrent_spec import DeltaNetSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec
from ...ipc.spec.weight_format import LM_HEAD, WeightFormat
from ...kernels.choice import native_library
from ...kernels.group.shared_group import SharedGroup
from ...kernels.linear.linear import PackedWeight
from ...kernels.linear.xielu import XieluNumbers
from ...kernels.program.native import SWITCH, is_switched_off
from ...kernels.recurrent.causal_conv import CausalConv
from ...kernels.recurrent.delta_rule import DeltaRule
from ...kernels.recurrent.mamba2 import Mamba2
from ..attention import AttentionBackend, QKNorm, make_attention
from ..first_calls import make_first_calls
from ..layers.attention import Attention, make_position_bias
from ..layers.branched_experts import BranchedExperts
from ..layers.collectives import (
    AllReduce,
    GatheredLogits,
    RowParallelLinear,
    SharedRMSNorm,
    SummedFeedForward,
    TorchSharedRMSNorm,
    VocabParallelLookup,
)
from ..layers.delta_net import DeltaNet, DeltaRecurrence
from ..layers.embedding import Embedding, StageInput
from ..layers.feed_forward import MLP, Experts, FeedForward, GatedActivation, PlainMLP, Xielu
from ..layers.gate import Gate
from ..layers.latent_attention import HeadProducts, LatentAttention
from ..layers.layer_inputs import InputGate, LayerEnd, LayerInputs
from ..layers.linear import Linear, NativeLinear, TorchLinear, make_linear
from ..layers.logits import LogitsHead
from ..layers.mamba2 import Mamba2Mixer, Mamba2Scan
from ..layers.mixer import Mixer
from ..layers.norm import LayerNorm, NoNorm, RMSNorm, Scaled
from ..layers.recurrent import Convolution, Recurrence
from ..layers.rotary import RotaryEmbedding
from ..layers.short_conv import ShortConv
from ..pooling.head import load_pooling_head
from ..progress import show_progress
from ..threads import MAX_SINGLE_THREAD_WEIGHT_BYTES
from ..weights.gguf import GgufSource
from ..weights.integer_weight import NarrowWeight, dequantize
from ..weights.layer_weights import take_narrow_stacked
from ..weights.online import quantize
from ..weights.packed_cache import PackedCache, open_packed_cache
from ..weights.weights import (
    WHOLE,
    DummySource,
    HeadOrder,
    RankCuts,
    SafetensorsSource,
    TensorSlice,
    WeightSource,
    find_head_order,
)
from .coverage import check_covered
from .decoder import Decoder, DecoderLayer, Layer, Norm, ParallelLayer, SingleLayer, SumNormLayer
from .native_forward import make_native_forward

# Why a row may depend on the rows beside it, and what avoids that; for Decoder.batch_variance_reason.
INEXACT_LINEAR = "torch multiplies; a CPU with g++ has exact kernels for dtype float32 and bfloat16"
INEXACT_ATTENTION = "torch computes attention; a CPU with g++ has exact kernels for head sizes 8, 16, ... 640"
INEXACT_SUM = "NCCL chooses the order in which more than two ranks are added up; exact=True takes theirs"

# A smaller table is in each rank: a sum over ranks less in each step, for no memory to speak of.
MAX_COPIED_TABLE_BYTES = 32 << 20


_N = TypeVar("_N")
_R = TypeVar("_R", bound=Recurrence)

# Stands in for the layer that was made of the weights of these names.
WrapLinear = Callable[[Sequence[str], Linear], Linear]


def load_model(config: EngineConfig, device: torch.device, group: SharedGroup | None = None) -> Decoder:
    """Build what `config.model.spec` says and load its weights (or random ones).

    With `group` only this rank's part of them; a pass of it is one of all ranks together. Raises ModelError:
    a field of the spec that nothing here computes, or weights that are missing, corrupt or of a wrong shape.
    """
    spec = config.model.spec
    check_covered(spec)
    make_first_calls()
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    weights = open_weights(config.model, dtype, device)
    rank, num_ranks = (0, 1) if group is None else (group.rank, group.size)
    cache = open_packed_cache(config, device, rank, num_ranks)
    decoder = _Builder(config, weights, dtype, device, group, cache=cache).build()
    cache.finish()
    head = load_pooling_head(config, weights, device)
    if head is not None and (group is None or group.rank == 0):  # others pool nothing
        decoder.pooling_head = head
        decoder.weight_bytes += head.size_bytes
    weights.finish()
    return decoder


def build_stage(
    config: EngineConfig, weights: WeightSource, device: torch.device, wrap: WrapLinear
) -> Decoder:
    """Some layers of a model, as `config.model.spec` says, for who looks at what they are given.

    Every linear layer is replaced by what `wrap` makes of it. Tensors of `weights` may be left over.
    """
    check_covered(config.model.spec)
    make_first_calls()
    return _Builder(config, weights, getattr(torch, config.model.dtype), device, None, wrap).build()


class _Builder:
    """Takes tensors by their checkpoint names, fuses what is multiplied together, counts bytes."""

    def __init__(
        self,
        config: EngineConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        group: SharedGroup | None,
        wrap: WrapLinear | None = None,
        cache: PackedCache | None = None,
    ) -> None:
        self._wrap, self._cache = wrap, cache or PackedCache(None)
        self._spec = config.model.spec
        self._max_model_len = config.model.max_model_len
        self._max_step_tokens = config.scheduler.max_num_batched_tokens
        self._wants_exact = config.wants_exact
        self._attention_backend: AttentionBackendName = config.model.attention_backend
        self._kv_cache_dtype: KVCacheDtype = config.cache.kv_cache_dtype
        self._formats = config.model.weight_formats
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._group = group
        self._cuts = RankCuts() if group is None else RankCuts(group.rank, group.size)
        self._all_reduce = None if group is None else AllReduce(group, self._spec.hidden_size)
        self._state_offsets = self._spec.for_rank(self._cuts.size).state_offsets
        self._backends: dict[tuple[int, int, int, bool, LatentSpec | None], AttentionBackend] = {}
        self._size_bytes = 0
        self._position_bias: Tensor | None = None
        self._batch_variance_reason = "" if group is None or group.is_exact else INEXACT_SUM

    def build(self) -> Decoder:
        spec = self._spec
        ropes = find_ropes(spec)
        rotaries = [self._rotary(*rope) for rope in ropes]
        self._size_bytes += sum(rotary.size_bytes for rotary in rotaries)
        embedding, table = self._embedding()
        layer_inputs = self._layer_inputs()
        self._position_bias = self._make_position_bias()
        layers = self._layers(ropes)
        norm_name = spec.norm if spec.stage.is_last else None
        norm = NoNorm(spec.hidden_size) if norm_name is None else self._norm(norm_name, spec.hidden_size)
        head = self._logits_head(table) if spec.has_logits else None
        decoder = Decoder(
            embedding, rotaries, layers, norm, head, self._size_bytes, self._batch_variance_reason
        )
        decoder.layer_inputs = layer_inputs
        # Ranks must meet in the same operations, whatever threads each of them has.
        splits_tokens = self._group is None and decoder.weight_bytes <= MAX_SINGLE_THREAD_WEIGHT_BYTES
        splits_tokens = splits_tokens and spec.state_size == 0  # whose tokens come one after the other
        decoder.native = make_native_forward(
            decoder.emit, spec, embedding.table, rotaries, head, splits_tokens, self._group
        )
        return decoder

    def _layers(self, ropes: list[tuple[RopeConfig, int]]) -> list[Layer]:
        spec, layers = self._spec, list[Layer]()
        make_layer = self._sum_norm_layer if spec.layers[0].norms_sum else self._layer
        is_first = self._group is None or self._group.rank == 0
        parts = show_progress(spec.layers, "Loading weights", sys.stderr) if is_first else spec.layers
        for index, part in enumerate(parts):
            layer = make_layer(spec.layer_prefix.format(spec.stage.first_layer + index), part, index)
            rope = part.attention.rope or spec.rope
            layer.rope = None if rope.type == "none" else ropes.index((rope, part.attention.rope_head_size))
            layers.append(layer)
        return layers

    def _rotary(self, rope: RopeConfig, head_size: int) -> RotaryEmbedding:
        spec = self._spec
        return RotaryEmbedding(
            rope, head_size, spec.max_position_embeddings, self._max_model_len, self._device, self._dtype
        )

    def _embedding(self) -> tuple[Embedding | StageInput, Tensor]:
        """The embedding, and what of its table this rank computes logits with, if the model ties them.

        Of a later stage what stands in its place, and nothing of meaning where it ties nothing.
        """
        spec, names, hidden = self._spec, self._spec.embedding, self._spec.hidden_size
        cut = self._cuts.take_tokens(spec.vocab_size)
        if not spec.stage.is_first:
            inputs = torch.empty((self._max_step_tokens, hidden), dtype=self._dtype, device=self._device)
            is_tied = spec.has_logits and spec.tie_word_embeddings
            return StageInput(inputs), self._table(names.tokens, spec.vocab_size, cut) if is_tied else inputs
        table, part = self._token_table(names.tokens, spec.vocab_size, hidden)
        is_copied = part is None and cut != WHOLE
        tied = torch.cat(cut.find_pieces([table])) if is_copied else table
        types = None if names.types is None else self._table(names.types, names.num_types)
        positions = None
        if names.positions is not None:
            count = spec.max_position_embeddings + names.position_offset
            positions = self._table(names.positions, count)[names.position_offset :]
        norm = None if names.norm is None else self._norm(names.norm, hidden)
        return Embedding(table, spec.embedding_scale, positions, types, norm, part), tied

    def _token_table(self, name: str, num_rows: int, width: int) -> tuple[Tensor, VocabParallelLookup | None]:
        """A row for each token: a small one whole, of another this rank's part and how to look up in it."""
        cut = self._cuts.take_tokens(num_rows)
        if self._group is None or num_rows * width * self._dtype.itemsize <= MAX_COPIED_TABLE_BYTES:
            return self._table(name, num_rows, width=width), None
        lookup = VocabParallelLookup(cut.first_row, AllReduce(self._group, width))
        return self._table(name, num_rows, cut, width), lookup

    def _layer_inputs(self) -> LayerInputs | None:
        spec, hidden, width = (
            self._spec.per_layer_inputs,
            self._spec.hidden_size,
            self._spec.layer_inputs_size,
        )
        if spec is None:
            return None
        table, part = self._token_table(spec.tokens, spec.num_rows, width)
        return LayerInputs(
            Embedding(table, spec.size**0.5, part=part),
            self._linear([spec.projection], (width,), hidden, False, WHOLE),
            hidden**-0.5,
            self._rms_norm(spec.norm, spec.size),
            2**-0.5,
        )

    def _table(self, name: str, num_rows: int, cut: TensorSlice = WHOLE, width: int | None = None) -> Tensor:
        table = self._weights.take(f"{name}.weight", (num_rows, width or self._spec.hidden_size), cut)
        self._size_bytes += table.nbytes
        return table

    def _make_position_bias(self) -> Tensor | None:
        """What all layers' heads add to their scores; None where they add nothing."""
        bias = self._spec.relative_bias
        if bias is None:
            return None
        num_heads = self._spec.layers[0].attention.num_heads
        cut = self._cuts.take_columns(num_heads)
        table = self._weights.take(f"{bias.name}.weight", (bias.num_buckets, num_heads), cut)
        made = make_position_bias(table, bias.max_distance, self._max_model_len)
        self._size_bytes += made.nbytes
        return made

    def _sum_norm_layer(self, prefix: str, spec: LayerSpec, index: int) -> SumNormLayer:  # noqa: ARG002
        assert spec.attention_norm is not None
        assert spec.ffn_norm is not None
        hidden = self._spec.hidden_size
        return SumNormLayer(
            self._attention(prefix, spec.attention),
            self._norm(f"{prefix}.{spec.attention_norm}", hidden),
            self._feed_forward(prefix, spec.ffn),
            self._norm(f"{prefix}.{spec.ffn_norm}", hidden),
        )

    def _layer(self, prefix: str, spec: LayerSpec, index: int) -> DecoderLayer | ParallelLayer | SingleLayer:
        if not spec.has_mixer:
            ffn = self._feed_forward(prefix, spec.ffn)
            return SingleLayer(self._layer_norm(prefix, spec.ffn_norm), None, ffn)
        if spec.ffn == NO_FFN:
            norm = self._layer_norm(prefix, spec.attention_norm)
            return SingleLayer(norm, self._mixer(prefix, spec, index), None)
        if spec.is_parallel:
            norm = None if spec.ffn_norm is None else self._layer_norm(prefix, spec.ffn_norm)
            attention_norm = self._layer_norm(prefix, spec.attention_norm)
            attention = self._mixer(prefix, spec, index)
            return ParallelLayer(attention_norm, attention, norm, self._feed_forward(prefix, spec.ffn))
        return DecoderLayer(
            self._layer_norm(prefix, spec.attention_norm),
            self._mixer(prefix, spec, index),
            self._out_norm(prefix, spec.attention_out_norm, spec.residual_scale),
            self._layer_norm(prefix, spec.ffn_norm),
            self._feed_forward(prefix, spec.ffn),
            self._out_norm(prefix, spec.ffn_out_norm, spec.residual_scale),
            end=self._layer_end(prefix, spec, index),
        )

    def _layer_end(self, prefix: str, spec: LayerSpec, index: int) -> LayerEnd | None:
        hidden, part, inputs = self._spec.hidden_size, spec.layer_input, self._spec.per_layer_inputs
        gate, scalar = None, None
        if part is not None and inputs is not None:
            names = (f"{prefix}.{name}" for name in (part.gate, part.projection, part.norm))
            gate = InputGate(
                self._linear([next(names)], (inputs.size,), hidden, False, WHOLE),
                self._linear([next(names)], (hidden,), inputs.size, False, WHOLE),
                self._rms_norm(next(names), hidden),
                *(inputs.size, index * inputs.size, self._spec.layer_inputs_size),
            )
            gate.gate.activation = part.activation
        if spec.scalar is not None:
            scalar = Scaled(hidden, self._weights.take(f"{prefix}.{spec.scalar}", (1,)).item())
        return None if gate is None and scalar is None else LayerEnd(gate, scalar)

    def _out_norm(self, prefix: str, name: str | None, scale: float | None) -> Norm | Scaled:
        return self._layer_norm(prefix, name) if scale is None else Scaled(self._spec.hidden_size, scale)

    def _mixer(self, prefix: str, spec: LayerSpec, index: int) -> Mixer:
        if spec.recurrent is None:
            return self._attention(prefix, spec.attention)
        return self._recurrent(prefix, spec.recurrent, self._state_offsets[index])

    def _recurrent(self, prefix: str, spec: RecurrentSpec, offset: int) -> Mixer:
        if isinstance(spec, ShortConvSpec):
            return self._short_conv(prefix, spec, offset)
        if isinstance(spec, Mamba2Spec):
            return self._mamba2(prefix, spec, offset)
        return self._delta_net(prefix, spec, offset)

    def _mamba2(self, prefix: str, whole: Mamba2Spec, offset: int) -> Mamba2Mixer:
        hidden, cuts, spec = self._spec.hidden_size, self._cuts, whole.for_rank(self._cuts.size)
        inner, names = whole.inner_size, f"{prefix}.{whole.name}"
        width = whole.num_groups * whole.num_rows, whole.num_groups > 1  # a single group is each rank's
        parts = (inner, True), width, width
        cut = cuts.take_parts((inner, True), *parts, (whole.num_heads, True))
        size = whole.projected_size
        in_proj = self._linear([f"{names}.in_proj"], (size,), hidden, whole.bias, cut)
        conv = self._convolution(
            f"{names}.conv1d.weight",
            f"{names}.conv1d.bias" if whole.conv_bias else None,
            (whole.conv_size, whole.kernel_size),
            cuts.take_parts(*parts),
        )
        conv = conv._replace(offset=offset, first=spec.inner_size, activation="silu")
        heads = cuts.take_rows(whole.num_heads)
        rate, shift, skip = (
            torch.cat(heads.find_pieces([self._weights.take_floats(f"{names}.{part}", whole.num_heads)]))
            for part in ("A_log", "dt_bias", "D")
        )
        numbers = rate.exp(), shift.contiguous(), skip.contiguous()
        sizes = spec.head_size, spec.num_groups, spec.num_rows, whole.step_limit
        scan = Mamba2(*numbers, *sizes, offset + spec.scan_offset)
        out = self._linear([f"{names}.out_proj"], (hidden,), inner, whole.bias, cuts.take_columns(inner))
        if self._all_reduce is not None:
            out = RowParallelLinear(out, self._all_reduce)
        norms = self._group_norms(f"{names}.norm", whole)
        convolution, scan = self._settle(Convolution, conv), self._settle(Mamba2Scan, scan)
        gate = Gate("silu", self._dtype, self._device)
        return Mamba2Mixer(spec, in_proj, convolution, scan, gate, norms, out)

    def _group_norms(self, name: str, whole: Mamba2Spec) -> list[RMSNorm]:
        """Of this rank's numbers of each group."""
        norm = self._rms_norm(name, whole.inner_size, self._cuts.take_rows(whole.inner_size))
        if whole.num_groups == 1 and self._group is not None:
            kind = SharedRMSNorm if self._group.is_native else TorchSharedRMSNorm
            return [kind(norm, self._group, whole.inner_size, counts=True)]
        size = whole.inner_size // whole.num_groups
        return [RMSNorm(part, *norm.numbers) for part in norm.weight.split(size)]

    def _short_conv(self, prefix: str, spec: ShortConvSpec, offset: int) -> ShortConv:
        size, hidden, cuts = spec.num_channels, self._spec.hidden_size, self._cuts
        name, cut = f"{prefix}.{spec.in_proj}", cuts.take_rows(size, size, size)
        in_proj = self._linear([name], (3 * size,), hidden, spec.bias, cut)
        bias_name = f"{prefix}.{spec.conv}.bias" if spec.bias else None
        conv = self._convolution(
            f"{prefix}.{spec.conv}.weight", bias_name, (size, spec.kernel_size), cuts.take_rows(size)
        )
        conv = conv._replace(offset=offset, first=2 * size // cuts.size, is_gated=True)
        out = self._linear([f"{prefix}.{spec.out}"], (hidden,), size, spec.bias, cuts.take_columns(size))
        if self._all_reduce is not None:
            out = RowParallelLinear(out, self._all_reduce)
        return ShortConv(in_proj, self._settle(Convolution, conv), out)

    def _delta_net(self, prefix: str, whole: DeltaNetSpec, offset: int) -> DeltaNet:
        hidden, spec, heads = self._spec.hidden_size, whole.for_rank(self._cuts.size), whole.num_value_heads
        cut, gates_cut, channels = self._cuts.take_delta_heads(whole)
        wide, narrow = whole.sizes
        in_proj = self._linear([f"{prefix}.{name}" for name in whole.projections], wide, hidden, False, cut)
        gates = self._small_linear([f"{prefix}.{name}" for name in whole.gates], narrow, hidden, gates_cut)
        name, size = f"{prefix}.{whole.conv}.weight", (whole.num_channels, whole.kernel_size)
        conv = self._convolution(name, None, size, channels)._replace(offset=offset, activation="silu")
        share = self._cuts.take_columns(heads).columns or range(heads)
        rate, shift = (
            self._weights.take_floats(f"{prefix}.{name}", heads)[share.start : share.stop].contiguous()
            for name in (whole.rate, whole.shift)
        )
        sizes = (spec.num_key_heads, spec.num_value_heads, spec.key_size, spec.value_size)
        rate = rate.exp() if whole.rate_is_log else -rate
        rule = DeltaRule(rate, shift, *sizes, offset + spec.delta_offset, whole.is_tiled)
        weight = self._weights.take(f"{prefix}.{whole.norm}.weight", (whole.value_size,))
        cut = self._cuts.take_columns(whole.values_size)
        out = self._linear([f"{prefix}.{whole.out}"], (hidden,), whole.values_size, False, cut)
        if self._all_reduce is not None:
            out = RowParallelLinear(out, self._all_reduce)
        convolution, recurrence = self._settle(Convolution, conv), self._settle(DeltaRecurrence, rule)
        self._size_bytes += weight.nbytes
        norm, gate = RMSNorm(weight, self._spec.norm_eps), Gate("silu", self._dtype, self._device)
        return DeltaNet(in_proj, gates, convolution, recurrence, norm, gate, out)

    def _small_linear(self, names: list[str], sizes: tuple[int, ...], width: int, cut: TensorSlice) -> Linear:
        """As `_linear`, but never quantized here, only read as it is stored."""
        formats = [self._formats.find(name) for name in names]
        if any(format is not None and format.layout is not None for format in formats):
            return self._linear(names, sizes, width, False, cut)
        weight = self._weights.take_stacked([f"{name}.weight" for name in names], sizes, width, cut)
        linear = self._make_linear(weight)
        self._size_bytes += linear.size_bytes
        return linear

    def _convolution(
        self, name: str, bias_name: str | None, shape: tuple[int, int], cut: TensorSlice
    ) -> CausalConv:
        """Of channels and a kernel's size."""
        weight = self._weights.take_kernel(name, *shape, cut).t().contiguous()
        bias = None if bias_name is None else self._weights.take(bias_name, shape[:1], cut).float()
        return CausalConv(weight, bias)

    def _settle(self, kind: Callable[[_N, torch.dtype, torch.device], _R], numbers: _N) -> _R:
        """A recurrent operation. Where torch computes it, rows of a step are added up in its own order."""
        made = kind(numbers, self._dtype, self._device)
        if not made.is_exact:
            self._batch_variance_reason = self._batch_variance_reason or _explain(INEXACT_LINEAR)
        self._size_bytes += made.size_bytes
        return made

    def _latent_attention(self, prefix: str, whole: AttentionSpec, latent: LatentSpec) -> Mixer:
        """Queries are cut by heads, the projection to the latent is in each rank."""
        hidden, cuts, spec, q_a = self._spec.hidden_size, self._cuts, whole, None
        name, size, width = f"{prefix}.{latent.q}", whole.num_heads * latent.head_size, hidden
        if latent.q_rank is not None:
            first = self._linear([f"{prefix}.{latent.q_a}"], (latent.q_rank,), hidden, latent.bias, WHOLE)
            norm = self._rms_norm(f"{prefix}.{latent.q_a_norm}", latent.q_rank, eps=latent.norm_eps)
            q_a, name, width = (first, norm), f"{prefix}.{latent.q_b}", latent.q_rank
        rope = whole.rope or self._spec.rope
        order = find_head_order(rope, latent.rope_size) or (range(latent.rope_size),)
        order = tuple(part for part in order if part)

        def after(count: int) -> HeadOrder:
            return (range(count), *(range(x.start + count, x.stop + count, x.step) for x in order))

        cut = cuts.take_ordered_heads(whole.num_heads, after(latent.nope_size))
        q = self._linear([name], (size,), width, False, cut)
        cut = TensorSlice(after(latent.rank))
        kv_a = self._linear([f"{prefix}.{latent.kv_a}"], (latent.size,), hidden, latent.bias, cut)
        kv_norm = self._rms_norm(f"{prefix}.{latent.kv_a_norm}", latent.rank, eps=latent.norm_eps)
        keys, values = self._head_projections(prefix, whole, latent)
        absorb, expand = (
            HeadProducts([self._make_linear(each.contiguous()) for each in part])
            for part in (keys.transpose(1, 2), values)
        )
        self._size_bytes += absorb.size_bytes + expand.size_bytes
        cut = cuts.take_columns(whole.out_size)
        out = self._linear([f"{prefix}.{whole.out}"], (hidden,), whole.out_size, whole.o_bias, cut)
        if self._all_reduce is not None:
            spec, out = whole.for_rank(cuts.size), RowParallelLinear(out, self._all_reduce)
        return LatentAttention(spec, latent, q_a, q, kv_a, kv_norm, absorb, expand, out, self._backend(spec))

    def _head_projections(
        self, prefix: str, whole: AttentionSpec, latent: LatentSpec
    ) -> tuple[Tensor, Tensor]:
        """From a latent to keys and values of this rank's heads: [H, nope_size or value_size, rank]."""
        if self._weights.holds(f"{prefix}.{latent.kv_b}.weight"):
            both = self._key_values(f"{prefix}.{latent.kv_b}", whole, latent)
            heads = both.unflatten(0, (-1, latent.nope_size + latent.value_size))
            return heads[:, : latent.nope_size], heads[:, latent.nope_size :]
        share = self._cuts.take_columns(whole.num_heads).columns
        keys, values = list[Tensor](), list[Tensor]()
        for head in range(whole.num_heads):
            key, value = (f"{prefix}.{name.format(head)}.weight" for name in latent.split)
            if share is None or head in share:
                keys.append(self._weights.take(key, (latent.rank, latent.nope_size)).t())
                values.append(self._weights.take(value, (latent.value_size, latent.rank)))
            else:
                self._weights.skip(key)
                self._weights.skip(value)
        return torch.stack(keys), torch.stack(values)

    def _key_values(self, name: str, whole: AttentionSpec, latent: LatentSpec) -> Tensor:
        """The tensor of both in the model's type, whatever it is stored in."""
        num_out = whole.num_heads * (latent.nope_size + latent.value_size)
        format, cut = self._formats.find(name), self._cuts.take_rows(num_out)
        if format is None or format.layout is None:
            return self._weights.take(f"{name}.weight", (num_out, latent.rank), cut)
        weight = take_narrow_stacked(self._weights, [name], [format], (num_out,), latent.rank, cut)
        return dequantize(weight).to(self._device, self._dtype)

    def _attention(self, prefix: str, whole: AttentionSpec) -> Mixer:
        if whole.latent is not None:
            return self._latent_attention(prefix, whole, whole.latent)
        hidden, sizes = self._spec.hidden_size, whole.qkv_sizes
        names, cuts, spec = [f"{prefix}.{part}" for part in whole.qkv], self._cuts, whole
        order = find_head_order(whole.rope or self._spec.rope, whole.head_size)
        qkv = self._linear(names, sizes, hidden, whole.qkv_bias, cuts.take_heads(whole, order))
        cut = cuts.take_columns(whole.query_size)
        out = self._linear([f"{prefix}.{whole.out}"], (hidden,), whole.query_size, whole.o_bias, cut)
        if self._all_reduce is not None:
            spec, out = whole.for_rank(cuts.size), RowParallelLinear(out, self._all_reduce)
        norms, backend = self._qk_norms(prefix, whole, order), self._backend(spec)
        value_norm = None
        if whole.norms_values:
            weight = torch.ones(whole.head_size, dtype=self._dtype, device=self._device)
            value_norm = RMSNorm(weight, self._spec.norm_eps)
        gate = Gate("sigmoid", self._dtype, self._device) if whole.has_gate else None
        extra = self._position_bias, self._sinks(prefix, whole), value_norm, gate
        return Attention(spec, qkv, out, *norms, backend, *extra)

    def _sinks(self, prefix: str, spec: AttentionSpec) -> Tensor | None:
        if spec.sinks is None:
            return None
        cut = self._cuts.take_rows(spec.num_heads)
        sinks = self._weights.take(f"{prefix}.{spec.sinks}", (spec.num_heads,), cut).float()
        self._size_bytes += sinks.nbytes
        return sinks

    def _backend(self, spec: AttentionSpec) -> AttentionBackend:
        """One for all layers with the same heads."""
        heads = spec.num_heads, spec.num_kv_heads, spec.head_size, spec.sinks is not None, spec.latent
        if heads not in self._backends:
            backend = make_attention(
                *(spec, self._dtype, self._device, self._wants_exact),
                *(self._attention_backend, self._kv_cache_dtype),
            )
            if not backend.is_exact:
                self._batch_variance_reason = self._batch_variance_reason or _explain(INEXACT_ATTENTION)
            self._backends[heads] = backend
        return self._backends[heads]

    def _qk_norms(
        self, prefix: str, spec: AttentionSpec, order: HeadOrder | None
    ) -> tuple[QKNorm | None, tuple[RMSNorm, ...]]:
        """Norms of each head by itself, and of all queries and all keys; a model has one of them or none."""
        if spec.qk_norm is None:
            return None, ()
        names, cuts = [f"{prefix}.{name}" for name in (spec.q_norm, spec.k_norm)], self._cuts
        if spec.kv_layer is not None:
            names[1] = names[0]  # there are no keys
        if spec.qk_norm == "each_head":
            cut = WHOLE if order is None else TensorSlice(order)
            if not spec.qk_norm_has_weight:
                ones = torch.ones(spec.head_size, dtype=self._dtype, device=self._device)
                return QKNorm(ones, ones, self._spec.norm_eps, spec.norms_rotated), ()
            query, key = (self._rms_norm(name, spec.head_size, cut) for name in names)
            offset = self._spec.norm_weight_offset  # backends multiply by the weight alone
            weights = [norm.weight + offset if offset else norm.weight for norm in (query, key)]
            return QKNorm(weights[0], weights[1], self._spec.norm_eps, spec.norms_rotated), ()
        query_cut, key_cut = cuts.take_norm_heads(spec, order)
        query = self._rms_norm(names[0], spec.query_size, query_cut)
        key = self._rms_norm(names[1], spec.kv_size, key_cut)
        if self._group is not None:
            norm = SharedRMSNorm if self._group.is_native else TorchSharedRMSNorm
            query = norm(query, self._group, spec.query_size, counts=True)
            key = norm(key, self._group, spec.kv_size, cuts.is_first_of_keys(spec))
        return None, (query, key)

    def _feed_forward(self, prefix: str, spec: DenseSpec | ExpertsSpec) -> FeedForward:
        if isinstance(spec, ExpertsSpec) and spec.branch_norms is not None:
            return self._branches(prefix, spec, spec.branch_norms)
        ffn = self._dense(prefix, spec) if isinstance(spec, DenseSpec) else self._experts(prefix, spec)
        return ffn if self._all_reduce is None else SummedFeedForward(ffn, self._all_reduce)

    def _branches(self, prefix: str, spec: ExpertsSpec, norms: BranchNormsSpec) -> BranchedExperts:
        assert spec.shared is not None
        hidden = self._spec.hidden_size
        dense_in, dense_out, experts_in, experts_out = (
            self._rms_norm(f"{prefix}.{name}", hidden)
            for name in (norms.shared, norms.shared_out, norms.experts, norms.experts_out)
        )
        scale = self._weights.take(f"{prefix}.{norms.router_scale}", (hidden,)) * hidden**-0.5
        self._size_bytes += scale.nbytes
        return BranchedExperts(
            self._experts(prefix, replace(spec, shared=None)),
            self._dense(prefix, spec.shared),
            RMSNorm(scale, self._spec.norm_eps),
            (dense_in, experts_in),
            (dense_out, experts_out),
            self._all_reduce,
        )

    def _experts(self, prefix: str, spec: ExpertsSpec) -> Experts:
        self._weights.find_in_stacks(prefix, spec)
        names = [
            [name.format(e) for name in (spec.gate, spec.up, spec.down)] for e in range(spec.num_experts)
        ]
        experts = [self._mlp(prefix, replace(spec, gate=g, up=u, down=d)) for g, u, d in names]
        # A rounding in the router may send a token to another expert, so its weight is never quantized.
        router = self._plain_linear(
            f"{prefix}.{spec.router}", spec.num_experts, spec.router_bias, spec.router_is_float32
        )
        shared, gate = None, None
        correction, scales = (
            self._expert_numbers(prefix, name, spec.num_experts)
            for name in (spec.correction, spec.expert_scales)
        )
        if spec.shared is not None:
            shared = self._dense(prefix, spec.shared)
        if spec.shared_gate is not None:
            gate = self._plain_linear(f"{prefix}.{spec.shared_gate}", 1)
        return Experts(spec.for_rank(self._cuts.size), router, experts, correction, shared, gate, scales)

    def _expert_numbers(self, prefix: str, name: str | None, count: int) -> Tensor | None:
        if name is None:
            return None
        numbers = self._weights.take_floats(f"{prefix}.{name}", count)
        self._size_bytes += numbers.nbytes
        return numbers

    def _plain_linear(
        self, name: str, num_out: int, has_bias: bool = False, is_float32: bool = False
    ) -> Linear:
        """One that each rank has whole, in the model's type or in float32, then without a bias."""
        weight = self._weights.take(f"{name}.weight", (num_out, self._spec.hidden_size))
        if is_float32:
            assert not has_bias
            linear = make_linear(weight.float(), is_strict=self._wants_exact)
            self._size_bytes += linear.size_bytes
            return linear
        linear = self._make_linear(
            weight, self._weights.take(f"{name}.bias", (num_out,)) if has_bias else None
        )
        self._size_bytes += linear.size_bytes
        return linear

    def _dense(self, prefix: str, spec: DenseSpec) -> MLP | PlainMLP:
        if spec.is_gated:
            return self._mlp(prefix, spec)
        hidden, width = self._spec.hidden_size, spec.intermediate_size
        up = self._linear([f"{prefix}.{spec.up}"], (width,), hidden, spec.bias, self._cuts.take_rows(width))
        up.activation = spec.activation if spec.xielu is None else None
        xielu = None if spec.xielu is None else self._xielu(prefix, spec.xielu)
        return PlainMLP(up, self._down(prefix, spec, spec.has_down_bias), width // self._cuts.size, xielu)

    def _xielu(self, prefix: str, numbers: str | tuple[float, ...]) -> Xielu:
        """Of what transformers stores: logarithms of the alphas, and buffers that are scalars."""
        if isinstance(numbers, str):
            names = (f"{prefix}.{numbers}.{part}" for part in ("alpha_p", "alpha_n", "beta", "eps"))
            numbers = tuple(self._weights.take(name, (1,)).item() for name in names)
        alpha_p, alpha_n, beta, eps = numbers
        alphas = math.log1p(math.exp(alpha_p)), beta + math.log1p(math.exp(alpha_n))
        return Xielu(XieluNumbers(*alphas, beta, eps), self._dtype, self._device)

    def _mlp(self, prefix: str, spec: DenseSpec | ExpertsSpec) -> MLP:
        hidden, width = self._spec.hidden_size, spec.intermediate_size
        is_dense = isinstance(spec, DenseSpec)
        has_down_bias = spec.has_down_bias if is_dense else spec.bias
        names, sizes = [f"{prefix}.{spec.gate}", f"{prefix}.{spec.up}"], (width, width)
        fused = spec.fused if is_dense else None
        if fused is not None:
            names, sizes = names[:1], (2 * width,)
        cut = self._cuts.take_rows(width, width)
        return MLP(
            self._linear(names, sizes, hidden, spec.bias, cut, swaps_halves=fused == "up_gate"),
            GatedActivation(spec.activation, self._dtype, self._device),
            self._down(prefix, spec, has_down_bias),
            width // self._cuts.size,
        )

    def _down(self, prefix: str, spec: DenseSpec | ExpertsSpec, has_bias: bool) -> Linear:
        width = spec.intermediate_size
        cut = self._cuts.take_columns(width)
        return self._linear([f"{prefix}.{spec.down}"], (self._spec.hidden_size,), width, has_bias, cut)

    def _linear(
        self,
        names: list[str],
        sizes: tuple[int, ...],
        width: int,
        has_bias: bool,
        cut: TensorSlice,
        swaps_halves: bool = False,
    ) -> Linear:
        """One layer for projections of the same input, stacked in the order of `names`."""
        formats = [self._formats.find(name) for name in names]
        weight = self._cache.take(names, self._weights)
        if weight is None:
            weight = self._take_weight(names, formats, sizes, width, cut, swaps_halves)
        bias, bias_names = None, [f"{name}.bias" for name in names]
        if has_bias and cut.columns is not None and self._cuts.rank > 0:  # rank 0 adds it to the sum
            self._weights.skip(bias_names[0])
        elif has_bias:
            bias = self._weights.take_stacked(bias_names, sizes, None, cut.of_vector())
        if swaps_halves and bias is not None:
            bias = bias.roll(len(bias) // 2)
        linear = self._make_linear(weight, bias, formats[0])
        self._size_bytes += linear.size_bytes
        if any(formats):
            self._cache.keep(names[0], linear)
        return linear if self._wrap is None else self._wrap(names, linear)

    def _take_weight(
        self,
        names: list[str],
        formats: list[WeightFormat | None],
        sizes: tuple[int, ...],
        width: int,
        cut: TensorSlice,
        swaps_halves: bool,
    ) -> Tensor | NarrowWeight:
        """As the checkpoint has it."""
        if any(each is not None and each.layout is not None for each in formats):
            return take_narrow_stacked(self._weights, names, formats, sizes, width, cut, swaps_halves)
        if self._spec.transposed_linears:
            stack = [
                self._weights.take(f"{name}.weight", (width, size)).t()
                for name, size in zip(names, sizes, strict=True)
            ]
            weight = torch.cat(cut.find_pieces(stack)).contiguous()
        else:
            weight = self._weights.take_stacked([f"{name}.weight" for name in names], sizes, width, cut)
        return weight.roll(len(weight) // 2, 0) if swaps_halves else weight

    def _make_linear(
        self,
        weight: Tensor | NarrowWeight | PackedWeight,
        bias: Tensor | None = None,
        format: WeightFormat | None = None,
    ) -> Linear:
        """`format` is what a plain weight becomes."""
        if isinstance(weight, PackedWeight):
            return NativeLinear(native_library(), weight, bias, self._dtype)
        if format is not None and isinstance(weight, Tensor):
            weight = quantize(weight, format)
        linear = make_linear(weight, bias, self._dtype, is_strict=self._wants_exact)
        if not linear.is_exact:
            self._batch_variance_reason = _explain(INEXACT_LINEAR)
        return linear

    def _layer_norm(self, prefix: str, name: str | None) -> Norm:
        hidden = self._spec.hidden_size
        return NoNorm(hidden) if name is None else self._norm(f"{prefix}.{name}", hidden)

    def _norm(self, name: str, size: int) -> RMSNorm | LayerNorm:
        """A norm of hidden states, of the model's kind."""
        spec = self._spec
        if spec.norm_kind == "rms":
            return self._rms_norm(name, size)
        if spec.norm_has_weight:
            weight = self._weights.take(f"{name}.weight", (size,)) + spec.norm_weight_offset
        else:
            weight = torch.ones(size, dtype=self._dtype, device=self._device)
        bias = None
        if spec.norm_bias:
            bias = self._weights.take(f"{name}.bias", (size,))
        self._size_bytes += weight.nbytes + (0 if bias is None else bias.nbytes)
        return LayerNorm(weight, bias, spec.norm_eps)

    def _rms_norm(self, name: str, size: int, cut: TensorSlice = WHOLE, eps: float | None = None) -> RMSNorm:
        spec, weight = self._spec, self._weights.take(f"{name}.weight", (size,), cut)
        self._size_bytes += weight.nbytes
        return RMSNorm(weight, eps or spec.norm_eps, spec.norm_weight_offset, spec.norm_rounds_normed)

    def _logits_head(self, table: Tensor) -> LogitsHead:
        spec, vocab_size, soft_cap = self._spec, self._spec.vocab_size, self._spec.logit_soft_cap
        scale = None if spec.logit_scale is None else Scaled(spec.hidden_size, spec.logit_scale)
        cut = self._cuts.take_tokens(vocab_size)
        linear = self._lm_head(table, cut)
        if self._group is None:
            return LogitsHead(linear, vocab_size, soft_cap, scale)
        return LogitsHead(linear, cut.num_rows, soft_cap, scale, GatheredLogits(self._group, vocab_size))

    def _lm_head(self, table: Tensor, cut: TensorSlice) -> Linear:
        """The projection to logits: its own weight, or the embedding's table where config.json ties the two.

        A tied checkpoint may hold a second copy, which is not read.
        """
        name, format = f"{LM_HEAD}.weight", self._formats.find(LM_HEAD)
        size, hidden = self._spec.vocab_size, self._spec.hidden_size
        tokens = self._spec.embedding.tokens
        tied = self._formats.exceptions.get(tokens)
        bias = None
        if self._spec.lm_head_bias:
            bias = self._weights.take(f"{LM_HEAD}.bias", (size,), cut.of_vector())
        packed = self._cache.take([LM_HEAD], self._weights)
        if packed is not None:
            linear = self._make_linear(packed, bias)
        elif self._spec.tie_word_embeddings and tied is not None:
            self._weights.skip(name)  # multiplied in the form that it is stored in
            weight = take_narrow_stacked(self._weights, [tokens], [tied], (size,), hidden, cut)
            linear = self._make_linear(weight, bias)
        elif self._spec.tie_word_embeddings:
            self._weights.skip(name)
            online = None if format is None or format.layout else format
            linear = self._make_linear(table, bias, online)
        elif format is not None and format.layout is not None:
            weight = take_narrow_stacked(self._weights, [LM_HEAD], [format], (size,), hidden, cut)
            linear = self._make_linear(weight, bias)
        else:
            linear = self._make_linear(self._weights.take(name, (size, hidden), cut), bias, format)
        if format is not None or tied is not None:
            self._cache.keep(LM_HEAD, linear)
        if not (isinstance(linear, TorchLinear) and linear.weight is table):
            self._size_bytes += linear.size_bytes
        return linear


def _explain(reason: str) -> str:
    """The reason, and the switch if that is in it."""
    return f"{reason}; {SWITCH}=0 keeps them off" if is_switched_off() else reason


def open_weights(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> WeightSource:
    """The source that `model.load_format` and its files name. ModelError when they cannot be used."""
    if model.load_format == "dummy":
        return DummySource(model.seed, dtype, device)
    if model.gguf_tensors:
        return GgufSource(model, dtype, device)
    spec = model.spec
    naming = spec.optional_prefix, spec.unused_tensors, spec.stored_prefixes
    return SafetensorsSource(Path(model.model), model.weight_files, dtype, device, *naming)
