"""Run directories: private, locked, cleaned up after the dead."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from quire.ipc.daemon import run_dir
from quire.ipc.daemon.daemon_mark import DaemonMark
from quire.ipc.daemon.daemon_state import DaemonState, read_state, write_state
from quire.ipc.daemon.run_dir import (
    DirectoryLock,
    RunDirectory,
    find_base,
    find_named,
    find_owner,
    list_daemons,
)
from quire.ipc.errors import ConfigError, DaemonError, EngineStartError
from quire.ipc.processes.process import wait_readable
from quire.ipc.protocol.sockets import make_ipc_address


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
        "from quire.ipc.daemon.run_dir import RunDirectory; import os\n"
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
from quire.ipc.daemon.run_dir import RunDirectory
directory = RunDirectory.create_named(sys.argv[1])
(directory.path / "core.sock").touch()
print(os.getpid(), flush=True)
sys.stdin.read()
directory.remove()
"""


# As in another network namespace, whose abstract sockets are not seen here.
UNSEEN = (
    "from quire.ipc.daemon import daemon_mark; daemon_mark._name_of = lambda path: chr(0) + f'other {path}'\n"
)


def hold(name: str, script: str = HOLD) -> subprocess.Popen[str]:
    """A process that owns the directory until its standard input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", script, name],
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
    contenders = [hold("race") for _ in range(4)]
    try:
        lines = [contender.stdout.readline() for contender in contenders if contender.stdout is not None]
        winners = [line for line in lines if line]
        assert len(winners) == 1
        assert int(winners[0]) == find_owner(find_named("race"))
    finally:
        errors = [contender.communicate()[1] for contender in contenders]
    assert sum(f"is running already (pid {int(winners[0])})" in error for error in errors) == 3
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


# A cleaner of /tmp takes away what lies there.


def lose_lock_file(path: Path) -> None:
    (path / "lock").unlink()


def lose_directory(path: Path) -> None:
    shutil.rmtree(path)


def lose_everything(path: Path) -> None:
    shutil.rmtree(path.parent)


def get_another(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


LOSSES = [lose_lock_file, lose_directory, lose_everything, get_another]


@pytest.mark.usefixtures("runtime_dir")
@pytest.mark.parametrize("lose", LOSSES)
def test_a_name_stays_taken_whatever_is_deleted(lose: Callable[[Path], None]) -> None:
    with hold("one") as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        lose(find_named("one"))
        assert find_owner(find_named("one")) == owner.pid
        with pytest.raises(DaemonError, match=f"'one' is running already .pid {owner.pid}."):
            RunDirectory.create_named("one")
        owner.communicate()
        assert owner.returncode == 0


@pytest.mark.usefixtures("runtime_dir")
@pytest.mark.parametrize("create", [lambda: RunDirectory.create_named("one"), RunDirectory.create_private])
@pytest.mark.parametrize("lose", LOSSES)
def test_an_owner_makes_again_what_was_deleted(
    create: Callable[[], RunDirectory], lose: Callable[[Path], None]
) -> None:
    directory = create()
    assert not directory.maintain()
    lose(directory.path)
    assert directory.maintain()
    assert not directory.maintain()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert find_owner(directory.path) == os.getpid()
    RunDirectory.create_private().remove()  # it is held as before: who looks does not take it for a leftover
    assert directory.path.exists()
    directory.remove()
    assert not directory.path.exists()


@pytest.mark.usefixtures("runtime_dir")
def test_an_owner_removes_nothing_of_who_has_its_path_now() -> None:
    first = RunDirectory.create_named("one")
    shutil.rmtree(first.path)
    with hold("one", UNSEEN + HOLD) as second:
        assert second.stdout is not None
        second.stdout.readline()
        with pytest.raises(DaemonError, match=f"was removed, and pid {second.pid} has the name now"):
            first.maintain()
        first.remove()
        assert sorted(path.name for path in first.path.iterdir()) == ["core.sock", "lock"]
        assert find_owner(first.path) == second.pid
        second.communicate()
    assert not first.path.exists()


@pytest.mark.usefixtures("runtime_dir")
def test_locks_have_to_do_where_a_mark_cannot_be_seen_or_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with hold("one", UNSEEN + HOLD) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        assert find_owner(find_named("one")) == owner.pid
        with pytest.raises(DaemonError, match=f"'one' is running already .pid {owner.pid}."):
            RunDirectory.create_named("one")
        owner.communicate()
    monkeypatch.setattr(DaemonMark, "claim", lambda _path: None)  # another user has its name
    directory = RunDirectory.create_named("one")
    assert directory.mark is None
    assert find_owner(directory.path) == os.getpid()
    directory.remove()


OLD_HOLD = """
import fcntl, os, pathlib, sys
from quire.ipc.daemon.run_dir import find_named
path = find_named(sys.argv[1])
path.mkdir(mode=0o700)
file = open(path / "lock", "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(os.getpid(), file=file, end="", flush=True)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("runtime_dir")
def test_an_owner_that_locks_the_file_only_is_an_owner() -> None:
    with hold("one", OLD_HOLD) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        with pytest.raises(DaemonError, match=f"'one' is running already .pid {owner.pid}."):
            RunDirectory.create_named("one")


@pytest.mark.usefixtures("runtime_dir")
def test_what_is_old_is_made_new_for_cleaners_that_go_by_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "_TOUCH_INTERVAL_S", -1.0)
    directory = RunDirectory.create_named("one")
    (directory.path / "core.sock").touch()
    everything = [directory.path, *directory.path.iterdir()]
    for path in everything:
        os.utime(path, (0, 0))
    directory.maintain()
    assert all(path.stat().st_mtime > 0 for path in everything)
    directory.remove()


