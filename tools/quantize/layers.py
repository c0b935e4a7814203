"""LayerStream: a model layer by layer, with the hidden states of calibration texts passed on between them.

At a time it holds one layer, and of each linear layer the Gram matrix of what it is given.
Legend: T tokens of all texts, K inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from ...ipc.spec.config import EngineConfig
from ...ipc.spec.linear_shapes import LinearShape, list_layer_linears
from ...ipc.spec.model_spec import StageSpec, has_dynamic_rope
from ...worker.attention.metadata import AttentionMetadata
from ...worker.kv_cache import allocate_kv_caches
from ...worker.layers.embedding import StageInput
from ...worker.layers.linear import Linear
from ...worker.models.builder import WrapLinear, build_stage
from ...worker.models.decoder import Decoder
from ...worker.weights.weights import WHOLE, SafetensorsSource, TensorSlice, WeightSource

_CPU = torch.device("cpu")


class _Recorder(Linear):
    """A linear layer that adds up the Gram matrix of what it is given, float32 [K, K]."""

    def __init__(self, inner: Linear, num_in: int) -> None:
        super().__init__(inner.weight, None)
        self._inner = inner
        self.gram = torch.zeros(num_in, num_in)

    def multiply(self, x: Tensor) -> Tensor:
        wide = x.float()
        self.gram.addmm_(wide.T, wide)
        return self._inner.multiply(x)


class _Overlay(WeightSource):
    """Another source's tensors, except those that were replaced, in the model's type."""

    def __init__(self, inner: WeightSource, replaced: dict[str, Tensor], dtype: torch.dtype) -> None:
        self._inner, self._replaced, self._dtype = inner, replaced, dtype

    def _read_stacked(
        self, names: Sequence[str], sizes: Sequence[int], width: int | None, cut: TensorSlice
    ) -> Tensor:
        if self._replaced.keys().isdisjoint(names):
            return self._inner.take_stacked(names, sizes, width, cut)
        assert cut == WHOLE
        return torch.cat([self._replaced[name] for name in names]).to(self._dtype)

    def take_kernel(self, name: str, num_channels: int, size: int, cut: TensorSlice = WHOLE) -> Tensor:
        return self._inner.take_kernel(name, num_channels, size, cut)


@dataclass(frozen=True, slots=True)
class Together:
    """Linear layers that are given the same, and the Gram matrix of that."""

    shapes: tuple[LinearShape, ...]
    gram: Tensor | None  # float32 [K, K]; None where nothing was recorded


class LayerStream:
    """`config` is of one rank on the CPU, `tokens` int64 [texts, length]; a step has `texts_per_step`."""

    def __init__(self, config: EngineConfig, tokens: Tensor, texts_per_step: int) -> None:
        model, spec = config.model, config.model.spec
        self._config, self._spec, self._tokens = config, spec, tokens
        self._texts_per_step = texts_per_step
        self._dtype: torch.dtype = getattr(torch, model.dtype)
        self.weights = SafetensorsSource(
            Path(model.model),
            model.weight_files,
            self._dtype,
            _CPU,
            spec.optional_prefix,
            spec.unused_tensors,
        )
        self._hidden = torch.empty(0)  # [texts, length, hidden size] of the layer before

    def record(self, index: int, *, has_grams: bool = True) -> list[Together]:
        """What the linear layers of layer `index` are given; `advance` has been called for those before.

        Without Gram matrices nothing is computed: which of them are given the same.
        """
        together = list(list_layer_linears(self._make_config(index).model.spec))
        if not has_grams:
            return [Together(shapes, None) for shapes in together]
        recorders: dict[str, _Recorder] = {}
        widths = {shape.name: shape.num_in for shapes in together for shape in shapes}

        def wrap(names: Sequence[str], linear: Linear) -> Linear:
            recorders[names[0]] = _Recorder(linear, widths[names[0]])
            return recorders[names[0]]

        self._run(self._build(index, self.weights, wrap), index, lambda _, __: None)
        return [Together(shapes, recorders[shapes[0].name].gram) for shapes in together]

    def advance(self, index: int, replaced: dict[str, Tensor]) -> None:
        """Pass the hidden states through layer `index` with other weights, by tensor names."""
        overlay = _Overlay(self.weights, replaced, self._dtype)
        num_texts, length = self._tokens.shape
        out = torch.empty((num_texts, length, self._spec.hidden_size), dtype=self._dtype)

        def keep(texts: slice, hidden: Tensor) -> None:
            out[texts] = hidden.view(-1, length, hidden.shape[1])

        self._run(self._build(index, overlay, lambda _, linear: linear), index, keep)
        self._hidden = out

    def _make_config(self, index: int) -> EngineConfig:
        model, spec = self._config.model, self._spec
        stage = StageSpec(first_layer=index, is_first=index == 0, is_last=False)
        part = replace(
            spec, layers=spec.layers[index : index + 1], has_logits=False, pooling=None, stage=stage
        )
        return replace(self._config, model=replace(model, spec=part))

    def _build(self, index: int, weights: WeightSource, wrap: WrapLinear) -> Decoder:
        return build_stage(self._make_config(index), weights, _CPU, wrap)

    @torch.inference_mode()
    def _run(self, layer: Decoder, index: int, keep: Callable[[slice, Tensor], None]) -> None:
        """All texts, some at a time; `keep` is given which, and the layer's results [T, hidden]."""
        num_texts, length = self._tokens.shape
        config = self._make_config(index)
        is_dynamic = has_dynamic_rope(config.model.spec)
        block_size = config.cache.block_size
        blocks_per_text = -(-length // block_size)
        caches = allocate_kv_caches(config, self._texts_per_step * blocks_per_text, _CPU)
        for start in range(0, num_texts, self._texts_per_step):
            texts = slice(start, min(start + self._texts_per_step, num_texts))
            count = texts.stop - start
            if isinstance(layer.embedding, StageInput):
                layer.embedding.table[: count * length] = self._hidden[texts].flatten(0, 1)
            metadata = _describe(count, length, block_size)
            metadata.others = (metadata,) * (len(self._spec.kv_windows) - 1)
            keep(
                texts,
                layer.forward(
                    self._tokens[texts].flatten(),
                    torch.arange(length).repeat(count),
                    caches,
                    metadata,
                    torch.full((count * length,), length) if is_dynamic else None,
                ),
            )


def _describe(count: int, length: int, block_size: int) -> AttentionMetadata:
    """A step of so many whole texts, whose blocks follow each other."""
    blocks_per_text = -(-length // block_size)
    firsts = torch.arange(count) * blocks_per_text
    return AttentionMetadata(
        query_starts=torch.arange(count + 1, dtype=torch.int32) * length,
        seq_lens=torch.full((count,), length, dtype=torch.int32),
        block_tables=(firsts[:, None] + torch.arange(blocks_per_text)).int(),
        slot_mapping=(firsts[:, None] * block_size + torch.arange(length)).flatten(),
        max_query_len=length,
        max_seq_len=length,
    )
