"""A group's operations, its ranks being threads of this process, against sums in the order of ranks."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from kernel_checks import random_parts, run_ranks
from quire.kernels.group.shared_group import DEFAULT_SLOT_BYTES, GroupAborted, GroupLost, SharedGroup
from quire.kernels.program.native import load_library
from torch import Tensor

pytestmark = pytest.mark.skipif(load_library() is None, reason="the native kernels cannot be built here")
SLOT_BYTES = 1 << 16  # small, so that operations go in pieces


@pytest.fixture
def path() -> Iterator[str]:
    """A file without a name, as ranks get it."""
    fd = os.memfd_create("group")
    yield f"/proc/self/fd/{fd}"
    os.close(fd)


def make_groups(path: str, size: int, slot_bytes: int = SLOT_BYTES) -> list[SharedGroup]:
    return [SharedGroup(path, rank, size, slot_bytes) for rank in range(size)]


def sum_reference(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def reduce_all(groups: list[SharedGroup], parts: list[Tensor]) -> list[Tensor]:
    def reduce(group: SharedGroup) -> Tensor:
        x = parts[group.rank].clone()
        group.all_reduce(x)
        return x

    return run_ranks(groups, reduce)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_sum_has_the_bits_of_the_sum_in_rank_order_in_every_rank(
    path: str, size: int, dtype: torch.dtype
) -> None:
    groups = make_groups(path, size)
    for count in (1, 7, 16, 33, 1000, 4096, 4097, 8193, 32_769, 100_003, 262_144):
        parts = random_parts(size, count, dtype)
        expected = sum_reference(parts)
        assert all(torch.equal(x, expected) for x in reduce_all(groups, parts)), count


def test_ranks_get_the_slices_of_all_side_by_side(path: str) -> None:
    groups = make_groups(path, 3)
    for num_rows in (1, 5, 400):
        slices = [torch.randn(num_rows, width) for width in (100, 1, 51)]
        outs = [torch.zeros(num_rows, 152) for _ in groups]

        def gather(group: SharedGroup, slices: list[Tensor] = slices, outs: list[Tensor] = outs) -> None:
            group.gather_slices(slices[group.rank], None if group.rank == 1 else outs[group.rank])

        run_ranks(groups, gather)
        assert torch.equal(outs[0], torch.cat(slices, dim=1))
        assert torch.equal(outs[2], outs[0])
        assert not outs[1].any()


def test_what_is_large_enough_for_a_ranks_threads_to_share_is_as_exact(
    path: str, set_threads: Callable[[int], None]
) -> None:
    set_threads(3)
    groups = make_groups(path, 2, DEFAULT_SLOT_BYTES)
    parts = random_parts(2, 400_003, torch.float32)
    assert all(torch.equal(x, sum_reference(parts)) for x in reduce_all(groups, parts))
    slices, out = [torch.randn(3000, width) for width in (100, 51)], torch.empty(3000, 151)
    run_ranks(groups, lambda group: group.gather_slices(slices[group.rank], None if group.rank else out))
    assert torch.equal(out, torch.cat(slices, dim=1))


def test_rank_0_does_not_wait_for_those_that_take_what_it_broadcasts(path: str) -> None:
    groups = make_groups(path, 2)
    groups[0].broadcast(torch.arange(100))  # in this thread: nobody else is there
    taken = torch.zeros(100, dtype=torch.int64)
    groups[1].broadcast(taken)
    assert torch.equal(taken, torch.arange(100))


def test_what_ranks_do_in_a_row_at_their_own_pace_stays_apart(path: str) -> None:
    groups = make_groups(path, 3)
    drawn = random.Random(7)
    plan = [(drawn.choice(("sum", "gather", "broadcast")), drawn.randrange(1, 30_000)) for _ in range(300)]

    def act(group: SharedGroup) -> list[Tensor]:
        results: list[Tensor] = []
        for turn, (operation, count) in enumerate(plan):
            x = torch.full((1, count), float(turn * 4 + group.rank))
            if operation == "gather":
                out = torch.empty((1, 3 * count))
                group.gather_slices(x, out)
                x = out
            elif operation == "sum":
                group.all_reduce(x)
            else:
                group.broadcast(x)
            results.append(torch.stack([x.min(), x.max()]))
        return results

    values = {"sum": (12, 3, 3), "gather": (4, 0, 2), "broadcast": (4, 0, 0)}
    expected = [
        torch.tensor([factor * turn + low, factor * turn + high], dtype=torch.float32)
        for turn, (factor, low, high) in enumerate(values[operation] for operation, _ in plan)
    ]
    for results in run_ranks(groups, act):
        assert all(map(torch.equal, results, expected))


def test_an_abort_ends_who_waits_and_who_comes_later_until_all_have_reset(path: str) -> None:
    groups = make_groups(path, 3)
    is_waiting = threading.Event()

    def act(group: SharedGroup) -> str:
        if group.rank == 1:
            is_waiting.wait()
            group.abort("no memory", is_out_of_memory=True)
        is_waiting.set()
        with pytest.raises(GroupAborted, match="rank 1: no memory") as aborted:
            group.all_reduce(torch.ones(5))
        assert aborted.value.is_out_of_memory
        with pytest.raises(GroupAborted):
            group.check()
        return str(aborted.value)

    run_ranks(groups, act)
    groups[2].abort("too late to count")

    def go_on(group: SharedGroup) -> Tensor:
        group.reset()
        x = torch.ones(5)
        group.all_reduce(x)
        group.check()
        return x

    assert all(torch.equal(x, torch.full((5,), 3.0)) for x in run_ranks(groups, go_on))


def test_ranks_that_have_done_more_or_less_agree_again_after_a_reset(path: str) -> None:
    groups = make_groups(path, 2)
    for _ in range(3):
        groups[0].broadcast(torch.ones(3))  # which rank 1 never takes
        groups[1].abort("it fails meanwhile")
        run_ranks(groups, SharedGroup.reset)
        parts = random_parts(2, 5000, torch.float32)
        assert torch.equal(reduce_all(groups, parts)[1], sum_reference(parts))


def test_who_waits_for_a_rank_that_has_ended_is_told(path: str) -> None:
    groups = make_groups(path, 2)
    groups[1].leave()  # as the end of its process would, this lets go of the file
    with pytest.raises(GroupLost, match="rank 1 is gone"):
        groups[0].all_reduce(torch.ones(5))
    with pytest.raises(GroupAborted, match="rank 1 is gone"):
        groups[0].all_reduce(torch.ones(5))
    with pytest.raises(GroupLost):
        groups[0].reset()


def test_ranks_that_do_not_mean_the_same_operation_are_told(path: str) -> None:
    groups = make_groups(path, 2)

    def act(group: SharedGroup) -> str:
        with pytest.raises(GroupAborted) as aborted:
            group.all_reduce(torch.ones(5 + group.rank))
        return str(aborted.value)

    assert "is at an operation over" in run_ranks(groups, act)[0]
