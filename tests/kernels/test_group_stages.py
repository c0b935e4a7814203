"""What stages of ranks, as threads of this process, send each other."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from quire.kernels.group.shared_group import GroupAborted, SharedGroup
from torch import Tensor

Result = TypeVar("Result")

pytestmark = pytest.mark.usefixtures("library")
NUM_STAGES, STAGE_SIZE = 3, 2
RING_BYTES = 1 << 12  # small, so that data goes in pieces and around


@pytest.fixture
def groups() -> Iterator[list[SharedGroup]]:
    """All ranks, the first stage's first."""
    fd = os.memfd_create("group")
    size = NUM_STAGES * STAGE_SIZE
    shape = {"num_stages": NUM_STAGES, "ring_bytes": RING_BYTES}
    yield [SharedGroup(f"/proc/self/fd/{fd}", rank, size, **shape) for rank in range(size)]
    os.close(fd)


def run_ranks(groups: list[SharedGroup], act: Callable[[int, SharedGroup], Result]) -> list[Result]:
    """What `act` returns in each rank; raises what the first of them raises."""
    with ThreadPoolExecutor(len(groups)) as threads:
        futures = [threads.submit(act, number, group) for number, group in enumerate(groups)]
        return [future.result(timeout=30) for future in futures]


def test_what_a_stage_sends_reaches_all_ranks_of_the_next_whole_and_in_order(
    groups: list[SharedGroup],
) -> None:
    drawn = random.Random(3)
    sizes = [drawn.choice((1, 8, 700)) for _ in range(100)]  # of floats: a ring has 1024

    def go_round(number: int, group: SharedGroup) -> None:
        """The ranks of each stage add up what they are given, and pass it on."""
        for turn, size in enumerate(sizes):
            sent = torch.arange(size) + float(turn)
            taken = sent.clone()
            for stage in range(NUM_STAGES):
                if number // STAGE_SIZE == stage and group.rank == 0:
                    group.send(taken)
                if number // STAGE_SIZE == (stage + 1) % NUM_STAGES:
                    group.receive(taken)
                    group.all_reduce(taken)
            times = STAGE_SIZE ** (number // STAGE_SIZE or NUM_STAGES)
            assert torch.equal(taken, sent * times), (number, turn)

    run_ranks(groups, go_round)


def test_what_is_larger_than_a_ring_arrives_while_it_is_sent(groups: list[SharedGroup]) -> None:
    def make(stage: int) -> Tensor:
        return torch.randn(50_000, generator=torch.Generator().manual_seed(stage))

    def pass_on(number: int, group: SharedGroup) -> None:
        stage = number // STAGE_SIZE
        if stage > 0:
            taken = torch.empty(50_000)
            group.receive(taken)
            assert torch.equal(taken, make(stage - 1))
        if stage < NUM_STAGES - 1 and group.rank == 0:
            group.send(make(stage))

    run_ranks(groups, pass_on)


@pytest.mark.parametrize(
    "wait",
    [lambda group: group.receive(torch.empty(9)), lambda group: group.send(torch.empty(RING_BYTES))],
    ids=["for data", "for room"],
)
def test_an_abort_ends_who_waits_for_another_stage(
    groups: list[SharedGroup], wait: Callable[[SharedGroup], None]
) -> None:
    is_waiting = threading.Event()

    def act(number: int, group: SharedGroup) -> str:
        if number == 1:
            is_waiting.wait()
            group.abort("it has no memory")
        is_waiting.set()
        with pytest.raises(GroupAborted) as aborted:
            wait(group)
        return str(aborted.value)

    assert run_ranks([groups[2], groups[5]], act) == ["rank 5: it has no memory"] * 2


def test_a_reset_forgets_what_was_on_its_way(groups: list[SharedGroup]) -> None:
    def go_on(number: int, group: SharedGroup) -> list[float]:
        group.reset()
        if group.rank == 0:
            group.send(torch.full((3,), float(number)))
        taken = torch.empty(3)
        group.receive(taken)
        return taken.tolist()

    for _ in range(3):
        groups[0].send(torch.ones(9))  # which stage 1 never takes
        groups[2].send(torch.ones(5))
        groups[4].receive(torch.ones(5))  # one rank of its stage has it, the other not
        assert run_ranks(groups, go_on) == [[number] * 3 for number in (4, 4, 0, 0, 2, 2)]


def test_who_expects_another_size_than_was_sent_is_told(groups: list[SharedGroup]) -> None:
    groups[0].send(torch.zeros(4))
    with pytest.raises(GroupAborted, match="rank 3 expects 20 bytes, and is sent 16"):
        groups[3].receive(torch.zeros(5))
    with pytest.raises(GroupAborted, match="rank 3 expects"):
        groups[4].send(torch.zeros(5))
