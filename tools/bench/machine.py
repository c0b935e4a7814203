"""What a measurement was taken on: hardware, versions, commit and command; and where its figures go."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ...ipc.processes.cgroup import count_processors

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("torch", "transformers", "numpy", "msgspec", "pyzmq", "tokenizers", "safetensors")


def describe_machine() -> dict[str, str]:
    """Names and values to print above every measurement and to keep in its JSON."""
    load = os.getloadavg()
    busy = ", busy: compare within this run only" if load[0] > count_processors() / 2 else ""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{cpu_name()}, {count_processors()} cores usable",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "load": " ".join(f"{value:.2f}" for value in load) + f" (1, 5, 15 minutes before the run{busy})",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {find_version(name) or 'missing'}" for name in _PACKAGES),
        "quire": f"{find_version('quire') or 'not installed'}, commit {find_commit() or 'unknown'}",
        "command": shlex.join(["quire", *sys.argv[1:]]),
    }


def print_machine(peers: Mapping[str, str] | None = None) -> dict[str, str]:
    """Print the facts with the versions of `peers`, and return them."""
    facts = describe_machine()
    if peers:
        facts["peers"] = ", ".join(f"{name} {version}" for name, version in peers.items())
    print_facts(facts)
    return facts


def print_facts(facts: Mapping[str, str]) -> None:
    """One a line, and an empty one."""
    width = max(map(len, facts))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in facts.items()) + "\n", flush=True)


def write_json(path: str | None, figures: Any) -> None:
    """Write every figure of a run to a file; None: nobody asked for one."""
    if path is not None:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")


def cpu_name() -> str:
    """The processor's name as Linux gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def find_version(package: str) -> str | None:
    """The installed version, None if the package is missing. Imports nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def find_commit() -> str | None:
    """The checkout's commit, with '+changes' if the tree differs from it; None outside a checkout."""
    if not (_ROOT / ".git").exists():
        return None
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
