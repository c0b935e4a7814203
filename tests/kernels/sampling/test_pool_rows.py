"""Pools of hidden states: kernels against the reference; chunks and neighbours change no bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from kernel_checks import EPS, TRITON_DEVICE, TRITON_DTYPES, random
from quire.kernels.program.native import load_library
from quire.kernels.sampling.pool_rows import POOLS, find_divisors, launch_pool_rows, pool_rows_reference
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [1, 5, 19, 8]
ROWS = [3, 0, 5, 1]

Launch = Callable[..., None]


def launch_native(*arguments: object) -> None:
    library = load_library()
    if library is None:
        pytest.skip("no compiler here")
    launch_pool_rows(library, *arguments)  # pyright: ignore[reportArgumentType]


def launch_triton(hidden: Tensor, rows: object, starts: object, firsts: object, kinds: object, pools: Tensor):
    triton = pytest.importorskip("quire.kernels.sampling.pool_rows_triton")
    on_device = [torch.from_numpy(each).to(TRITON_DEVICE) for each in (rows, starts, firsts)]
    moved = pools.to(TRITON_DEVICE)
    triton.launch_pool_rows(hidden.to(TRITON_DEVICE), *on_device, kinds, moved)
    pools.copy_(moved)


def pool(launch: Launch, hidden: Tensor, chunks: list[list[int]], size: int) -> Tensor:
    """The pools of rows ROWS, whose next tokens a step takes in chunks; hidden: [row][tokens]."""
    pools = torch.full((6, len(POOLS), size), 7.0)
    done = [0] * len(LENGTHS)
    offsets = np.cumsum([0, *LENGTHS])
    for counts in chunks:
        places = [place for place, count in enumerate(counts) if count]
        parts = [hidden[offsets[p] + done[p] : offsets[p] + done[p] + counts[p]] for p in places]
        starts = np.cumsum([0, *(counts[p] for p in places)])
        rows = np.array([ROWS[p] for p in places])
        firsts = np.array([done[p] for p in places])
        launch(torch.cat(parts).contiguous(), rows, starts, firsts, POOLS, pools)
        done = [a + b for a, b in zip(done, counts, strict=True)]
    assert done == LENGTHS
    return pools


CHUNKS = [[1, 2, 7, 0], [0, 1, 1, 8], [0, 2, 11, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 24, 130])
def test_native_pools_are_the_references_whatever_the_chunks(dtype: torch.dtype, size: int) -> None:
    check(launch_native, dtype, size)


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
def test_tritons_pools_are_the_references_whatever_the_chunks(dtype: torch.dtype) -> None:
    check(launch_triton, dtype, 130)


def check(launch: Launch, dtype: torch.dtype, size: int) -> None:
    hidden = random(sum(LENGTHS), size, dtype=dtype)
    expected = pool(pool_rows_reference, hidden, [LENGTHS], size)
    found = pool(launch, hidden, [LENGTHS], size)
    bound = 2 * max(LENGTHS) * EPS * max(LENGTHS) ** 2 * 4
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)
    assert torch.equal(found[[2, 4]], torch.full((2, len(POOLS), size), 7.0)), "rows of nobody"
    assert torch.equal(pool(launch, hidden, CHUNKS, size), found)


def test_the_reference_is_what_the_names_say() -> None:
    hidden = random(sum(LENGTHS), 8)
    pools = pool(pool_rows_reference, hidden, CHUNKS, 8)[ROWS]
    divisors = find_divisors(POOLS, np.array(LENGTHS))
    pools /= torch.from_numpy(divisors)[:, :, None]
    for found, x in zip(pools, hidden.split(LENGTHS), strict=True):
        weights = torch.arange(1, len(x) + 1, dtype=torch.float32)[:, None]
        expected = [
            *(x[0], x[-1], x.mean(0), x.amax(0)),
            *((weights * x).sum(0) / weights.sum(), x.sum(0) / len(x) ** 0.5),
        ]
        torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("launch", [pool_rows_reference, launch_native, launch_triton])
def test_a_nan_stays_in_its_row_and_in_the_greatest(launch: Launch) -> None:
    hidden = random(sum(LENGTHS), 4)
    hidden[3] = torch.nan  # within the second row
    pools = pool(launch, hidden, [LENGTHS], 4)[ROWS]
    assert pools[1, POOLS.index("max")].isnan().all()
    assert pools[1, POOLS.index("mean")].isnan().all()
    assert not pools[[0, 2, 3]].isnan().any()
