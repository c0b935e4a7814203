"""Times at which something is due."""

from __future__ import annotations

from quire.ipc.processes.due import find_earliest


def test_the_earliest_time_counts_and_never_is_no_time() -> None:
    assert find_earliest(None, 3.0, 0.0, None) == 0.0
    assert find_earliest(None, None) is None
    assert find_earliest() is None
