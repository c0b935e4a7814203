"""Attention in Triton against its torch reference; interpreted where there is no GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from attention_step import MIXED, SHAPES, AttentionStep
from kernel_checks import TRITON_DEVICE as DEVICE
from torch import Tensor

pytest.importorskip("triton")

from quire.kernels.attention.attention_plan_triton import launch_plan, plan_attention
from quire.kernels.attention.paged_attention import NO_WINDOW, pack_position_bias
from quire.kernels.attention.paged_attention_triton import find_uncovered, launch_paged_attention


class Step(AttentionStep):
    """Computed by the Triton kernels."""

    def compute(
        self,
        window: int | None = None,
        num_processors: int = 1,
        is_strict: bool = False,
        soft_cap: float | None = None,
        ahead: int = 0,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        """Through the kernels. More processors ask for more splits; strict splits have 64 keys."""
        query_lens = self.query_starts.diff()
        plan = plan_attention(
            int((query_lens == 1).sum()),
            int((query_lens > 1).sum()),
            len(query_lens),
            self.k_cache.shape[1],
            int(self.seq_lens.max()),
            num_processors,
            is_strict,
            strict_split_keys=64,
        )
        num_tokens, heads, head_size = self.query.shape
        # The queries lie inside longer rows, as in the fused projection.
        rows = torch.full((num_tokens, (heads + 2) * head_size), torch.nan, dtype=self.query.dtype)
        rows[:, : heads * head_size] = self.query.reshape(num_tokens, -1)
        tensors = (self.k_cache, self.v_cache, self.block_tables, self.query_starts, self.seq_lens)
        work = launch_plan(plan, self.query_starts.to(DEVICE), self.seq_lens.to(DEVICE), window)
        out = launch_paged_attention(
            rows.to(DEVICE),
            rows.shape[1],
            heads,
            *(tensor.to(DEVICE) for tensor in tensors),
            window,
            plan,
            work,
            soft_cap,
            None,
            ahead,
            None if position_bias is None else position_bias.to(DEVICE),
        )
        return out.view(-1, heads, head_size).cpu()


def assert_near_reference(step: Step, actual: Tensor, expected: Tensor) -> None:
    """In 16 bits the kernel also rounds each weight, and both round the result, perhaps across a tie."""
    bound, rtol = step.bound(), 0.0
    if step.query.dtype != torch.float32:
        rtol = torch.finfo(step.query.dtype).eps
        bound += step.largest_value * rtol / 2
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=bound)


@pytest.mark.parametrize(
    ("window", "num_processors", "is_strict"),
    [(None, 1, False), (70, 12, False), (None, 12, True), (70, 1, True)],
)
def test_a_mixed_step_equals_the_reference(window: int | None, num_processors: int, is_strict: bool) -> None:
    step = Step.draw(MIXED)
    actual = step.compute(window, num_processors, is_strict)
    assert_near_reference(step, actual, step.reference(window))


# Every shape in one of the two types, which take turns; the other one is slow, as half precision is.
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(shape, dtype, marks=[] if dtype == usual else [pytest.mark.slow])
        for shape, usual in zip(SHAPES[1:], itertools.cycle([torch.bfloat16, torch.float32]), strict=False)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ],
)
def test_every_shape_and_type_equals_the_reference(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    step = Step.draw([(5, 37), (1, 130)], *shape, dtype=dtype)
    assert_near_reference(step, step.compute(num_processors=4), step.reference())


# Every value beside every other one: interpreted, each case takes a second.
@pytest.mark.parametrize(
    ("window", "ahead", "is_strict", "has_bias"),
    [
        (None, NO_WINDOW, False, True),
        (None, NO_WINDOW, True, False),
        (14, 13, False, False),
        (14, 13, True, True),
        (65, 64, False, True),
        (65, 64, True, False),
    ],
)
def test_a_query_may_see_keys_after_itself(
    window: int | None, ahead: int, is_strict: bool, has_bias: bool
) -> None:
    step = Step.draw([(1, 1), (3, 3), (70, 70)])
    drawn = torch.randn(4, 2 * 70 - 1, generator=torch.Generator().manual_seed(3))
    bias = pack_position_bias(drawn) if has_bias else None
    actual = step.compute(window, 1, is_strict, None, ahead, bias)
    assert_near_reference(step, actual, step.reference(window, None, None, ahead, bias))


@pytest.mark.parametrize("num_processors", [1, 6])
def test_a_soft_cap_bends_every_score_before_the_softmax(num_processors: int) -> None:
    step = Step.draw([(5, 90), (1, 70)], num_kv_heads=4)
    step.query *= 8
    actual = step.compute(soft_cap=2.0, num_processors=num_processors)
    for request, (count, length) in enumerate(((5, 90), (1, 70))):
        start = int(step.query_starts[request])
        blocks = step.block_tables[request, : -(-length // 16)].long()
        key, value = (
            cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].double()
            for cache in (step.k_cache, step.v_cache)
        )
        query = step.query[start : start + count].double().transpose(0, 1)  # [H, t, D]
        scores = 2.0 * torch.tanh(query @ key.transpose(1, 2) / 4 / 2.0)
        seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
        assert_near_reference(
            step, actual[start : start + count], expected.transpose(0, 1).to(step.query.dtype)
        )


@pytest.mark.usefixtures("dots_in_order")
@pytest.mark.parametrize(("window", "dtype"), [(None, torch.bfloat16), (70, torch.float32)])
def test_strict_rows_have_the_same_bits_in_any_company_chunk_and_split(
    window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":
        triton_interpreter = pytest.importorskip("triton_interpreter")
        builder = triton_interpreter.interpreter.InterpreterBuilder
        monkeypatch.setattr(builder, "create_dot", triton_interpreter.multiply_in_order)
    step = Step.draw([(23, 210), (1, 130), (9, 9)], dtype=dtype)
    together = step.compute(window, is_strict=True)
    # On many processors each split of a single token has a program of its own.
    for first, count, num_processors in ((0, 16, 1), (16, 7, 1), (5, 1, 1), (5, 1, 40), (22, 1, 40)):
        actual = step.only(0, first, count).compute(window, num_processors, is_strict=True)
        assert torch.equal(actual, together[first : first + count])
    assert torch.equal(step.only(1, 0, 1).compute(window, 40, is_strict=True), together[23:24])


def test_rows_that_pad_a_batch_disturb_nobody() -> None:
    step = Step.draw([(1, 70), (1, 130)])
    expected = step.compute(num_processors=4)
    padded = replace(
        step,
        query=torch.cat([step.query, torch.full((2, 4, 16), torch.nan)]),
        block_tables=torch.cat([step.block_tables, step.block_tables]),
        query_starts=torch.arange(5, dtype=torch.int32),
        seq_lens=torch.cat([step.seq_lens, torch.zeros(2, dtype=torch.int32)]),
    )
    for num_processors, is_strict in ((4, False), (1, True)):
        actual = padded.compute(num_processors=num_processors, is_strict=is_strict)
        torch.testing.assert_close(actual[:2], expected)
        assert not actual[2:].any()


def plan_items(lengths: list[int], num_processors: int, is_strict: bool = False) -> tuple[Tensor, Tensor]:
    """(items, first items of split requests) of single tokens with so many keys, for 8 kv heads."""
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE)
    plan = plan_attention(len(lengths), 0, len(lengths), 8, max(lengths), num_processors, is_strict)
    work = launch_plan(plan, starts, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), None)
    assert work is not None
    return work.items.cpu(), work.split_items.cpu()


def test_one_long_request_beside_many_short_ones_has_most_of_the_programs() -> None:
    items, split_items = plan_items([100] * 20 + [32_768] + [100] * 20, num_processors=132)
    found = items[items[:, 0] < 41]
    assert len(items) == 41 + 33
    longest = found[found[:, 0] == 20]
    assert longest[:, 1].tolist() == list(range(len(longest)))
    assert (longest[:, 2] == len(longest)).all()
    assert 28 <= len(longest) <= 32
    assert len(longest) * int(longest[0, 3]) >= 32_768
    assert found[found[:, 0] != 20][:, 2].eq(1).all()
    assert split_items.tolist() == [20] + [-1] * 32


@pytest.mark.parametrize("length", [1, 129, 4096, 131_072])
def test_a_lone_request_fills_the_device_as_far_as_its_length_goes(length: int) -> None:
    items, split_items = plan_items([length], num_processors=132)
    count = int(items[0, 2])
    assert count == min(32, -(-length // 128))
    assert items[:count, 0].eq(0).all()
    assert items[count:, 0].eq(1).all()
    assert split_items[0] == (0 if count > 1 else -1)


def test_strict_splits_are_cut_at_fixed_places_or_not_at_all() -> None:
    items, split_items = plan_items([3000, 100], num_processors=132, is_strict=True)
    assert items[:4].tolist() == [[0, 0, 3, 1024], [0, 1, 3, 1024], [0, 2, 3, 1024], [1, 0, 1, 1024]]
    assert split_items.tolist() == [0, -1]
    items, _ = plan_items([3000] * 40, num_processors=132, is_strict=True)
    assert items[:, :3].tolist() == [[request, 0, 1] for request in range(40)]


@pytest.mark.parametrize("is_strict", [False, True])
def test_requests_and_tokens_that_pad_a_mixed_step_cost_and_change_nothing(is_strict: bool) -> None:
    step = Step.draw([(1, 70), (18, 40), (1, 300), (5, 5)])
    expected = step.compute(num_processors=6, is_strict=is_strict)
    last = step.query_starts[-1]
    padded = replace(
        step,
        query=torch.cat([step.query, torch.full((39, 4, 16), torch.nan)]),
        block_tables=torch.cat([step.block_tables] * 2),
        query_starts=torch.cat([step.query_starts, last.repeat(4)]),
        seq_lens=torch.cat([step.seq_lens, torch.zeros(4, dtype=torch.int32)]),
    )
    actual = padded.compute(num_processors=6, is_strict=is_strict)
    assert torch.equal(actual[: len(expected)], expected)


def test_what_the_kernels_do_not_cover_is_named_with_what_they_do() -> None:
    assert find_uncovered(32, 8, 128, torch.bfloat16) is None
    assert find_uncovered(2, 1, 320, torch.bfloat16) == "head size 320: even ones from 2 to 256 are covered"
    assert "float64" in (find_uncovered(2, 1, 64, torch.float64) or "")
    assert "129 query heads" in (find_uncovered(129, 1, 64, torch.bfloat16) or "")
    assert (find_uncovered(33, 1, 256, torch.float32) or "").endswith("of size 256: up to 32 are covered")
