"""The limits of this process's control groups (versions 1 and 2), such as a container's or a systemd unit's.

Its group and those above it count, as far as they are visible.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def find_cpu_quota(root: Path = _ROOT, group_file: Path = _OWN) -> float | None:
    """How many processors may be used, such as 2.5; None without a bound."""
    quotas: list[float] = []
    for folder in _list_folders(root, group_file, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        quota = quota or _read(folder / "cpu.cfs_quota_us")
        period = period or _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def find_free_memory(root: Path = _ROOT, group_file: Path = _OWN) -> int | None:
    """Bytes that the group may still take, None without a bound."""
    free: list[int] = []
    for folder in _list_folders(root, group_file, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit():
            free.append(int(limit) - int(used))
    return min(free, default=None)


def count_processors() -> int:
    """Processors that this process may keep busy: by affinity, and by its group's quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = find_cpu_quota()
    return usable if quota is None else max(1, min(usable, int(quota)))


def _list_folders(root: Path, group_file: Path, controller: str) -> Iterator[Path]:
    """The folders of version 2, then of version 1's controller: this group's first, then those above it."""
    lines = [line.split(":", 2) for line in _read(group_file).splitlines()]
    for _, controllers, path in (line for line in lines if len(line) == 3):
        names = controllers.split(",")
        if controllers and controller not in names:
            continue
        base = root if not controllers else root / controller
        group = base / path.lstrip("/")
        while group != base and base in group.parents:
            yield group
            group = group.parent
        yield base


def _read(path: Path) -> str:
    """The file's text, '' if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
