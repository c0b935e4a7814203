"""How the cores of a machine are divided: equally, on one node each where that is possible."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from quire.ipc.processes.cpu_cores import (
    CpuCore,
    describe_engines,
    describe_ranks,
    divide_cores,
    find_engine_cores,
    list_cores,
)

TWO_NODES = [CpuCore(node, 4 * node + number) for node in (0, 1) for number in range(4)]


@pytest.mark.parametrize("count", range(1, 9))
def test_each_part_has_as_many_cores_as_any_other_and_its_own(count: int) -> None:
    parts = divide_cores(TWO_NODES, count)
    assert parts is not None
    assert {len(part) for part in parts} == {8 // count}
    assert len({core for part in parts for core in part}) == count * (8 // count)


def test_two_parts_are_each_on_a_node_of_their_own() -> None:
    assert divide_cores(TWO_NODES, 2) == [TWO_NODES[:4], TWO_NODES[4:]]
    assert describe_engines(TWO_NODES, 2) == "2 engines with 4 threads each (cores 0-3, 4-7)"
    assert describe_ranks(TWO_NODES, 2) == "rank 0: cores 0-3 (node 0), rank 1: cores 4-7 (node 1)"


def test_more_ranks_than_cores_have_none_of_their_own() -> None:
    assert divide_cores(TWO_NODES[:2], 3) is None
    assert describe_ranks(TWO_NODES[:2], 3).startswith("3 ranks share 2 cores: slow")


def test_more_engines_than_cores_share_them() -> None:
    cores = [CpuCore(0, 0), CpuCore(0, 2)]
    assert [find_engine_cores(cores, index, 3)[0].processor for index in range(3)] == [0, 2, 0]
    assert describe_engines(cores, 3) == "3 engines with 1 thread each (cores 0, 2, 0)"


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
    assert list_cores(tmp_path) == [CpuCore(0, 0), CpuCore(1, 3)]


def test_a_machine_that_says_nothing_has_a_core_for_each_processor(tmp_path: Path) -> None:
    assert list_cores(tmp_path) == [CpuCore(0, number) for number in sorted(os.sched_getaffinity(0))]
