"""A group with a device a rank, on torch's gloo: its ranks are threads of this process, all on CPUs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from gloo import make_group
from kernel_checks import random_parts, run_ranks
from quire.kernels.group.device_group import DeviceGroup
from quire.kernels.group.shared_group import GroupAborted
from quire.kernels.program.native import load_library
from torch import Tensor

pytestmark = pytest.mark.skipif(load_library() is None, reason="the native kernels cannot be built here")


@contextmanager
def joined(size: int, *, sums_in_order: bool = False) -> Iterator[list[DeviceGroup]]:
    """The groups of all ranks, which have met."""
    fd = os.memfd_create("group")
    with ThreadPoolExecutor(size) as threads:
        futures = [
            threads.submit(make_group, f"/proc/self/fd/{fd}", rank, size, sums_in_order=sums_in_order)
            for rank in range(size)
        ]
        groups = [future.result(timeout=30) for future in futures]
    yield groups
    run_ranks(groups, DeviceGroup.leave)
    os.close(fd)


def reduce_all(groups: list[DeviceGroup], parts: list[Tensor]) -> list[Tensor]:
    def reduce(group: DeviceGroup) -> Tensor:
        x = parts[group.rank].clone()
        group.all_reduce(x)
        group.note_step()
        return x

    return run_ranks(groups, reduce)


@pytest.mark.parametrize(("size", "in_order"), [(2, False), (2, True), (3, True)])
def test_a_sum_has_the_bits_of_the_sum_in_rank_order_in_every_rank(size: int, in_order: bool) -> None:
    with joined(size, sums_in_order=in_order) as groups:
        assert all(group.is_exact for group in groups)
        for count, dtype in ((1, torch.float32), (30_001, torch.bfloat16), (700, torch.float16)):
            parts = random_parts(size, count, dtype)
            expected = parts[0].float()
            for part in parts[1:]:
                expected = expected + part.float()
            assert all(torch.equal(x, expected.to(dtype)) for x in reduce_all(groups, parts)), count


def test_more_than_two_ranks_say_that_a_sum_is_not_exact_unless_it_is_in_order() -> None:
    with joined(3) as groups:
        assert not any(group.is_exact for group in groups)
        parts = random_parts(3, 1000, torch.float32)
        results = reduce_all(groups, parts)
        assert all(torch.equal(x, results[0]) for x in results)
        assert torch.allclose(results[0], sum(parts), rtol=1e-5, atol=1e-4)


def test_rank_0_gets_the_slices_of_all_side_by_side() -> None:
    with joined(3) as groups:
        for num_rows in (1, 5, 400):
            slices = [torch.randn(num_rows, width) for width in (50, 51, 51)]
            out = torch.zeros(num_rows, 152)

            def gather(group: DeviceGroup, slices: list[Tensor] = slices, out: Tensor = out) -> None:
                group.gather_slices(slices[group.rank], None if group.rank else out)

            run_ranks(groups, gather)
            assert torch.equal(out, torch.cat(slices, dim=1))


def test_an_abort_ends_who_waits_and_who_comes_later_and_a_reset_connects_all_again() -> None:
    with joined(3) as groups:
        is_waiting = threading.Event()

        def act(group: DeviceGroup) -> str:
            if group.rank == 1:
                is_waiting.wait()
                group.abort("no memory", is_out_of_memory=True)
            is_waiting.set()
            with pytest.raises(GroupAborted, match="rank 1: no memory") as aborted:
                group.all_reduce(torch.ones(5))
            assert aborted.value.is_out_of_memory
            return str(aborted.value)

        for _ in range(2):
            is_waiting.clear()
            run_ranks(groups, act)
            run_ranks(groups, DeviceGroup.reset)
            parts = random_parts(3, 500, torch.float32)
            assert torch.allclose(reduce_all(groups, parts)[2], sum(parts), rtol=1e-5, atol=1e-4)


def test_a_reset_without_an_abort_keeps_the_communicator() -> None:
    with joined(2) as groups:
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

    with joined(2) as groups:
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
