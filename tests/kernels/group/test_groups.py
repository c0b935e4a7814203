"""Groups of ranks, which are threads of this process: in shared memory, or with a device each on gloo."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from gloo import make_group
from kernel_checks import random_parts, run_ranks
from quire.kernels.group.device_group import DeviceGroup
from quire.kernels.group.shared_group import DEFAULT_SLOT_BYTES, GroupAborted, GroupLost, SharedGroup
from quire.kernels.program.native import load_library
from torch import Tensor

pytestmark = pytest.mark.skipif(load_library() is None, reason="the native kernels cannot be built here")
SLOT_BYTES = 1 << 16  # small, so that operations go in pieces

Make = Callable[[str, int, int], Any]
SHARED: Make = partial(SharedGroup, slot_bytes=SLOT_BYTES)
DEVICE: Make = make_group
DEVICE_IN_ORDER: Make = partial(make_group, sums_in_order=True)


@contextmanager
def joined(make: Make, size: int) -> Iterator[list[Any]]:
    """The groups of all ranks, which have met."""
    fd = os.memfd_create("group")
    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(make, f"/proc/self/fd/{fd}", rank, size) for rank in range(size)]
        groups = [future.result(timeout=30) for future in futures]
    yield groups
    run_ranks(groups, lambda group: group.leave())
    os.close(fd)


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


def reduce_all(groups: list[Any], parts: list[Tensor]) -> list[Tensor]:
    def reduce(group: Any) -> Tensor:
        x = parts[group.rank].clone()
        group.all_reduce(x)
        group.note_step()
        return x

    return run_ranks(groups, reduce)


# Around the borders of vectors, of slots and of what threads share.
_COUNTS = (1, 7, 16, 33, 700, 1000, 4096, 4097, 8193, 30_001, 32_769, 100_003, 262_144)


@pytest.mark.parametrize(
    ("make", "size", "dtypes"),
    [
        *((SHARED, size, [torch.float32, torch.bfloat16]) for size in (1, 2, 3, 4)),
        *((make, 2, [torch.float32, torch.bfloat16, torch.float16]) for make in (DEVICE, DEVICE_IN_ORDER)),
        (DEVICE_IN_ORDER, 3, [torch.float32, torch.bfloat16, torch.float16]),
    ],
)
def test_a_sum_has_the_bits_of_the_sum_in_rank_order_in_every_rank(
    make: Make, size: int, dtypes: list[torch.dtype]
) -> None:
    with joined(make, size) as groups:
        assert all(group.is_exact for group in groups)
        for dtype in dtypes:
            for count in _COUNTS if make is SHARED else _COUNTS[::4]:
                parts = random_parts(size, count, dtype)
                expected = sum_reference(parts)
                assert all(torch.equal(x, expected) for x in reduce_all(groups, parts)), (count, dtype)


@pytest.mark.parametrize(("make", "takers"), [(SHARED, (0, 2)), (DEVICE, (0,))])
def test_ranks_get_the_slices_of_all_side_by_side(make: Make, takers: tuple[int, ...]) -> None:
    with joined(make, 3) as groups:
        for num_rows in (1, 5, 400):
            slices = [torch.randn(num_rows, width) for width in (100, 1, 51)]
            outs = [torch.zeros(num_rows, 152) for _ in groups]

            def gather(group: Any, slices: list[Tensor] = slices, outs: list[Tensor] = outs) -> None:
                group.gather_slices(slices[group.rank], outs[group.rank] if group.rank in takers else None)

            run_ranks(groups, gather)
            assert all(torch.equal(outs[rank], torch.cat(slices, dim=1)) for rank in takers)
            assert not outs[1].any()


@pytest.mark.parametrize("make", [SHARED, DEVICE])
def test_an_abort_ends_who_waits_and_who_comes_later_until_all_have_reset(make: Make) -> None:
    with joined(make, 3) as groups:
        is_waiting = threading.Event()

        def act(group: Any) -> None:
            if group.rank == 1:
                is_waiting.wait()
                group.abort("no memory", is_out_of_memory=True)
            is_waiting.set()
            with pytest.raises(GroupAborted, match="rank 1: no memory") as aborted:
                group.all_reduce(torch.ones(5))
            assert aborted.value.is_out_of_memory
            if make is SHARED:
                with pytest.raises(GroupAborted):
                    group.check()

        for _ in range(2):
            is_waiting.clear()
            run_ranks(groups, act)
            if make is SHARED:
                groups[2].abort("too late to count")
            run_ranks(groups, lambda group: group.reset())
            parts = random_parts(3, 500, torch.float32)
            assert torch.allclose(reduce_all(groups, parts)[2], sum_reference(parts), rtol=1e-5, atol=1e-4)


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


def test_more_than_two_ranks_say_that_a_sum_is_not_exact_unless_it_is_in_order() -> None:
    with joined(DEVICE, 3) as groups:
        assert not any(group.is_exact for group in groups)
        parts = random_parts(3, 1000, torch.float32)
        results = reduce_all(groups, parts)
        assert all(torch.equal(x, results[0]) for x in results)
        assert torch.allclose(results[0], sum(parts), rtol=1e-5, atol=1e-4)


def test_a_reset_without_an_abort_keeps_the_communicator() -> None:
    with joined(DEVICE, 2) as groups:
        before = [group._communicator for group in groups]
        run_ranks(groups, DeviceGroup.reset)
        assert [group._communicator for group in groups] == before


def test_a_communicator_that_nobody_waits_for_on_the_host_is_aborted_too() -> None:
    """As on a GPU, which waits for the other ranks while the host goes on until `note_step`."""

    class Queue:
        def __init__(self) -> None:
            self.has_ended = threading.Event()

        def is_completed(self) -> bool:
            return True

        def wait(self) -> None:
            """As if the host did not wait."""

        def allreduce(self, tensors: list[Tensor]) -> Queue:
            del tensors
            return self

        def abort(self) -> None:
            self.has_ended.set()

    with joined(DEVICE, 2) as groups:
        queue = Queue()
        kept = groups[0]._communicator
        groups[0]._communicator = queue
        groups[0].all_reduce(torch.ones(5))
        groups[1].abort("it fails")
        assert queue.has_ended.wait(10)
        with pytest.raises(GroupAborted, match="rank 1: it fails"):
            groups[0].note_step()
        del kept
        run_ranks(groups, DeviceGroup.reset)
        assert torch.equal(reduce_all(groups, [torch.ones(3)] * 2)[0], torch.full((3,), 2.0))
