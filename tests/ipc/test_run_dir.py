"""Run directories: private, locked, cleaned up after the dead."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire.ipc.errors import ConfigError
from quire.ipc.run_dir import RunDirectory, find_base
from quire.ipc.sockets import make_ipc_address


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="q", dir="/tmp") as folder:  # pytest's own are too long
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_a_run_directory_is_private_and_goes_when_removed(runtime_dir: Path) -> None:
    directory = RunDirectory.create_private()
    assert directory.path.parent == runtime_dir / "quire"
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(directory.path.parent.stat().st_mode) == 0o700
    assert directory.address_of("core.sock") == f"ipc://{directory.path}/core.sock"
    directory.remove()
    directory.remove()
    assert not directory.path.exists()


def test_a_live_directory_is_kept_and_a_dead_owners_is_removed(runtime_dir: Path) -> None:
    live = RunDirectory.create_private()
    script = (
        "from quire.ipc.run_dir import RunDirectory; import os\n"
        "print(RunDirectory.create_private().path, flush=True); os._exit(1)"
    )
    dead = Path(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip())
    assert dead.exists()
    fresh = RunDirectory.create_private()
    assert live.path.exists()
    assert not dead.exists()
    live.remove()
    fresh.remove()
    assert list((runtime_dir / "quire").iterdir()) == []


@pytest.mark.usefixtures("runtime_dir")
def test_a_folder_that_others_may_enter_is_refused() -> None:
    base = find_base()
    os.chmod(base, 0o755)
    with pytest.raises(ConfigError, match="0700"):
        find_base()


def test_a_runtime_dir_too_long_for_sockets_is_passed_over(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = runtime_dir / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    directory = RunDirectory.create_private()
    try:
        assert directory.path.parent == Path(tempfile.gettempdir()) / f"quire-{os.getuid()}"
        assert directory.address_of("worker.sock")
        assert list(long.iterdir()) == []
    finally:
        directory.remove()


def test_a_socket_path_over_the_kernels_limit_is_refused() -> None:
    assert make_ipc_address("/" + "x" * 106).startswith("ipc:///x")
    with pytest.raises(ConfigError, match="107 bytes"):
        make_ipc_address("/" + "x" * 107)
