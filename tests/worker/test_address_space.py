"""A start with little address space (ulimit -v) goes on with less, or says what there is."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
from quire.ipc.processes import process_limits


@pytest.mark.parametrize(
    "limit_bytes",
    [
        pytest.param(700_000_000, marks=pytest.mark.slow),
        900_000_000,
        pytest.param(1_300_000_000, marks=pytest.mark.slow),
        pytest.param(2_500_000_000, marks=pytest.mark.slow),
    ],
)
def test_a_start_with_little_address_space_says_the_numbers_or_has_fewer_blocks(limit_bytes: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire", "generate", "Hi", "--max-tokens", "1", "--max-model-len", "64"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes)),
        capture_output=True,
        text=True,
        timeout=100,
    )
    if done.returncode:
        assert f"`ulimit -v` allows each process {limit_bytes / 1e6:,.0f} MB" in done.stderr
    assert "Traceback" not in done.stderr


def test_other_errors_are_told_as_they_are() -> None:
    assert process_limits.describe_shortage(OSError(2, "No such file")) == "[Errno 2] No such file"
    assert process_limits.describe_shortage(MemoryError("none")) == "none"  # there is no limit here
