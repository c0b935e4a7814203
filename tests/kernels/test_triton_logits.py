"""What is done to logits around sampling, in Triton: masks, penalties and what logprobs need."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import TRITON_DEVICE as DEVICE
from torch import Tensor

pytest.importorskip("triton")

from quire.kernels.sampling.log_totals import log_totals_reference
from quire.kernels.sampling.log_totals_triton import launch_log_totals
from quire.kernels.sampling.penalties import penalize_reference
from quire.kernels.sampling.penalties_triton import launch_penalties
from quire.kernels.sampling.token_bitmask import apply_token_bitmask_reference, pack_token_bitmask
from quire.kernels.sampling.token_bitmask_triton import launch_token_bitmask

EPS = torch.finfo(torch.float32).eps
SIZES = [1, 31, 32, 33, 1000, 8200]  # parts of a word, of a chunk, and several chunks


def random(*shape: int, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 4).to(DEVICE)


@pytest.mark.parametrize("size", SIZES)
def test_totals_and_ranks_equal_their_reference(size: int) -> None:
    logits = random(3, size)
    logits[1, : size // 2] = -torch.inf
    logits[2] = logits[2].round()  # equal logits share the rank of the first
    token_ids = torch.tensor([0, size - 1, size // 2], device=DEVICE)
    expected_totals, expected_ranks = log_totals_reference(logits, token_ids)
    totals, ranks = launch_log_totals(logits, token_ids)
    assert ranks.tolist() == expected_ranks.tolist()
    # A sum of positive numbers by a tree of depth 12 and more by halves; the exponential errs by some units.
    assert ((totals - expected_totals).abs() <= 64 * EPS).all()


def test_totals_of_no_rows_are_empty_and_strided_rows_are_refused() -> None:
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert [part.shape for part in launch_log_totals(random(0, 5), nothing)] == [(0,), (0,)]
    with pytest.raises(AssertionError):
        launch_log_totals(random(5, 3).t(), nothing)


@pytest.mark.parametrize("size", SIZES)
def test_a_bitmask_keeps_its_tokens_alone(size: int) -> None:
    allowed = [torch.arange(0, size, 3), torch.tensor([size - 1])]
    bitmask = torch.stack([pack_token_bitmask(ids, size) for ids in allowed]).to(DEVICE)
    rows = torch.tensor([3, 1], device=DEVICE)
    logits = random(4, size)
    expected = logits.clone()
    for row, ids in zip((3, 1), allowed, strict=True):
        forbidden = torch.ones(size, dtype=torch.bool)
        forbidden[ids] = False
        expected[row, forbidden.to(DEVICE)] = -torch.inf
    by_reference = logits.clone()
    apply_token_bitmask_reference(by_reference, bitmask, rows)
    assert torch.equal(by_reference, expected)
    launch_token_bitmask(logits, bitmask, rows)
    assert torch.equal(logits, expected)


def test_a_bitmask_of_another_vocabulary_is_refused() -> None:
    bitmask, rows = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(AssertionError, match="2 words for 65 tokens"):
        launch_token_bitmask(random(1, 65), bitmask.to(DEVICE), rows.to(DEVICE))


@pytest.mark.parametrize("num_places", [0, 1, 511, 1300])
def test_penalties_equal_their_reference(num_places: int) -> None:
    generator = torch.Generator().manual_seed(num_places)
    places = torch.randperm(5000, generator=generator)[:num_places].to(DEVICE)
    counts = torch.randint(0, 4, (num_places,), generator=generator).float().to(DEVICE)
    penalties = torch.rand(3, num_places, generator=generator).to(DEVICE) + 0.5
    logits = random(5000)
    expected = logits.clone()
    penalize_reference(expected, places, counts, penalties)
    launch_penalties(logits, places, counts, penalties)
    # One product or quotient, two products and two differences; a GPU may fuse them.
    assert ((logits - expected).abs() <= 5 * EPS * (expected.abs() + 10)).all()
    untouched = torch.ones(5000, dtype=torch.bool, device=DEVICE)
    untouched[places] = False
    assert torch.equal(logits[untouched], expected[untouched])
