"""Attention by every implementation: near the torch reference, and with equal bits in any company."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_step import MIXED, SHAPES, AttentionStep, count_ahead
from kernel_checks import TRITON_DEVICE
from quire.kernels.attention.paged_attention import NO_WINDOW
from torch import Tensor

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INT8, FP8 = torch.int8, torch.uint8  # of caches in 8 bits
LONGER = [*MIXED, (100, 129)]
# Read in place, several kv heads together; groups of fewer and of more rows than a vector product has.
IN_PLACE = [(16, 8, 32, 16), (14, 2, 48, 16)]
NATIVE_SHAPES = {
    F32: [*SHAPES, *IN_PLACE, (7, 7, 24, 32), (8, 1, 128, 64), (14, 2, 72, 128), (3, 1, 512, 16)],
    BF16: [*SHAPES, *IN_PLACE, (4, 2, 32, 8), (8, 1, 64, 16), (20, 2, 96, 32), (4, 2, 512, 16)],
}
NATIVE_STEPS = {F32: LONGER, BF16: [*LONGER, (3, 1030), (200, 201)]}
# Lengths around panels of 32 queries, tiles of 16 and steps of 32 keys; the last is longer than a task.
LENGTHS = [1, 3, 70, 16, 17, 150, 64, 33, 48, 600]
ENCODER_SHAPES = [(4, 2, 32), (1, 1, 8), (6, 2, 40), (3, 3, 64), (2, 1, 256), (4, 1, 96), (1, 1, 320)]
# Interpreted, a step takes as long as it has tiles: 8 queries, 32 keys in float32.
INTERPRETED = [(1, 1), (3, 3), (1, 70), (20, 70), (1, 64), (1, 65)]


def pair(count: int, windows: list[int | None]) -> list[tuple[int, int | None]]:
    """So many numbers with two windows each, every window with several of them."""
    return [(number, windows[(number + more) % len(windows)]) for number in range(count) for more in (0, 1)]


needs_triton = pytest.mark.usefixtures("triton_kernels")


@pytest.fixture(params=[F32, "amx", "avx512_bf16", "widened"], ids=str)
def native_dtype(request: pytest.FixtureRequest, force_attention: Callable[[str], None]) -> torch.dtype:
    """The type of queries, keys and values; bfloat16 by one variant."""
    if isinstance(request.param, str):
        force_attention(request.param)
    return BF16 if isinstance(request.param, str) else F32


def is_widened(request: pytest.FixtureRequest) -> bool:
    """Whether bfloat16 is computed as float32 is."""
    return "widened" in request.node.name


@pytest.mark.parametrize(("number", "window"), pair(len(NATIVE_SHAPES[F32]), [None, 1, 13, 64, 100]))
def test_a_mixed_step_equals_the_reference(
    native_dtype: torch.dtype, number: int, window: int | None, request: pytest.FixtureRequest
) -> None:
    step = AttentionStep.draw(
        NATIVE_STEPS[native_dtype], *NATIVE_SHAPES[native_dtype][number], dtype=native_dtype
    )
    step.assert_near(
        step.launch_native(window), step.reference(window), rounds_weights=not is_widened(request)
    )


# Heads, head size, value size, block size: of models, some that tiles do not take, blocks that are no group.
LATENTS = [(16, 576, 512, 16), (5, 40, 16, 8), (40, 96, 64, 32), (3, 56, 48, 128)]


@pytest.mark.parametrize(
    ("shape", "kv_dtype"),
    [
        *((shape, None) for shape in LATENTS),
        *zip([(16, 640, 512, 16), *LATENTS[1:]], [INT8, FP8] * 2, strict=True),
    ],
)
def test_values_that_are_part_of_the_keys_equal_the_reference(
    native_dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    kv_dtype: torch.dtype | None,
    request: pytest.FixtureRequest,
) -> None:
    step = AttentionStep.draw_latents(NATIVE_STEPS[native_dtype], shape, native_dtype)
    step = step if kv_dtype is None else step.narrow(kv_dtype)
    together, expected = step.launch_native(scale=0.1), step.reference(scale=0.1)
    assert together.shape[2] == shape[2]
    step.assert_near(together, expected, rounds_weights=not is_widened(request))
    start = 0
    for number, (tokens, _) in enumerate(NATIVE_STEPS[native_dtype]):
        first = tokens // 2
        alone = step.only(number, first, tokens - first).launch_native(scale=0.1)
        assert torch.equal(alone, together[start + first : start + tokens])
        start += tokens


@pytest.mark.parametrize("kv_dtype", [INT8, FP8])
@pytest.mark.parametrize(("number", "window"), pair(len(NATIVE_SHAPES[F32]), [None, 13, 100]))
def test_caches_of_8_bits_are_read_as_the_reference_reads_them(
    native_dtype: torch.dtype,
    number: int,
    window: int | None,
    kv_dtype: torch.dtype,
    request: pytest.FixtureRequest,
) -> None:
    shapes = NATIVE_SHAPES[native_dtype]
    drawn = AttentionStep.draw(NATIVE_STEPS[native_dtype], *shapes[number], dtype=native_dtype)
    step = with_sinks(drawn.narrow(kv_dtype))
    step.assert_near(
        step.launch_native(window), step.reference(window), rounds_weights=not is_widened(request)
    )


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("window", [None, 1500])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_contexts_of_several_splits_equal_the_reference(num_kv_heads: int, window: int | None) -> None:
    step = AttentionStep.draw([(1, 3000), (2, 1025)], 2, num_kv_heads, 32)
    step.assert_near(step.launch_native(window), step.reference(window))


@pytest.mark.parametrize(("number", "window"), pair(len(ENCODER_SHAPES), [None, 1, 14, 65]))
def test_prompts_that_see_both_ways_equal_the_reference(
    native_dtype: torch.dtype, number: int, window: int | None
) -> None:
    step = AttentionStep.draw_prompts(LENGTHS, ENCODER_SHAPES[number], native_dtype)
    step.assert_near(step.launch_encoder(window), step.reference(window, ahead=count_ahead(window)))


@needs_triton
@pytest.mark.parametrize(
    ("window", "num_processors", "is_strict"),
    [(None, 1, False), (40, 12, False), (None, 12, True), (40, 1, True)],
)
def test_a_mixed_step_in_triton_equals_the_reference(
    window: int | None, num_processors: int, is_strict: bool
) -> None:
    step = AttentionStep.draw(INTERPRETED)
    actual = step.launch_triton(window, num_processors=num_processors, is_strict=is_strict)
    step.assert_near(actual, step.reference(window))


# Every shape in one of the two types, which take turns; the other one is slow, as half precision is.
@needs_triton
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(shape, dtype, marks=[] if dtype == usual else [pytest.mark.slow])
        for shape, usual in zip(SHAPES[1:], itertools.cycle([BF16, F32]), strict=False)
        for dtype in (F32, BF16, F16)
    ],
)
def test_every_shape_and_type_in_triton_equals_the_reference(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    step = AttentionStep.draw([(5, 37), (1, 130)], *shape, dtype=dtype)
    step.assert_near(step.launch_triton(num_processors=4), step.reference())


@needs_triton
@pytest.mark.parametrize(
    ("shape", "dtype", "is_strict", "num_processors", "kv_dtype"),
    [
        (LATENTS[0], BF16, True, 12, None),
        (LATENTS[0], F16, False, 1, None),
        (LATENTS[1], F32, False, 12, None),
        (LATENTS[2], BF16, False, 40, None),  # heads of three programs
        (LATENTS[3], F32, True, 1, None),
        ((17, 24, 16, 8), F32, False, 12, None),  # of seventeen
        ((16, 640, 512, 16), BF16, True, 12, INT8),
        (LATENTS[1], F32, False, 12, FP8),
        (LATENTS[2], F16, False, 1, INT8),
    ],
)
def test_values_that_are_part_of_the_keys_in_triton_equal_the_reference(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    is_strict: bool,
    num_processors: int,
    kv_dtype: torch.dtype | None,
) -> None:
    step = AttentionStep.draw_latents([(5, 37), (1, 130)], shape, dtype)
    step = step if kv_dtype is None else step.narrow(kv_dtype)
    actual = step.launch_triton(None, None, 0.1, num_processors=num_processors, is_strict=is_strict)
    step.assert_near(actual, step.reference(scale=0.1))


@needs_triton
@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "shape", "is_strict", "window"),
    [
        (INT8, F32, (4, 2, 16, 16), False, None),
        (FP8, BF16, (14, 2, 40, 128), True, 40),
        (INT8, BF16, (6, 1, 80, 8), False, 40),
        (FP8, F32, (2, 1, 24, 16), True, None),
        (FP8, F16, (2, 1, 32, 16), False, None),
    ],
)
def test_caches_of_8_bits_in_triton_are_read_as_the_reference_reads_them(
    kv_dtype: torch.dtype,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    is_strict: bool,
    window: int | None,
) -> None:
    step = AttentionStep.draw([(5, 37), (1, 130)], *shape, dtype=dtype).narrow(kv_dtype)
    actual = step.launch_triton(window, num_processors=4, is_strict=is_strict)
    step.assert_near(actual, step.reference(window))


@needs_triton
@pytest.mark.parametrize(
    ("window", "ahead", "is_strict", "has_bias"),
    [
        (None, NO_WINDOW, False, True),
        (None, NO_WINDOW, True, False),
        (14, 13, False, False),
        (14, 13, True, True),
        (35, 34, False, True),
        (35, 34, True, False),
    ],
)
def test_a_query_in_triton_may_see_keys_after_itself(
    window: int | None, ahead: int, is_strict: bool, has_bias: bool
) -> None:
    step = AttentionStep.draw_prompts([1, 3, 40], (4, 2, 16), F32)
    edits = window, None, None, ahead, step.draw_bias() if has_bias else None
    step.assert_near(step.launch_triton(*edits, is_strict=is_strict), step.reference(*edits))


def with_sinks(step: AttentionStep) -> AttentionStep:
    """Of the first head far below all scores, of the last far above them."""
    return replace(step, sinks=torch.linspace(-100, 100, step.query.shape[1]))


@pytest.mark.parametrize("window", [None, 13])
def test_sinks_take_their_part_of_the_weights(native_dtype: torch.dtype, window: int | None) -> None:
    plain = AttentionStep.draw([*NATIVE_STEPS[native_dtype], (1, 2100)], 14, 2, 32, dtype=native_dtype)
    step = with_sinks(plain)
    actual = step.launch_native(window)
    step.assert_near(actual, step.reference(window))
    assert torch.equal(actual[:, 0], plain.launch_native(window)[:, 0])
    assert not actual[:, -1].any()
    for request in range(len(step.seq_lens)):
        alone = step.only(request, 0, 1)
        assert torch.equal(alone.launch_native(window)[0], actual[step.query_starts[request]])


@needs_triton
@pytest.mark.parametrize(
    ("window", "num_processors", "is_strict"), [(None, 12, False), (40, 1, False), (None, 12, True)]
)
def test_sinks_in_triton_take_their_part_of_the_weights(
    window: int | None, num_processors: int, is_strict: bool
) -> None:
    step = with_sinks(AttentionStep.draw([(5, 37), (1, 140)]))
    actual = step.launch_triton(window, num_processors=num_processors, is_strict=is_strict)
    step.assert_near(actual, step.reference(window))
    assert actual[:, -1].abs().max() < 1e-30


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("edits", [(0.5, None), (50.0, None), (None, 0.05), (2.0, 0.3)])
def test_scores_are_scaled_then_bent_before_the_softmax(
    native_dtype: torch.dtype, edits: tuple[float | None, float | None], window: int | None
) -> None:
    step = AttentionStep.draw(LONGER, 4, 2, 32, dtype=native_dtype)
    actual = step.launch_native(window, *edits)
    bound = step.assert_near(actual, step.reference(window, *edits), edits[0])
    if edits[0] != 50.0:  # which bends hardly any
        assert (actual - step.launch_native(window)).abs().max() > 2 * bound


def test_scores_that_see_both_ways_are_scaled_bent_and_biased_in_this_order(
    native_dtype: torch.dtype,
) -> None:
    step = AttentionStep.draw_prompts(LENGTHS, (4, 2, 32), native_dtype)
    edits = (2.0, 0.3, step.draw_bias())
    actual = step.launch_encoder(65, *edits)
    step.assert_near(actual, step.reference(65, *edits[:2], 64, edits[2]), 2.0)
    for without in range(3):
        others: list[Any] = [None if number == without else edit for number, edit in enumerate(edits)]
        assert (actual - step.launch_encoder(65, *others)).abs().max() > 0.1


@needs_triton
@pytest.mark.parametrize("num_processors", [1, 6])
def test_triton_bends_every_score_before_the_softmax(num_processors: int) -> None:
    step = AttentionStep.draw([(5, 90), (1, 70)], num_kv_heads=4)
    step.query *= 8
    actual = step.launch_triton(None, 2.0, num_processors=num_processors)
    bound = step.assert_near(actual, step.reference(None, 2.0), 2.0)
    assert (actual - step.reference()).abs().max() > 2 * bound


def assert_equal_alone(
    step: AttentionStep,
    compute: Callable[[AttentionStep], Tensor],
    count: int | None,
    set_threads: Callable[[int], None],
) -> None:
    """Each request in chunks of `count` tokens by itself, or whole, against the whole step on one thread."""
    set_threads(1)
    expected = compute(step)
    set_threads(2)
    assert torch.equal(compute(step), expected)
    for request, (start, end) in enumerate(itertools.pairwise(step.query_starts.tolist())):
        size = count or end - start
        for first in range(start, end, size):
            last = min(first + size, end)
            alone = compute(step.only(request, first - start, last - first))
            assert torch.equal(alone, expected[first:last])


@pytest.mark.parametrize(
    ("window", "kv_dtype"), [(None, None), (50, None), (1500, None), (None, INT8), (50, FP8)]
)
@pytest.mark.parametrize("shape", [*IN_PLACE, (6, 2, 24, 16)])
def test_a_row_has_the_same_bits_whatever_is_computed_beside_it(
    native_dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    window: int | None,
    kv_dtype: torch.dtype | None,
    set_threads: Callable[[int], None],
) -> None:
    if native_dtype is BF16 and shape != IN_PLACE[0]:
        shape = (6, 2, 32, 16)
    step = AttentionStep.draw([*LONGER, (5, 2100), (30, 300)], *shape, dtype=native_dtype)
    step = step if kv_dtype is None else step.narrow(kv_dtype)
    assert_equal_alone(step, lambda step: step.launch_native(window), 7, set_threads)


@pytest.mark.parametrize("window", [None, 14])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_prompt_has_the_same_bits_alone(
    native_dtype: torch.dtype, window: int | None, has_bias: bool, set_threads: Callable[[int], None]
) -> None:
    step = AttentionStep.draw_prompts(LENGTHS, (4, 2, 32), native_dtype)
    bias = step.draw_bias() if has_bias else None
    assert_equal_alone(step, lambda step: step.launch_encoder(window, None, None, bias), None, set_threads)


@needs_triton
@pytest.mark.usefixtures("dots_in_order")
@pytest.mark.parametrize(
    ("window", "dtype", "latent"), [(None, BF16, None), (70, F32, None), (None, BF16, (20, 40, 32, 16))]
)
def test_strict_rows_have_the_same_bits_in_any_company_chunk_and_split(
    window: int | None, dtype: torch.dtype, latent: tuple[int, int, int, int] | None
) -> None:
    requests = [(23, 140), (1, 130), (9, 9)]
    step = AttentionStep.draw(requests, dtype=dtype)
    if latent is not None:
        step = AttentionStep.draw_latents(requests, latent, dtype)
    together = step.launch_triton(window, is_strict=True)
    # On many processors each split of a single token has a program of its own.
    parts = [(0, 0, 16, 1), (0, 16, 7, 1), (0, 5, 1, 1), (0, 5, 1, 40), (0, 22, 1, 40), (1, 0, 1, 40)]
    for request, first, count, num_processors in parts:
        alone = step.only(request, first, count)
        actual = alone.launch_triton(window, num_processors=num_processors, is_strict=True)
        start = int(step.query_starts[request]) + first
        assert torch.equal(actual, together[start : start + count])


@pytest.mark.parametrize("window", [None, 14])
def test_a_query_has_the_same_bits_wherever_a_part_of_the_step_begins(
    native_dtype: torch.dtype, window: int | None, library: ctypes.CDLL
) -> None:
    step = AttentionStep.draw_prompts(LENGTHS, (2, 1, 32), native_dtype)
    qkv, expected = step.project(), step.launch_encoder(window)
    for first, last in ((0, 21), (21, 22), (22, 300), (300, len(qkv))):
        out = torch.empty_like(expected[first:last])
        library.quire_encoder_attention(
            *(native_dtype is BF16, qkv, out, step.query_starts, len(LENGTHS), first, last - first),
            *(None, 2, 1, 32, window or NO_WINDOW, 0, 32**-0.5, 0.0),
        )
        assert torch.equal(out, expected[first:last])


@pytest.mark.parametrize("sees_both_ways", [False, True])
def test_a_nan_stays_in_its_request(native_dtype: torch.dtype, sees_both_ways: bool) -> None:
    step = AttentionStep.draw_prompts([4, 40, 1], (4, 2, 32), native_dtype)
    launch = step.launch_encoder if sees_both_ways else step.launch_native
    expected = launch()
    step.query[5] = torch.nan
    actual = launch()
    assert torch.isnan(actual[5]).all()
    others = [token for token in range(len(actual)) if token != 5]
    assert torch.equal(actual[others], expected[others])


@needs_triton
def test_rows_that_pad_a_batch_disturb_nobody() -> None:
    step = AttentionStep.draw([(1, 70), (1, 130)])
    padded = replace(
        step,
        query=torch.cat([step.query, torch.full((2, 4, 16), torch.nan)]),
        block_tables=torch.cat([step.block_tables, step.block_tables]),
        query_starts=torch.arange(5, dtype=torch.int32),
        seq_lens=torch.cat([step.seq_lens, torch.zeros(2, dtype=torch.int32)]),
    )
    for num_processors, is_strict in ((4, False), (1, True)):
        actual = padded.launch_triton(num_processors=num_processors, is_strict=is_strict)
        step.assert_near(actual[:2], step.reference())
        assert not actual[2:].any()


@needs_triton
@pytest.mark.parametrize("is_strict", [False, True])
def test_requests_and_tokens_that_pad_a_mixed_step_cost_and_change_nothing(is_strict: bool) -> None:
    step = AttentionStep.draw([(1, 70), (9, 20), (1, 130), (5, 5)])
    expected = step.launch_triton(num_processors=6, is_strict=is_strict)
    padded = replace(
        step,
        query=torch.cat([step.query, torch.full((19, 4, 16), torch.nan)]),
        block_tables=torch.cat([step.block_tables] * 2),
        query_starts=torch.cat([step.query_starts, step.query_starts[-1].repeat(4)]),
        seq_lens=torch.cat([step.seq_lens, torch.zeros(4, dtype=torch.int32)]),
    )
    actual = padded.launch_triton(num_processors=6, is_strict=is_strict)
    assert torch.equal(actual[: len(expected)], expected)


def plan_items(lengths: list[int], num_processors: int, is_strict: bool = False) -> tuple[Tensor, Tensor]:
    """(items, first items of split requests) of single tokens with so many keys, for 8 kv heads."""
    from quire.kernels.attention.attention_plan_triton import launch_plan, plan_attention

    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=TRITON_DEVICE)
    plan = plan_attention(len(lengths), 0, len(lengths), 8, max(lengths), num_processors, is_strict)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=TRITON_DEVICE)
    work = launch_plan(plan, starts, seq_lens, None)
    assert work is not None
    return work.items.cpu(), work.split_items.cpu()


@needs_triton
def test_one_long_request_beside_many_short_ones_has_most_of_the_programs() -> None:
    items, split_items = plan_items([100] * 20 + [32_768] + [100] * 20, num_processors=132)
    taken = items[items[:, 0] < 41]
    assert len(items) == 41 + 33
    longest = taken[taken[:, 0] == 20]
    assert longest[:, 1].tolist() == list(range(len(longest)))
    assert (longest[:, 2] == len(longest)).all()
    assert 28 <= len(longest) <= 32
    assert len(longest) * int(longest[0, 3]) >= 32_768
    assert taken[taken[:, 0] != 20][:, 2].eq(1).all()
    assert split_items.tolist() == [20] + [-1] * 32


@needs_triton
@pytest.mark.parametrize("length", [1, 129, 4096, 131_072])
def test_a_lone_request_fills_the_device_as_far_as_its_length_goes(length: int) -> None:
    items, split_items = plan_items([length], num_processors=132)
    count = int(items[0, 2])
    assert count == min(32, -(-length // 128))
    assert items[:count, 0].eq(0).all()
    assert items[count:, 0].eq(1).all()
    assert split_items[0] == (0 if count > 1 else -1)


@needs_triton
def test_strict_splits_are_cut_at_fixed_places_or_not_at_all() -> None:
    items, split_items = plan_items([3000, 100], num_processors=132, is_strict=True)
    assert items[:4].tolist() == [[0, 0, 3, 1024], [0, 1, 3, 1024], [0, 2, 3, 1024], [1, 0, 1, 1024]]
    assert split_items.tolist() == [0, -1]
    items, _ = plan_items([3000] * 40, num_processors=132, is_strict=True)
    assert items[:, :3].tolist() == [[request, 0, 1] for request in range(40)]


@needs_triton
def test_what_the_kernels_do_not_cover_is_named_with_what_they_do() -> None:
    from quire.kernels.attention.paged_attention_triton import find_uncovered

    assert find_uncovered(32, 8, 128, BF16) is None
    assert find_uncovered(128, 1, 576, BF16, 512) is None
    assert "640 numbers, 1 kv heads: up to 512, with 1 to 128 more" in (
        find_uncovered(4, 1, 640, BF16, 600) or ""
    )
    assert find_uncovered(2, 1, 320, BF16) == "head size 320: even ones from 2 to 256 are covered"
    assert "float64" in (find_uncovered(2, 1, 64, torch.float64) or "")
    assert "129 query heads" in (find_uncovered(129, 1, 64, BF16) or "")
    assert (find_uncovered(33, 1, 256, F32) or "").endswith("of size 256: up to 32 are covered")
