"""Which cores a rank gets: as many as the others, on one node where that is possible."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from quire.ipc.rank_cores import Core, describe_plan, list_cores, plan_ranks


def make_cores(*num_per_node: int) -> list[Core]:
    nodes = [node for node, count in enumerate(num_per_node) for _ in range(count)]
    return [Core(node, processor) for processor, node in enumerate(nodes)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_ranks_have_equally_many_cores_and_none_in_common(size: int) -> None:
    plan = plan_ranks(make_cores(4, 4), size)
    assert plan is not None
    assert {len(part) for part in plan} == {8 // size}
    taken = [core for part in plan for core in part]
    assert len(set(taken)) == len(taken)


def test_ranks_are_each_on_a_node_of_their_own_if_there_are_as_many() -> None:
    plan = plan_ranks(make_cores(4, 4), 2)
    assert plan is not None
    assert [{core.node for core in part} for part in plan] == [{0}, {1}]
    assert describe_plan(2, make_cores(2, 2)) == "rank 0: cores 0,1 (node 0), rank 1: cores 2,3 (node 1)"


def test_more_ranks_than_cores_have_none_of_their_own() -> None:
    assert plan_ranks(make_cores(2), 3) is None
    assert describe_plan(3, make_cores(2)).startswith("3 ranks share 2 cores: slow")


def test_of_a_core_with_two_threads_the_first_that_may_be_used_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for processor in range(4):  # 0 and 2 are one core, 1 and 3 another, on a node of its own
        topology = tmp_path / f"cpu/cpu{processor}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{processor % 2},{processor % 2 + 2}\n")
    for node, processors in enumerate(("0,2", "1,3")):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(processors)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 2, 3})
    assert list_cores(tmp_path) == [Core(0, 0), Core(1, 3)]


def test_a_machine_that_says_nothing_has_a_core_for_each_processor(tmp_path: Path) -> None:
    assert list_cores(tmp_path) == [Core(0, number) for number in sorted(os.sched_getaffinity(0))]
