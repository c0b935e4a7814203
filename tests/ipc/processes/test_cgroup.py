"""What a container may use: quotas of processors and memory, in both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.ipc.processes import cgroup


def make_group(tmp_path: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(own)
    return tmp_path / "root", tmp_path / "own"


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "400000 100000\n"}, 1.0),
        ("0::/../outside\n", {"cpu.max": "300000 100000\n"}, 3.0),
        (
            "4:memory:/\n2:cpu,cpuacct:/\n",
            {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "50000"},
            3,
        ),
        ("2:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "50000"}, None),
        ("", {"cpu.max": "100000 100000\n"}, None),
        ("no group\n", {}, None),
    ],
)
def test_the_smallest_quota_of_the_group_and_those_above_counts(
    tmp_path: Path, own: str, files: dict[str, str], quota: float | None
) -> None:
    assert cgroup.find_cpu_quota(*make_group(tmp_path, own, files)) == quota


@pytest.mark.parametrize(
    ("own", "files", "free"),
    [
        ("0::/\n", {"memory.max": "1000\n", "memory.current": "300\n"}, 700),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "300\n"}, None),
        (
            "8:memory:/x\n",
            {"memory/x/memory.limit_in_bytes": "900", "memory/x/memory.usage_in_bytes": "1"},
            899,
        ),
    ],
)
def test_a_groups_memory_less_what_is_used_is_free(
    tmp_path: Path, own: str, files: dict[str, str], free: int | None
) -> None:
    assert cgroup.find_free_memory(*make_group(tmp_path, own, files)) == free


@pytest.mark.parametrize(("quota", "count"), [(None, 6), (2.9, 2), (0.5, 1), (64.0, 6)])
def test_processors_are_whole_and_at_least_one(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, count: int
) -> None:
    monkeypatch.setattr(cgroup.os, "sched_getaffinity", lambda _pid: set(range(6)))
    monkeypatch.setattr(cgroup, "find_cpu_quota", lambda: quota)
    assert cgroup.count_processors() == count
