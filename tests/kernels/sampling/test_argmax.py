"""The native argmax against its reference: exact, so every shape and every special value must be equal."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from quire.kernels.sampling.argmax import argmax_reference, launch_argmax
from torch import Tensor


def random_logits(num_rows: int, size: int) -> Tensor:
    """Few different values, so that most rows have several maxima."""
    generator = torch.Generator().manual_seed(size)
    return torch.randint(-9, 9, (num_rows, size), generator=generator).float()


@pytest.mark.parametrize("size", [1, 15, 16, 255, 256, 257, 511, 2048, 5000])
def test_the_first_of_equal_maxima_is_found(library: ctypes.CDLL, size: int) -> None:
    logits = random_logits(40, size)
    index, is_bad = launch_argmax(library, logits)
    assert torch.equal(index, argmax_reference(logits)[0])
    assert not is_bad.any()


@pytest.mark.parametrize("size", [5, 256, 300, 1000])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_without_a_finite_maximum_are_bad(library: ctypes.CDLL, value: float, size: int) -> None:
    logits = random_logits(6, size)
    logits[0, size // 2] = value
    logits[1, [0, size - 1]] = value
    logits[2, [size - 2, size - 1]] = value
    logits[3] = value
    index, is_bad = launch_argmax(library, logits)
    expected_index, expected_bad = argmax_reference(logits)
    assert torch.equal(index, expected_index)
    assert torch.equal(is_bad, expected_bad)
    assert is_bad.tolist() == [value != -math.inf] * 3 + [True, False, False]


def test_many_rows_of_a_large_vocabulary_are_shared_between_threads(library: ctypes.CDLL) -> None:
    logits = random_logits(32, 20_000)
    assert torch.equal(launch_argmax(library, logits)[0], argmax_reference(logits)[0])
