"""Norm, rotation and cache write in Triton against the torch reference; interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import TRITON_DEVICE as DEVICE
from kernel_checks import TRITON_DTYPES, RotateStep, assert_within, random

pytest.importorskip("triton")

from quire.kernels.attention.rotate_and_write_triton import launch_rotate_and_write


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize(
    ("shape", "has_norm"),
    [((1, 1, 2, 8), False), ((7, 1, 40, 128), True), ((3, 3, 80, 16), False), ((14, 2, 256, 32), True)],
)
def test_a_step_equals_the_reference_and_touches_no_other_slot(
    shape: tuple[int, int, int, int], has_norm: bool, dtype: torch.dtype
) -> None:
    step = RotateStep.draw(shape, has_norm, dtype, DEVICE, tokens=11)
    query, k_cache, v_cache = step.call(launch_rotate_and_write)
    expected, k_expected, v_expected, bound = step.reference()
    assert_within(query, expected, bound)
    assert_within(k_cache, k_expected, bound)
    assert torch.equal(v_cache, v_expected)


def test_a_negative_slot_is_written_nowhere() -> None:
    qkv = random(3, 4 * 16, device=DEVICE)
    cache = torch.zeros(2, 1, 8, 16, device=DEVICE)
    cos = torch.ones(3, 8, device=DEVICE)
    slots = torch.tensor([-1, 5, -1], device=DEVICE)
    k_cache, v_cache = cache.clone(), cache.clone()
    launch_rotate_and_write(qkv, 2, cos, torch.zeros_like(cos), None, k_cache, v_cache, slots)
    for written, column in ((k_cache, 2), (v_cache, 3)):
        assert torch.equal(written[0, 0, 5], qkv[1, column * 16 : (column + 1) * 16])
        assert written.count_nonzero() == 16
