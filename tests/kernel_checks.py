"""What the kernels' tests share: random tensors, a check of bounds, ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor

Group = TypeVar("Group")
Result = TypeVar("Result")
CPU = torch.device("cpu")
# Where Triton's kernels run; on a CPU they are interpreted.
TRITON_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRITON_DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
EPS = torch.finfo(torch.float32).eps


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Numbers around 0 of standard deviation 1."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run_ranks(groups: list[Group], act: Callable[[Group], Result]) -> list[Result]:
    """What `act` returns in each rank, a thread of this process; raises what the first of them raises."""
    with ThreadPoolExecutor(len(groups)) as threads:
        return [future.result(timeout=30) for future in [threads.submit(act, group) for group in groups]]


def random_parts(size: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    """What each rank brings; of very different magnitudes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(count)
    scales = [10.0 ** (rank % 3) for rank in range(size)]
    return [(torch.randn(count, generator=generator) * scale).to(dtype) for scale in scales]


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    """Of the same shape and type, finite, and off by no more than the bound."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    error = (actual.double() - expected.double()).abs()
    assert torch.isfinite(actual).all()
    assert (error <= bound).all(), f"largest excess {(error - bound).max().item():.3g}"
