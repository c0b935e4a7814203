"""PoolingHead: the projections behind the pools, in float32. Legend: P vectors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ...ipc.spec.config import EngineConfig
from ...ipc.spec.model_spec import HeadActivation, ModelSpec, ProjectionSpec
from ..layers.linear import Linear, make_linear
from ..weights.weights import DummySource, SafetensorsSource, WeightSource


@dataclass(frozen=True, slots=True)
class Projection:
    """norm(activation(linear(x))) of vectors."""

    linear: Linear
    activation: HeadActivation
    norm: tuple[Tensor, Tensor | None, float] | None  # weight, bias, epsilon

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [P, out] for contiguous float32 [P, in]."""
        y = activate(self.linear(x), self.activation)
        if self.norm is None:
            return y
        weight, bias, eps = self.norm
        return F.layer_norm(y, weight.shape, weight, bias, eps)


@dataclass(frozen=True, slots=True)
class PoolingHead:
    """The projections of a model, one after the other."""

    projections: list[Projection] = field(default_factory=list[Projection])

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [P, width] for contiguous float32 [P, pools of hidden size]."""
        for projection in self.projections:
            x = projection(x)
        return x

    @property
    def is_exact(self) -> bool:
        """Whether a vector's bits do not depend on those beside it."""
        return all(projection.linear.is_exact for projection in self.projections)

    @property
    def size_bytes(self) -> int:
        """Bytes that its weights hold."""
        return sum(projection.linear.size_bytes for projection in self.projections)


def activate(x: Tensor, activation: HeadActivation) -> Tensor:
    """The activation of each number, or of each row (softmax), in float32.

    On a CPU numpy computes: torch's vectorized loops treat the numbers at an array's end in another way.
    """
    if activation == "identity":
        return x
    if x.device.type == "cpu":
        return torch.from_numpy(activate_array(x.numpy(), activation))
    return _TORCH_ACTIVATIONS[activation](x)


def activate_array(x: NDArray[np.float32], activation: HeadActivation) -> NDArray[np.float32]:
    """As `activate`, for a contiguous array [P, width]."""
    match activation:
        case "tanh":
            return np.tanh(x)
        case "relu":
            return np.maximum(x, 0)
        case "sigmoid":
            return _sigmoid(x)
        case "silu":
            return x * _sigmoid(x)
        case "gelu_tanh":
            cubed = x + np.float32(0.044715) * x * x * x
            return x * _sigmoid((np.float32(1.5957691216) * cubed).astype(np.float32, copy=False))
        case "gelu":
            return _gelu(x)
        case "softmax":
            powers = np.exp(x - x.max(axis=-1, keepdims=True))
            return powers / powers.sum(axis=-1, keepdims=True)
        case "identity":
            return x


def _sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # 1 / (1 + inf) is what is wanted
        return (1 / (1 + np.exp(-x))).astype(np.float32, copy=False)


def _gelu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """By rows of a width that torch's loops take without a rest, so that each number is computed alike."""
    width = -(-x.shape[-1] // _LANES) * _LANES
    padded = np.zeros((len(x), width), dtype=np.float32)
    padded[:, : x.shape[-1]] = x
    rows = [F.gelu(torch.from_numpy(row)).numpy() for row in padded]
    return np.ascontiguousarray(np.stack(rows)[:, : x.shape[-1]]) if rows else x


_LANES = 64  # float32 numbers in four registers of AVX-512
_TORCH_ACTIVATIONS = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softmax": lambda x: torch.softmax(x, dim=-1),
}


def load_pooling_head(
    config: EngineConfig, weights: WeightSource, device: torch.device
) -> PoolingHead | None:
    """The head that the spec says, None for a model without one. Raises ModelError as `load_model`."""
    pooling = config.model.spec.pooling
    if pooling is None:
        return None
    return PoolingHead([_load_projection(config, spec, weights, device) for spec in pooling.projections])


def _load_projection(
    config: EngineConfig, spec: ProjectionSpec, weights: WeightSource, device: torch.device
) -> Projection:
    file_source = None
    if spec.file is not None and config.model.load_format != "dummy":
        file_source = SafetensorsSource(Path(config.model.model), [spec.file], torch.float32, device)
    elif spec.file is not None:
        file_source = DummySource(config.model.seed, torch.float32, device)
    source = file_source or weights
    weight = _take_weight(spec, source, config.model.spec)
    bias = source.take(f"{spec.name}.bias", (spec.out_size,)).float() if spec.bias else None
    norm = None
    if spec.norm is not None:
        norm_bias = None
        if config.model.spec.norm_bias:
            norm_bias = source.take(f"{spec.norm}.bias", (spec.out_size,)).float()
        norm_weight = source.take(f"{spec.norm}.weight", (spec.out_size,)).float()
        norm = norm_weight, norm_bias, config.model.spec.norm_eps
    if file_source is not None:
        file_source.finish()
    return Projection(make_linear(weight, bias, is_strict=True), spec.activation, norm)


def _take_weight(spec: ProjectionSpec, source: WeightSource, model: ModelSpec) -> Tensor:
    if spec.token_rows is None:
        return source.take(f"{spec.name}.weight", (spec.out_size, spec.in_size)).float()
    yes, no = spec.token_rows
    table = source.take(f"{spec.name}.weight", (model.vocab_size, spec.in_size))
    return (table[yes].float() - table[no].float())[None]
