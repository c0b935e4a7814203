"""What a row of `quire bench kernels` is, and the models whose shapes the rows have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...frontend.models.families import read_model_spec
from ...ipc.spec.model_spec import AttentionSpec
from .model_configs import BENCH_MODELS, DUMMY_MODELS

Calls = Sequence[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class BenchShape:
    """Sizes of a model whose layers are alike."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: AttentionSpec


def _read_shape(config: dict[str, Any]) -> BenchShape:
    spec = read_model_spec(config)
    layer = spec.layers[0]
    return BenchShape(spec.vocab_size, spec.hidden_size, layer.ffn.intermediate_size, layer.attention)


TINY = _read_shape(BENCH_MODELS["tiny"])
QWEN3_600M = _read_shape(BENCH_MODELS["small"])
LLAMA_8B = _read_shape(DUMMY_MODELS["llama-8b"])


@dataclass(frozen=True, slots=True)
class Case:
    """One row: `calls` are made in turn, each on data of its own; so are torch's."""

    op: str
    shape: str
    dtype: torch.dtype
    calls: Calls
    torch_calls: Calls
    num_bytes: int  # that must be moved
    num_flops: int = 0
    is_resident: bool = False  # its data stay in a cache between calls


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cases share. `cold_bytes`: how much memory a case that is not resident goes through."""

    device: torch.device
    cold_bytes: int

    def count_copies(self, num_bytes: int) -> int:
        """How many copies of a case's data fill `cold_bytes`."""
        return max(1, -(-self.cold_bytes // num_bytes))

    def noise(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Values around 0 of standard deviation 1."""
        return torch.randn(shape, device=self.device).to(dtype)
