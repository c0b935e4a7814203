"""The garbage collector around imports."""

from __future__ import annotations

import gc

import pytest
from quire.ipc.processes.collector import paused_collector


def test_the_collector_rests_within_the_block_and_works_again_after_it() -> None:
    with paused_collector():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_works_again_after_a_failed_import() -> None:
    with pytest.raises(ImportError), paused_collector():
        raise ImportError
    assert gc.isenabled()