def test_half_made_directories_of_the_dead_are_removed_when_they_are_old(runtime_dir: Path) -> None:
    base = find_base()
    for name in (".p-old", ".p-new"):
        (base / name).mkdir()
    os.utime(base / ".p-old", (0, 0))
    directory = RunDirectory.create_private()
    assert sorted(path.name for path in (runtime_dir / "quire").iterdir()) == [".p-new", directory.path.name]
    directory.remove()


# A full disk.


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Inside, no file takes a byte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("create", [lambda: RunDirectory.create_named("one"), RunDirectory.create_private])
def test_a_directory_can_be_owned_on_a_full_disk(
    create: Callable[[], RunDirectory], runtime_dir: Path
) -> None:
    with full_disk():
        directory = create()
    assert directory.path.exists()
    assert RunDirectory.create_private().path.exists()  # which removes leftovers
    assert directory.path.exists()
    directory.remove()
    assert not directory.path.exists()
    assert (runtime_dir / "quire").exists()


def test_a_start_that_cannot_lock_its_directory_leaves_nothing(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectoryLock, "take", lambda _path: None)
    with pytest.raises(EngineStartError, match="cannot be locked"):
        RunDirectory.create_private()
    assert list((runtime_dir / "quire").iterdir()) == []


def test_a_state_that_finds_no_room_leaves_the_one_before(tmp_path: Path) -> None:
    state = DaemonState(name="one", model="m", pid=1, started_at=0.0)
    write_state(tmp_path, state)
    state.num_restarts = 1
    with full_disk(), pytest.raises(OSError, match="too large"):
        write_state(tmp_path, state)
    assert [path.name for path in tmp_path.iterdir()] == ["daemon.json"]
    found = read_state(tmp_path)
    assert found is not None
    assert found.num_restarts == 0


@pytest.mark.usefixtures("runtime_dir")
def test_an_owners_own_word_comes_before_its_file() -> None:
    directory = RunDirectory.create_named("one")
    state = DaemonState(name="one", model="m", pid=1, started_at=0.0)
    write_state(directory.path, state)
    state.num_restarts = 7
    mark = directory.mark
    assert mark is not None
    answering = threading.Thread(target=lambda: wait_and_answer(mark, msgspec.json.encode(state)))
    answering.start()
    found = read_state(directory.path)
    answering.join()
    assert found is not None
    assert found.num_restarts == 7
    directory.remove()


def wait_and_answer(mark: DaemonMark, state: bytes) -> None:
    assert wait_readable(mark.fileno(), 5.0)
    mark.answer(state)
