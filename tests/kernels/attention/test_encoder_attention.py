"""Attention of whole prompts against the torch reference, and its promise of equal bits in any company."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from attention_step import EPS, AttentionStep
from kernel_checks import random
from quire.kernels.attention.encoder_attention import launch_encoder_attention
from quire.kernels.attention.paged_attention import NO_WINDOW, pack_position_bias
from torch import Tensor

# Lengths around panels of 32 queries, tiles of 16 and steps of 32 keys; the last is longer than a task.
LENGTHS = [1, 3, 70, 16, 17, 150, 64, 33, 48, 600]
# heads, kv heads, head size
SHAPES = [(4, 2, 32), (1, 1, 8), (6, 2, 40), (3, 3, 64), (2, 1, 256), (4, 1, 96)]
WINDOWS = [None, 1, 14, 65]
# Every shape with two windows, every window with three shapes.
SHAPES_IN_WINDOWS = [
    (shape, WINDOWS[(number + more) % 4]) for number, shape in enumerate(SHAPES) for more in (0, 1)
]


class Prompts(AttentionStep):
    """A step of whole prompts."""

    @classmethod
    def of(cls, shape: tuple[int, int, int], dtype: torch.dtype) -> Prompts:
        return cls.draw([(length, length) for length in LENGTHS], *shape, dtype=dtype)

    def project(self) -> Tensor:
        """qkv [T, (H + 2 G) D]."""
        parts = [self.query]
        for cache in (self.k_cache, self.v_cache):
            rows: list[Tensor] = []
            for table, length in zip(self.block_tables, self.seq_lens.tolist(), strict=True):
                blocks = cache[table[: -(-length // cache.shape[2])].long()]
                rows.append(blocks.transpose(1, 2).flatten(0, 1)[:length])
            parts.append(torch.cat(rows))
        return torch.cat(parts, 1).flatten(1)

    def compute(
        self,
        library: ctypes.CDLL,
        window: int | None = None,
        soft_cap: float | None = None,
        scale: float | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        num_heads, num_kv_heads = self.query.shape[1], self.k_cache.shape[1]
        arguments = (num_heads, num_kv_heads, self.query_starts, window, soft_cap, scale, position_bias)
        return launch_encoder_attention(library, self.project(), *arguments).view_as(self.query)

    def expect(
        self,
        window: int | None = None,
        soft_cap: float | None = None,
        scale: float | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        ahead = NO_WINDOW if window is None else window - 1
        return self.reference(window, soft_cap, scale, ahead, position_bias)

    def assert_near(self, actual: Tensor, expected: Tensor, atol: float = 0.0) -> None:
        """Weights may be rounded to bfloat16; kernel and reference round the result once each."""
        is_rounded = actual.dtype == torch.bfloat16
        atol += self.bound() + (2.0**-8 * self.largest_value if is_rounded else 0.0)
        torch.testing.assert_close(actual, expected, rtol=2.0**-7 if is_rounded else 0, atol=atol)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, set_threads: Callable[[int], None]) -> None:
    set_threads(request.param)


@pytest.mark.parametrize(("shape", "window"), SHAPES_IN_WINDOWS)
def test_prompts_equal_the_reference(
    library: ctypes.CDLL, shape: tuple[int, int, int], window: int | None
) -> None:
    step = Prompts.of(shape, torch.float32)
    step.assert_near(step.compute(library, window), step.expect(window))


@pytest.mark.usefixtures("attention_variant")
@pytest.mark.parametrize(("shape", "window"), SHAPES_IN_WINDOWS)
def test_bfloat16_prompts_equal_the_reference(
    library: ctypes.CDLL, shape: tuple[int, int, int], window: int | None
) -> None:
    step = Prompts.of(shape, torch.bfloat16)
    step.assert_near(step.compute(library, window), step.expect(window))


@pytest.mark.usefixtures("attention_variant")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_scaled_bent_and_biased_in_this_order(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    step = Prompts.of((4, 2, 32), dtype)
    bias = pack_position_bias(random(4, 2 * max(LENGTHS) - 1))
    edits = (2.0, 0.3, bias)
    actual, expected = step.compute(library, 65, *edits), step.expect(65, *edits)
    # tanh by way of exp is off by 4 units of 1: as many of the cap in a score, so in its weight.
    step.assert_near(actual, expected, 8 * EPS * 2.0 * step.largest_value)
    for without in range(3):
        others = [None if number == without else edit for number, edit in enumerate(edits)]
        assert (actual - step.compute(library, 65, *others)).abs().max() > 0.1


@pytest.mark.usefixtures("threads", "attention_variant")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 14])
def test_a_prompt_has_the_same_bits_alone(
    library: ctypes.CDLL, window: int | None, dtype: torch.dtype
) -> None:
    step = Prompts.of((4, 2, 32), dtype)
    bias = pack_position_bias(random(4, 2 * max(LENGTHS) - 1))
    for position_bias in (None, bias):
        expected = step.compute(library, window, None, None, position_bias)
        for request, length in enumerate(LENGTHS):
            start = int(step.query_starts[request])
            alone = step.only(request, 0, length).compute(library, window, None, None, position_bias)
            assert torch.equal(alone, expected[start : start + length])


@pytest.mark.usefixtures("attention_variant")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 14])
def test_a_query_has_the_same_bits_wherever_a_part_of_the_step_begins(
    library: ctypes.CDLL, window: int | None, dtype: torch.dtype
) -> None:
    step = Prompts.of((2, 1, 32), dtype)
    qkv, expected = step.project(), step.compute(library, window)
    for first, last in ((0, 21), (21, 22), (22, 300), (300, len(qkv))):
        out = torch.empty_like(expected[first:last])
        library.quire_encoder_attention(
            dtype is torch.bfloat16,
            qkv.data_ptr(),
            out.data_ptr(),
            step.query_starts.data_ptr(),
            len(LENGTHS),
            first,
            last - first,
            None,
            *(2, 1, 32),
            window or NO_WINDOW,
            0,
            *(32**-0.5, 0.0),
        )
        assert torch.equal(out, expected[first:last])


@pytest.mark.usefixtures("attention_variant")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_in_a_prompt_stays_in_that_prompt(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    step = Prompts.of((4, 2, 32), dtype)
    expected, start = step.compute(library), int(step.query_starts[2])
    step.query[start + 1] = torch.nan
    actual = step.compute(library)
    assert torch.isnan(actual[start + 1]).all()
    others = [token for token in range(len(actual)) if token != start + 1]
    assert torch.equal(actual[others], expected[others])
