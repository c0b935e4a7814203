"""The model of all families: layers that differ in what their `LayerSpec` says, and one order of calls.

Legend: T tokens, S positions to score.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.program.program import OUT, Add, Kind, Program, Slot
from ..attention import AttentionBackend
from ..attention.metadata import AttentionMetadata, KVCaches
from ..layers.embedding import Embedding, StageInput
from ..layers.feed_forward import FeedForward
from ..layers.layer_inputs import LayerEnd, LayerInputs
from ..layers.logits import LogitsHead
from ..layers.mixer import Mixer
from ..layers.norm import LayerNorm, NoNorm, RMSNorm, Scaled
from ..layers.rotary import Angles, AngleSlots, RotaryEmbedding
from ..pooling.head import PoolingHead
from .model import Model
from .native_forward import NativeForward

Norm = RMSNorm | LayerNorm | NoNorm


@dataclass(eq=False)
class DecoderLayer:
    """A mixer and a feed-forward part; each has a norm before it, of the sum of everything so far, and an
    out norm after it, of what it adds to that sum.
    """

    attention_norm: Norm
    mixer: Mixer
    attention_out_norm: Norm | Scaled
    ffn_norm: Norm
    ffn: FeedForward
    ffn_out_norm: Norm | Scaled
    rope: int | None = 0  # of the model's ropes; None: nothing is rotated
    end: LayerEnd | None = None

    def __call__(
        self,
        delta: Tensor | None,
        residual: Tensor,
        angles: Angles | None,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        inputs: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """(this layer's ffn output, which is not added yet; the sum of everything before it).

        `delta` is the ffn output of the layer before, None in the first layer; `inputs` are all layers'.
        """
        if delta is None:
            normed = self.attention_norm(residual)
        else:
            normed, residual = self.attention_norm.add(delta, residual)
        delta = self.attention_out_norm(self.mixer(normed, angles, kv_cache, metadata))
        normed, residual = self.ffn_norm.add(delta, residual)
        delta = self.ffn_out_norm(self.ffn(normed))
        return (delta, residual) if self.end is None else self.end(delta, residual, inputs)

    def emit(
        self,
        program: Program,
        angles: AngleSlots | None,
        layer: int,
        is_last: bool,
        read_later: tuple[Slot, ...] = (),
    ) -> None:
        """The same as operations. Of the last layer only sampled tokens need more than K, V and states.

        It is the last that has some of its own; those after it, and ends of layers, read `read_later`.
        """
        residual, normed, delta = find_streams(program, self.ffn_norm.size)
        before = (delta, normed, residual) if layer else (residual, normed)
        mixed = self.mixer.emit_write(program, self.attention_norm.emit(program, *before), angles, layer)
        if is_last and program.wants_logits:
            program.keep_sampled((*mixed, residual, *read_later))
        self.mixer.emit_attend(program, mixed, delta, layer)
        self.attention_out_norm.emit(program, delta, delta)
        self.ffn.emit(program, self.ffn_norm.emit(program, delta, normed, residual), delta)
        self.ffn_out_norm.emit(program, delta, delta)
        if self.end is not None:
            self.end.emit(program, delta, residual)


@dataclass(eq=False)
class ParallelLayer:
    """Both parts read the sum of everything before the layer, normed; without `ffn_norm` by the same norm.

    Called as a DecoderLayer.
    """

    attention_norm: Norm
    mixer: Mixer
    ffn_norm: Norm | None
    ffn: FeedForward
    rope: int | None = 0

    def __call__(
        self,
        delta: Tensor | None,
        residual: Tensor,
        angles: Angles | None,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        inputs: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[Tensor | None, Tensor]:
        if delta is None:
            normed = self.attention_norm(residual)
        else:
            normed, residual = self.attention_norm.add(delta, residual)
        added = self.ffn(normed if self.ffn_norm is None else self.ffn_norm(residual))
        residual += self.mixer(normed, angles, kv_cache, metadata)
        return added, residual

    def emit(
        self,
        program: Program,
        angles: AngleSlots | None,
        layer: int,
        is_last: bool,
        read_later: tuple[Slot, ...] = (),  # noqa: ARG002
    ) -> None:
        """The same as operations. Of the last layer only sampled tokens need more than K, V and states."""
        size = self.attention_norm.size
        residual, normed, delta = find_streams(program, size)
        before = (delta, normed, residual) if layer else (residual, normed)
        normed = self.attention_norm.emit(program, *before)
        mixed = self.mixer.emit_write(program, normed, angles, layer)
        if is_last and program.wants_logits:
            program.keep_sampled((*mixed, residual, normed))
        if self.ffn_norm is not None:
            normed = self.ffn_norm.emit(program, residual, program.slot("normed", size))
        self.mixer.emit_attend(program, mixed, delta, layer)
        program.add(Kind.ADD, Add(x=delta, residual=residual, size=size))
        self.ffn.emit(program, normed, delta)


@dataclass(eq=False)
class SingleLayer:
    """One part, of the norm of the sum of everything before the layer. Called as a DecoderLayer."""

    norm: Norm
    mixer: Mixer | None  # or else
    ffn: FeedForward | None
    rope: int | None = 0

    def __call__(
        self,
        delta: Tensor | None,
        residual: Tensor,
        angles: Angles | None,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        inputs: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[Tensor | None, Tensor]:
        if delta is None:
            normed = self.norm(residual)
        else:
            normed, residual = self.norm.add(delta, residual)
        if self.mixer is not None:
            return self.mixer(normed, angles, kv_cache, metadata), residual
        assert self.ffn is not None
        return self.ffn(normed), residual

    def emit(
        self,
        program: Program,
        angles: AngleSlots | None,
        layer: int,
        is_last: bool,
        read_later: tuple[Slot, ...] = (),
    ) -> None:
        """The same as operations, as of a DecoderLayer."""
        residual, normed, delta = find_streams(program, self.norm.size)
        before = (delta, normed, residual) if layer else (residual, normed)
        normed = self.norm.emit(program, *before)
        if self.ffn is not None:
            self.ffn.emit(program, normed, delta)
        if self.mixer is None:
            return
        mixed = self.mixer.emit_write(program, normed, angles, layer)
        if is_last and program.wants_logits:
            program.keep_sampled((*mixed, residual, *read_later))
        self.mixer.emit_attend(program, mixed, delta, layer)


@dataclass(eq=False)
class SumNormLayer:
    """h = norm(h + attention(h)), then the same with the feed-forward part: BERT's layer.

    Called as a DecoderLayer, but nothing is left to be added, and after the last layer there is no norm.
    """

    mixer: Mixer
    attention_norm: RMSNorm | LayerNorm
    ffn: FeedForward
    ffn_norm: RMSNorm | LayerNorm
    rope: int | None = None

    def __call__(
        self,
        delta: Tensor | None,
        residual: Tensor,
        angles: Angles | None,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        inputs: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[Tensor | None, Tensor]:
        assert delta is None
        attended = self.mixer(residual, angles, kv_cache, metadata)
        hidden, _ = self.attention_norm.add(attended, residual)
        return None, self.ffn_norm.add(self.ffn(hidden), hidden)[0]

    def emit(
        self,
        program: Program,
        angles: AngleSlots | None,
        layer: int,
        is_last: bool,
        read_later: tuple[Slot, ...] = (),  # noqa: ARG002
    ) -> None:
        """The same as operations, of all tokens; the last layer's result is the program's."""
        hidden, _, delta = find_streams(program, self.ffn_norm.size)
        mixed = self.mixer.emit_write(program, hidden, angles, layer)
        self.mixer.emit_attend(program, mixed, delta, layer)
        self.attention_norm.emit(program, delta, hidden, hidden)
        self.ffn.emit(program, hidden, delta)
        self.ffn_norm.emit(program, delta, OUT if is_last else hidden, hidden)


Layer = DecoderLayer | ParallelLayer | SingleLayer | SumNormLayer


@dataclass(eq=False)
class Decoder(Model):
    """Embedding, layers, last norm and the projection to logits.

    Encoders too: their layers see whole prompts, `kv_caches` is scratch of one step, and they have no `head`.
    """

    embedding: Embedding | StageInput
    ropes: list[RotaryEmbedding]
    layers: list[Layer]
    norm: Norm
    head: LogitsHead | None
    weight_bytes: int
    batch_variance_reason: str
    layer_inputs: LayerInputs | None = None
    native: NativeForward | None = None
    pooling_head: PoolingHead | None = None

    @property
    def is_capturable(self) -> bool:
        parts = (*self.attention_backends, *(layer.ffn for layer in self.layers if layer.ffn is not None))
        return all(part.is_capturable for part in parts)

    @property
    def attention_backends(self) -> list[AttentionBackend]:
        return list(
            dict.fromkeys(backend for layer in self.layers if layer.mixer for backend in layer.mixer.backends)
        )

    @property
    def captures_chunks(self) -> bool:
        return self.is_capturable and all(each.captures_chunks for each in self.attention_backends)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: KVCaches,
        metadata: AttentionMetadata,
        rope_lengths: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        if self.native is not None:
            return self.native.compute_hidden(
                input_ids, positions, kv_caches, metadata, rope_lengths, token_types
            )
        angles = [rope(positions, rope_lengths) for rope in self.ropes]
        delta: Tensor | None = None
        residual = self.embedding(input_ids, positions, token_types)  # [T, hidden]
        inputs = None if self.layer_inputs is None else self.layer_inputs(input_ids, positions, residual)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            rotation = None if layer.rope is None else angles[layer.rope]
            delta, residual = layer(delta, residual, rotation, kv_cache, metadata, inputs)
        return self.norm(residual) if delta is None else self.norm.add(delta, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        assert self.head is not None
        return self.head(hidden)

    def emit(self, program: Program) -> None:
        """The same as operations, up to hidden states or logits. Raises NotNativeError."""
        residual, normed, delta = find_streams(program, self.norm.size)
        self.embedding.emit(program, residual)
        read_later: tuple[Slot, ...] = ()
        if self.layer_inputs is not None:
            read_later = (self.layer_inputs.emit(program, residual),)
        angles = [rope.emit(program, index) for index, rope in enumerate(self.ropes)]
        last = max(index for index, layer in enumerate(self.layers) if layer.mixer and layer.mixer.writes)
        for layer in self.layers[last + 1 :]:
            read_later += () if layer.rope is None else angles[layer.rope][:2]
        for index, layer in enumerate(self.layers):
            rotation = None if layer.rope is None else angles[layer.rope]
            layer.emit(program, rotation, index, index == last, tuple(dict.fromkeys(read_later)))
        if isinstance(self.layers[-1], SumNormLayer):  # the layers norm what they give
            return
        self.norm.emit(program, delta, normed if program.wants_logits else OUT, residual)
        if program.wants_logits:
            assert self.head is not None
            self.head.emit(program, normed)


def find_streams(program: Program, hidden_size: int) -> tuple[Slot, Slot, Slot]:
    """The slots of the sum of all layers so far, of its norm, and of what the next part adds to it."""
    residual, normed, delta = (program.slot(name, hidden_size) for name in ("residual", "normed", "delta"))
    return residual, normed, delta
