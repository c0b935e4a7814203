"""How a machine's cores are divided between engines, or between the ranks of one: equally many for each, on a
NUMA node of its own if that fits.

Pure but for `list_cores`, which asks Linux.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .cgroup import count_processors

_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True, order=True)
class CpuCore:
    """A physical core: its memory's node, and the number of the first of its processors that may be used."""

    node: int
    processor: int


def list_cores(system: Path = _SYSTEM) -> list[CpuCore]:
    """The cores that this process may use, sorted by node; no more than its group's quota allows."""
    nodes = {
        processor: int(folder.name.removeprefix("node"))
        for folder in (system / "node").glob("node[0-9]*")
        for processor in _read_processors(folder / "cpulist")
    }
    firsts: dict[tuple[int, ...], int] = {}
    for processor in sorted(os.sched_getaffinity(0)):
        siblings = _read_processors(system / f"cpu/cpu{processor}/topology/thread_siblings_list")
        firsts.setdefault(tuple(siblings) or (processor,), processor)
    cores = sorted(CpuCore(nodes.get(processor, 0), processor) for processor in firsts.values())
    return cores[: count_processors()]


def divide_cores(cores: Sequence[CpuCore], count: int) -> list[Sequence[CpuCore]] | None:
    """`count` parts without a core in common; None if there are fewer cores than parts."""
    each = len(cores) // count
    if not each:
        return None
    starts = [part * len(cores) // count for part in range(count)]
    return [cores[start : start + each] for start in starts]


def find_engine_cores(cores: Sequence[CpuCore], index: int, num_engines: int) -> Sequence[CpuCore]:
    """The cores of one of several engines. With fewer cores than engines, engines share a core."""
    parts = divide_cores(cores, num_engines)
    return [cores[index % len(cores)]] if parts is None else parts[index]


def describe_engines(cores: Sequence[CpuCore], num_engines: int) -> str:
    """One line for people: '2 engines with 4 threads each (cores 0-3, 4-7)'."""
    parts = [find_engine_cores(cores, index, num_engines) for index in range(num_engines)]
    num_threads = len(parts[0])
    shown = ", ".join(map(_format_cores, parts))
    return f"{num_engines} engines with {num_threads} thread{'s' * (num_threads > 1)} each (cores {shown})"


def describe_ranks(cores: Sequence[CpuCore], num_ranks: int) -> str:
    """One line for people: 'rank 0: cores 0-3 (node 0), rank 1: cores 4-7 (node 1)'."""
    parts = divide_cores(cores, num_ranks)
    if parts is None:
        shared = f"{num_ranks} ranks share {len(cores)} cores"
        return f"{shared}: slow, since each waits for all others in every layer"
    nodes = ["+".join(map(str, sorted({core.node for core in part}))) for part in parts]
    return ", ".join(
        f"rank {rank}: cores {_format_cores(part)} (node {node})"
        for rank, (part, node) in enumerate(zip(parts, nodes, strict=True))
    )


def _format_cores(cores: Sequence[CpuCore]) -> str:
    """'0-3' of neighbours, else '0+2+4'."""
    numbers = [core.processor for core in cores]
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and numbers == list(range(first, last + 1)):
        return f"{first}-{last}"
    return "+".join(map(str, numbers))


def _read_processors(path: Path) -> list[int]:
    """The processors in a file with a list such as '0-3,8'; none if it is missing."""
    try:
        text = path.read_text().strip()
    except OSError:
        return []
    ranges = [part.partition("-") for part in text.split(",") if part]
    return [number for low, _, high in ranges for number in range(int(low), int(high or low) + 1)]
