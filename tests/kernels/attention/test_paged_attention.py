"""The compiled attention against its torch reference, and its promise of equal bits in any company."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from attention_step import EPS, MIXED, SHAPES, AttentionStep
from cache_layout import to_native_layout
from quire.kernels.attention.paged_attention import launch_paged_attention
from torch import Tensor


class Step(AttentionStep):
    """Computed by the compiled kernel, whose cache has a layout of its own."""

    def compute(
        self,
        library: ctypes.CDLL,
        window: int | None = None,
        soft_cap: float | None = None,
        scale: float | None = None,
    ) -> Tensor:
        heads, head_size = self.query.shape[1:]
        flat = self.query.reshape(len(self.query), -1)
        out = launch_paged_attention(
            library,
            flat,
            flat.shape[1],
            heads,
            *to_native_layout(self.k_cache, self.v_cache),
            self.block_tables,
            self.query_starts,
            self.seq_lens,
            window,
            soft_cap,
            scale,
        )
        return out.view(-1, heads, head_size)


LONGER = [*MIXED, (100, 129)]
WINDOWS = [None, 1, 13, 64, 100]
# Read in place, several kv heads together; groups of fewer and of more rows than a vector product has.
IN_PLACE = [(16, 8, 32, 16), (14, 2, 48, 16)]


def pair(
    shapes: list[tuple[int, int, int, int]], windows: list[int | None]
) -> list[tuple[tuple[int, int, int, int], int | None]]:
    """Every shape with two windows, every window with several shapes."""
    return [
        (shape, windows[(number + more) % len(windows)])
        for number, shape in enumerate(shapes)
        for more in (0, 1)
    ]


@pytest.mark.parametrize(
    ("shape", "window"),
    pair([*SHAPES, *IN_PLACE, (7, 7, 24, 32), (8, 1, 128, 64), (14, 2, 72, 128)], WINDOWS),
)
def test_a_mixed_step_equals_the_reference(
    library: ctypes.CDLL, shape: tuple[int, int, int, int], window: int | None
) -> None:
    step = Step.draw(LONGER, *shape)
    actual, expected = step.compute(library, window), step.reference(window)
    torch.testing.assert_close(actual, expected, rtol=0, atol=step.bound())


@pytest.mark.parametrize("soft_cap", [0.5, 2.0, 50.0])
@pytest.mark.parametrize("window", [None, 13])
def test_a_soft_cap_bends_scores_before_the_softmax(
    library: ctypes.CDLL, window: int | None, soft_cap: float
) -> None:
    step = Step.draw(LONGER, 6, 2, 24)
    actual, expected = step.compute(library, window, soft_cap), step.reference(window, soft_cap)
    # tanh by way of exp is off by 4 units of 1: as many of the cap in a score, so in its weight.
    atol = step.bound() + 8 * EPS * soft_cap * step.largest_value
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    assert (actual - step.compute(library, window)).abs().max() > atol


@pytest.mark.parametrize(
    ("shape", "window"),
    pair([*SHAPES, *IN_PLACE, (4, 2, 32, 8), (8, 1, 64, 16), (20, 2, 96, 32)], WINDOWS[::2]),
)
def test_bfloat16_equals_the_reference(
    library: ctypes.CDLL, shape: tuple[int, int, int, int], window: int | None, attention_variant: str
) -> None:
    step = Step.draw([*LONGER, (3, 1030), (200, 201)], *shape, dtype=torch.bfloat16)
    actual, expected = step.compute(library, window), step.reference(window)
    # Weights may be rounded to bfloat16; kernel and reference round the result once each.
    rounding = 0.0 if attention_variant == "widened" else 2.0**-8 * step.largest_value
    torch.testing.assert_close(actual, expected, rtol=2.0**-7, atol=step.bound() + rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_may_have_a_scale_of_its_own(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    step = Step.draw(LONGER, 4, 2, 32, dtype=dtype)
    rounding = 2.0**-8 * step.largest_value if dtype == torch.bfloat16 else 0.0
    actual, expected = step.compute(library, 100, None, 0.05), step.reference(100, None, 0.05)
    torch.testing.assert_close(
        actual, expected, rtol=2.0**-7 if rounding else 0, atol=step.bound() + rounding
    )
    assert (actual - step.compute(library, 100)).abs().max() > 2 * (step.bound() + rounding)


@pytest.mark.usefixtures("attention_variant")
def test_a_soft_cap_bends_scores_in_bfloat16_too(library: ctypes.CDLL) -> None:
    step = Step.draw(LONGER, 4, 2, 32, dtype=torch.bfloat16)
    atol = step.bound() + 2.0**-8 * step.largest_value
    actual, expected = step.compute(library, 100, 1.0), step.reference(100, 1.0)
    torch.testing.assert_close(actual, expected, rtol=2.0**-7, atol=atol)
    assert (actual - step.compute(library, 100)).abs().max() > 2 * atol


@pytest.mark.parametrize("window", [None, 1500])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_contexts_of_several_splits_equal_the_reference(
    library: ctypes.CDLL, num_kv_heads: int, window: int | None
) -> None:
    step = Step.draw([(1, 3000), (2, 1025)], 2, num_kv_heads, 32)
    actual, expected = step.compute(library, window), step.reference(window)
    torch.testing.assert_close(actual, expected, rtol=0, atol=step.bound())


def assert_rows_have_the_same_bits_alone(library: ctypes.CDLL, step: Step, window: int | None) -> None:
    """Each request in chunks of 7 tokens by itself, against the whole step."""
    expected = step.compute(library, window)
    for request in range(len(step.seq_lens)):
        start, end = int(step.query_starts[request]), int(step.query_starts[request + 1])
        for first in range(0, end - start, 7):
            count = min(7, end - start - first)
            alone = step.only(request, first, count).compute(library, window)
            assert torch.equal(alone, expected[start + first : start + first + count])


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, set_threads: Callable[[int], None]) -> None:
    set_threads(request.param)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("window", [None, 50, 1500])
@pytest.mark.parametrize("shape", [*IN_PLACE, (6, 2, 24, 16)])
def test_a_row_has_the_same_bits_whatever_is_computed_beside_it(
    library: ctypes.CDLL, shape: tuple[int, int, int, int], window: int | None
) -> None:
    step = Step.draw([*LONGER, (5, 2100), (1, 1100)], *shape)
    assert_rows_have_the_same_bits_alone(library, step, window)


@pytest.mark.usefixtures("threads", "attention_variant")
@pytest.mark.parametrize("window", [None, 50, 1500])
def test_a_bfloat16_row_has_the_same_bits_whatever_is_computed_beside_it(
    library: ctypes.CDLL, window: int | None
) -> None:
    step = Step.draw([*LONGER, (5, 2100), (130, 300)], 6, 2, 32, dtype=torch.bfloat16)
    assert_rows_have_the_same_bits_alone(library, step, window)


@pytest.mark.usefixtures("attention_variant")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_in_a_request_stays_in_that_request(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    step = Step.draw([(4, 20), (1, 40)], head_size=32, dtype=dtype)
    step.query[1] = torch.nan
    actual = step.compute(library)
    assert torch.isnan(actual[1]).all()
    assert torch.isfinite(actual[[0, 2, 3, 4]]).all()
