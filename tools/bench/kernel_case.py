"""What a row of `quire bench kernels` is, and the models whose shapes the rows have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ipc.model_spec import AttentionSpec

Calls = Sequence[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class BenchShape:
    """Sizes of a model whose layers are alike."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: AttentionSpec


QWEN3_600M = BenchShape(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    attention=AttentionSpec(num_heads=16, num_kv_heads=8, head_size=128, qk_norm="each_head"),
)
TINY = BenchShape(
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=384,
    attention=AttentionSpec(num_heads=4, num_kv_heads=2, head_size=32),
)
LLAMA_8B = BenchShape(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    attention=AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128),
)


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
