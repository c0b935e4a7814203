"""Run directories: private, locked, cleaned up after the dead."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire.ipc.errors import ConfigError, DaemonError
from quire.ipc.run_dir import RunDirectory, find_base, find_named, find_owner, list_daemons
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


# A daemon's directory.

HOLD = """
import os, sys
from quire.ipc.run_dir import RunDirectory
directory = RunDirectory.create_named(sys.argv[1])
(directory.path / "core.sock").touch()
print(os.getpid(), flush=True)
sys.stdin.read()
directory.remove()
"""


def hold(name: str) -> subprocess.Popen[str]:
    """A process that owns the directory until its standard input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.usefixtures("runtime_dir")
def test_a_named_directory_is_refused_while_its_owner_lives_and_taken_over_afterwards() -> None:
    with hold("one") as owner:
        assert owner.stdout is not None
        assert int(owner.stdout.readline()) == owner.pid == find_owner(find_named("one"))
        assert list_daemons() == ["one"]
        with pytest.raises(DaemonError, match=f"'one' is running already .pid {owner.pid}."):
            RunDirectory.create_named("one")
        owner.kill()
        owner.wait()
        assert (find_named("one") / "core.sock").exists()
        assert find_owner(find_named("one")) is None
        assert list_daemons() == []
        taken = RunDirectory.create_named("one")
        assert [path.name for path in taken.path.iterdir()] == ["lock"]
        assert find_owner(taken.path) == os.getpid()
        taken.remove()
        assert not taken.path.exists()


@pytest.mark.usefixtures("runtime_dir")
def test_of_many_that_want_a_directory_at_once_exactly_one_gets_it() -> None:
    contenders = [hold("race") for _ in range(6)]
    try:
        lines = [contender.stdout.readline() for contender in contenders if contender.stdout is not None]
        winners = [line for line in lines if line]
        assert len(winners) == 1
        assert int(winners[0]) == find_owner(find_named("race"))
    finally:
        errors = [contender.communicate()[1] for contender in contenders]
    assert sum(f"is running already (pid {int(winners[0])})" in error for error in errors) == 5
    assert not find_named("race").exists()


@pytest.mark.usefixtures("runtime_dir")
def test_who_only_looks_does_not_keep_an_owner_out() -> None:
    path = find_named("looked")
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            find_owner(path)

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(50):
            directory = RunDirectory.create_named("looked")
            assert directory.path == path
            directory.remove()
    finally:
        stop.set()
        for looker in lookers:
            looker.join()


@pytest.mark.usefixtures("runtime_dir")
@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "p-1", "-a", "_a", "a b", "ä", "x" * 33, "a\n"]
)
def test_a_name_that_cannot_be_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="1 to 32 letters"):
        RunDirectory.create_named(name)


@pytest.mark.usefixtures("runtime_dir")
def test_private_and_named_directories_do_not_take_each_other_for_leftovers() -> None:
    named = RunDirectory.create_named("one")
    private = RunDirectory.create_private()
    assert list_daemons() == ["one"]
    assert named.path.exists()
    private.remove()
    named.remove()
