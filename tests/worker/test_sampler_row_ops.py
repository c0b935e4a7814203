"""Row operations: exact order, exact quantiles, and the same bits whatever the batch and the threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.worker.steps.row_ops import (
    BLOCK_SIZE,
    argmax_rows,
    block_members,
    block_sums,
    find_in_block,
    find_quantile_blocks,
    keep_at_least,
    largest_ids,
    largest_values,
    row_slices,
)

CPU = torch.device("cpu")
SIZES = [1, 5, 127, 128, 129, 1000, 4097, 40_000]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _values_with_ties(size: int, seed: int, rows: int = 3) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.integers(-50, 50, (rows, size)).astype(np.float32) / 8)


def _order(row: torch.Tensor) -> np.ndarray:
    return np.lexsort((np.arange(len(row)), -row.numpy()))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 3, 20, 200, 40_000])
def test_the_largest_come_in_falling_order_and_equal_ones_by_id(size: int, count: int) -> None:
    count = min(count, size)
    values = _values_with_ties(size, seed=size)
    ids, largest = largest_ids(values, count), largest_values(values, count)
    for row in range(len(values)):
        expected = _order(values[row])[:count]
        assert ids[row].tolist() == expected.tolist()
        assert largest[row].tolist() == values[row][torch.from_numpy(expected)].tolist()


def test_minus_infinity_and_negative_zero_have_their_place_in_the_order() -> None:
    values = torch.tensor([[-0.0, 0.0, -torch.inf, 3.0, -1.0, 0.0]])
    assert largest_ids(values, 6).tolist() == [[3, 0, 1, 5, 4, 2]]


def test_the_maximum_is_the_first_of_equals_and_a_nan_wins() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0], [0.0, torch.nan, 9.0], [-torch.inf] * 3])
    assert argmax_rows(values).tolist() == [1, 1, 0]


def test_slices_cover_all_rows_once() -> None:
    for num_rows, size in ((0, 10), (1, 10**7), (5, 10**5), (300, 2048)):
        covered = [row for part in row_slices(num_rows, size, CPU) for row in range(num_rows)[part]]
        assert covered == list(range(num_rows))


@pytest.mark.parametrize("size", SIZES)
def test_block_sums_are_those_of_the_blocks(size: int) -> None:
    values = torch.rand(3, size)
    sums = block_sums(values)
    for block in range(sums.shape[1]):
        exact = values[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE].double().sum(1)
        # 128 float32 additions of numbers below 1, each rounded to half an ulp of at most 128.
        torch.testing.assert_close(sums[:, block], exact, rtol=0, atol=128 * 2**-18)
    assert sums.shape[1] == -(-size // BLOCK_SIZE)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", SIZES)
def test_a_row_has_the_same_bits_in_any_batch(size: int) -> None:
    row = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 4

    def weigh(logits: torch.Tensor) -> torch.Tensor:
        return (logits - logits.amax(1, keepdim=True)).mul_(1 / 0.7).exp_()

    alone = weigh(row[None])
    sums = block_sums(alone)
    total = sums.cumsum(1)
    for num_rows, place in ((2, 0), (2, 1), (3, 1), (8, 7), (33, 16)):
        batch = torch.randn(num_rows, size) * 4
        batch[place] = row
        weights = weigh(batch)
        assert torch.equal(weights[place], alone[0])
        assert torch.equal(block_sums(weights)[place], sums[0])
        assert torch.equal(block_sums(weights).cumsum(1)[place], total[0])


def test_keeping_sets_only_what_is_below_to_zero() -> None:
    weights = torch.tensor([[0.1, 0.5, 0.2], [0.1, 0.5, 0.2]])
    keep_at_least(weights, torch.tensor([0.2, 0.0]))
    assert weights.tolist() == torch.tensor([[0.0, 0.5, 0.2], [0.1, 0.5, 0.2]]).tolist()


def _quantile(weights: torch.Tensor, fraction: float) -> int:
    blocks, rest = find_quantile_blocks(block_sums(weights), torch.tensor([fraction], dtype=torch.float64))
    members, is_there = block_members(blocks, weights.shape[1])
    inside = weights.gather(1, members) * is_there
    return int(members[0, 0]) + int(find_in_block(inside, rest)[0])


@settings(max_examples=200, deadline=None)
@given(
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=400).filter(any),
    place=st.floats(0, 1, exclude_max=True),
)
def test_a_quantile_is_where_the_cumulative_weight_first_exceeds_it(counts: list[int], place: float) -> None:
    # Small whole numbers: all sums are exact, so the answer is too.
    weights = torch.tensor([counts], dtype=torch.float32)
    expected = np.searchsorted(np.cumsum(counts), place * sum(counts), side="right")
    assert _quantile(weights, place) == expected


@settings(max_examples=100, deadline=None)
@given(
    exponents=st.lists(st.one_of(st.none(), st.integers(-60, 0)), min_size=1, max_size=300).filter(
        lambda values: any(value is not None for value in values)
    ),
    place=st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2.0**-30, 1 - 2.0**-53]),
)
def test_a_quantile_never_has_weight_zero(exponents: list[int | None], place: float) -> None:
    weights = torch.tensor([[0.0 if e is None else 1.7 * 2.0**e for e in exponents]])
    assert weights[0, _quantile(weights, place)] > 0
