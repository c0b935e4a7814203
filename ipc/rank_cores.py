"""Which cores each rank of a group computes on: equally many, on a NUMA node of its own if that fits.

Pure but for `list_cores`, which asks Linux.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True, order=True)
class Core:
    """A physical core: its memory's node, and the number of the first of its processors that may be used."""

    node: int
    processor: int


def list_cores(system: Path = _SYSTEM) -> list[Core]:
    """Those that this process may run on, sorted by node."""
    nodes = {
        processor: int(folder.name.removeprefix("node"))
        for folder in (system / "node").glob("node[0-9]*")
        for processor in _read_processors(folder / "cpulist")
    }
    firsts: dict[tuple[int, ...], int] = {}
    for processor in sorted(os.sched_getaffinity(0)):
        siblings = _read_processors(system / f"cpu/cpu{processor}/topology/thread_siblings_list")
        firsts.setdefault(tuple(siblings) or (processor,), processor)
    return sorted(Core(nodes.get(processor, 0), processor) for processor in firsts.values())


def plan_ranks(cores: list[Core], size: int) -> list[list[Core]] | None:
    """The cores of each rank; None if there are fewer than ranks: then nobody has one of its own."""
    each = len(cores) // size
    if not each:
        return None
    starts = [rank * len(cores) // size for rank in range(size)]
    return [cores[start : start + each] for start in starts]


def describe_plan(size: int, cores: list[Core]) -> str:
    """One line for people: 'rank 0: cores 0-3 (node 0), rank 1: cores 4-7 (node 1)'."""
    plan = plan_ranks(cores, size)
    if plan is None:
        return f"{size} ranks share {len(cores)} cores: slow, since each waits for all others in every layer"
    return ", ".join(f"rank {rank}: {_describe(part)}" for rank, part in enumerate(plan))


def _describe(cores: list[Core]) -> str:
    nodes = ",".join(str(node) for node in sorted({core.node for core in cores}))
    return f"cores {','.join(str(core.processor) for core in cores)} (node {nodes})"


def _read_processors(path: Path) -> list[int]:
    """Of a list such as '0-3,8'; none where the file is missing."""
    try:
        text = path.read_text().strip()
    except OSError:
        return []
    ranges = [part.partition("-") for part in text.split(",") if part]
    return [number for low, _, high in ranges for number in range(int(low), int(high or low) + 1)]
