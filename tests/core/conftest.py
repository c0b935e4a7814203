"""What tests of daemons with fake cores need: folders of their own, and one that is running."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from daemons import Daemon


@pytest.fixture(scope="module")
def runtime() -> Iterator[Path]:
    """Where run directories are; what is started here are fakes."""
    from daemons import fake_modules, runtime_folders

    with runtime_folders() as folder, fake_modules():
        yield folder


@pytest.fixture
def daemon(runtime: Path) -> Iterator[Daemon]:  # noqa: ARG001
    """A running daemon whose fake core takes its time for a step."""
    from daemon_loads import PACED
    from daemons import Daemon

    with Daemon("paced", PACED) as daemon:
        yield daemon
