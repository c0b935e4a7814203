"""Noise: the published generator, even, and independent in both arguments."""

from __future__ import annotations

import numpy as np
import pytest
from quire.worker.sampling.noise import mix64, uniform_noise

# Upper 1e-4 point of chi-square with 255 degrees of freedom.
CHI_SQUARE_255 = 348.0


def _noise(seeds: object, positions: object) -> np.ndarray:
    return uniform_noise(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.int64))


def test_mixing_continues_the_published_splitmix64_sequence() -> None:
    # First outputs of the reference implementation with state 1234567.
    golden = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + golden * n) % 2**64 for n in (1, 2, 3)], dtype=np.uint64)
    assert mix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_number_depends_on_its_seed_and_position_alone() -> None:
    seeds, positions = np.arange(50, dtype=np.uint64), np.arange(50)[::-1].copy()
    together = uniform_noise(seeds, positions)
    alone = [_noise([seed], [position])[0] for seed, position in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone


def test_numbers_are_in_the_unit_interval_for_extreme_seeds() -> None:
    noise = _noise([0, 1, 2**63 - 1, 2**63, 2**64 - 1], [0, 1, 2**31, 0, 2**40])
    assert ((noise >= 0) & (noise < 1)).all()
    assert len(set(noise.tolist())) == 5


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_numbers_are_even_along_seeds_and_along_positions(along: str) -> None:
    count = np.arange(1 << 16)
    noise = _noise(count, 0 * count) if along == "seeds" else _noise(0 * count + 5, count)
    observed = np.bincount((noise * 256).astype(int), minlength=256)
    expected = len(count) / 256
    assert ((observed - expected) ** 2 / expected).sum() < CHI_SQUARE_255


@pytest.mark.parametrize("step", [(1, 0), (0, 1), (1, 1), (1, -1)])
def test_neighbours_are_independent(step: tuple[int, int]) -> None:
    seeds, positions = np.divmod(np.arange(1 << 16), 256)
    here = _noise(seeds, positions + 1)
    there = _noise(seeds + step[0], positions + 1 + step[1])
    cells = (here * 16).astype(int) * 16 + (there * 16).astype(int)
    expected = len(cells) / 256
    observed = np.bincount(cells, minlength=256)
    assert ((observed - expected) ** 2 / expected).sum() < CHI_SQUARE_255
