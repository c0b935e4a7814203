"""Daemons from outside: start one in the background, stop it, restart its engine, look at those that run."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from ..ipc.daemon.daemon_control import (
    AddEngine,
    Command,
    CommandDone,
    DrainEngine,
    RemoveEngine,
    RestartEngines,
    ResumeEngine,
    send_command,
)
from ..ipc.daemon.daemon_state import (
    SUPERVISOR_ROLE,
    DaemonState,
    EngineState,
    FailedReport,
    PhaseReport,
    ReadyReport,
    SupervisorArgs,
    SupervisorReport,
    forget_failure,
    read_state,
)
from ..ipc.daemon.private_folder import find_state_folder
from ..ipc.daemon.run_dir import find_daemon, find_named, find_owner, list_daemons
from ..ipc.decoding import decode_json
from ..ipc.errors import ConfigError, DaemonError, EngineStartError, QuireError, raise_remote
from ..ipc.network.tcp_address import check_listening
from ..ipc.processes.child_args import CORE_MODULE
from ..ipc.processes.due import until_ms
from ..ipc.processes.process import EXIT_OK, ChildProcess, is_stopped, wait_readable
from ..ipc.protocol.client_protocol import GOODBYE
from ..ipc.protocol.engine_views import EngineSnapshot
from ..ipc.protocol.messages import OBSERVER_KINDS, EngineFacts, UtilityMethod
from ..ipc.protocol.protocol_link import ProtocolLink
from ..ipc.protocol.sockets import make_ipc_address
from ..ipc.spec.config import EngineConfig
from .daemon_record import read_record, write_record

_log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0  # then the supervisor is killed; its children see that and leave
LOOK_TIMEOUT_S = 1.0  # what a look at a daemon may take before it counts as not answering
_MAX_LOG_BYTES = 16 * 1024 * 1024
_POLL_INTERVAL_S = 0.05


class ProcessInfo(msgspec.Struct, frozen=True):
    """One process of a daemon."""

    role: str  # supervisor, core or worker
    rank: int
    pid: int
    engine: int | None = None  # whose it is; None: the supervisor's


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a daemon at one moment. Counts are None while it does not answer."""

    index: int
    state: str  # starting, ready, draining, drained, restarting or lost
    restarts: int
    last_loss: str
    clients: int | None
    num_running: int | None
    num_waiting: int | None
    kv_blocks_used: int | None
    kv_blocks_total: int | None
    tokens_per_s: float | None
    tensor_parallel_size: int | None  # ranks of each stage of its worker
    pipeline_parallel_size: int | None  # stages


class DaemonInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A running daemon at one moment. Counts are those of its engines together, None while none answers."""

    name: str
    model: str
    formats: str | None  # such as 'bfloat16, int4 weights'
    state: str  # starting, ready, restarting or stopping
    uptime_s: float
    restarts: int
    clients: int | None
    num_running: int | None
    num_waiting: int | None
    kv_blocks_used: int | None
    kv_blocks_total: int | None
    tokens_per_s: float | None
    processes: list[ProcessInfo]
    engines: list[EngineInfo]


class DaemonStarter:
    """A supervisor that has just been started, until it is ready and on its own."""

    def __init__(self, args: SupervisorArgs, stderr: int | None = None) -> None:
        reader, writer = os.pipe()
        try:
            self.child = ChildProcess.start(
                CORE_MODULE, SUPERVISOR_ROLE, msgspec.msgpack.encode(args), stdout=writer, stderr=stderr
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self._reader = reader
        self._buffer = b""
        self._ready_timeout_s = args.config.ready_timeout_s

    def wait_until_ready(self, on_phase: Callable[[str], None] | None = None) -> None:
        """Raises ConfigError, ModelError, DaemonError or EngineStartError; then the supervisor has ended."""

        def is_ready(report: SupervisorReport) -> bool:
            if on_phase is not None and isinstance(report, PhaseReport):
                on_phase(report.phase)
            return isinstance(report, ReadyReport)

        self._wait_until(is_ready)

    def wait_until_attachable(self) -> None:
        """Until clients can come, which then see the rest of the start. Raises as `wait_until_ready`."""
        self._wait_until(lambda _report: True)

    def stop(self) -> None:
        """End the daemon."""
        if self.child.exit_code is None:
            self.child.send_signal(signal.SIGTERM)
        self.child.stop(STOP_TIMEOUT_S)

    def _wait_until(self, is_enough: Callable[[SupervisorReport], bool]) -> None:
        deadline = time.monotonic() + self._ready_timeout_s
        try:
            while True:
                report = self._read_report(deadline)
                if isinstance(report, FailedReport):
                    raise_remote(report.kind, report.reason)
                if is_enough(report):
                    return
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(self._reader)

    def _read_report(self, deadline: float) -> SupervisorReport:
        while b"\n" not in self._buffer:
            if not wait_readable(self._reader, deadline - time.monotonic()):
                raise EngineStartError(f"the engine was not ready within {self._ready_timeout_s:g} s")
            data = os.read(self._reader, 65536)
            if not data:
                wait_readable(self.child.pid_fd, STOP_TIMEOUT_S)
                if self.child.exit_code == EXIT_OK:
                    raise EngineStartError("the daemon was stopped before it was ready")
                raise EngineStartError(self.child.describe_exit())
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return decode_json(line, SupervisorReport)


def start_daemon(
    name: str,
    config: EngineConfig,
    on_phase: Callable[[str], None] | None = None,
    *,
    listen: str | None = None,
    keys: str | None = None,
    engine_args: dict[str, Any] | None = None,
) -> int:
    """Start a daemon in the background and wait until it is ready; returns its supervisor's pid.

    listen: tcp://HOST:PORT, where clients of other machines come that have keys; `keys`: the folder of them.
    `engine_args`: by name, of which `config` was made, for a restart with other files.

    Raises DaemonError if one of this name runs, ConfigError, ModelError or EngineStartError.
    """
    check_name_is_free(name)
    address = check_listening(listen, keys)
    if address is not None and config.fault_hooks and not address.is_loopback:
        raise ConfigError("fault_hooks", config.fault_hooks, f"none with listen={listen}")
    keys_folder = "" if keys is None else os.path.abspath(keys)
    args = SupervisorArgs(name=name, config=config, listen=listen or "", keys=keys_folder)
    log = _open_log(name)
    try:
        starter = DaemonStarter(args, stderr=log)
    finally:
        os.close(log)
    starter.wait_until_ready(on_phase)
    starter.child.detach()
    forget_failure(name)
    write_record(name, config, engine_args, listen, keys_folder or None)
    return starter.child.pid


def check_name_is_free(name: str) -> None:
    """Raise DaemonError with the owner's pid if a daemon of this name runs, ConfigError for a bad name."""
    owner = find_owner(find_named(name))
    if owner is not None:
        raise DaemonError(f"a daemon named {name!r} is running already (pid {owner})")


def stop_daemon(name: str) -> None:
    """End a daemon, its engine and its workers. Raises DaemonError if there is none of this name."""
    pid = find_daemon(name)
    try:
        pid_fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal.pidfd_send_signal(pid_fd, number)
            signal.pidfd_send_signal(pid_fd, signal.SIGCONT)  # one that is stopped hears it only then
            if wait_readable(pid_fd, STOP_TIMEOUT_S):
                return
    except ProcessLookupError:
        return
    finally:
        os.close(pid_fd)
    raise DaemonError(f"the daemon {name!r} (pid {pid}) does not end")


def restart_engine(name: str, timeout_s: float = 600.0, index: int | None = None) -> None:
    """Restart a daemon's engine; attached clients wait, and their requests go on afterwards.

    Of several engines each is drained and restarted in its turn, or only the one of number `index`. If the
    files of the model or of Quire have changed since the daemon was started, another one takes its place, and
    its requests end; also if it has ended for that. Raises DaemonError if there is no daemon of this name, it
    ends meanwhile, or a signal has stopped it, and what a start raises.
    """
    if index is None and _start_anew(name):
        return
    pid = find_daemon(name)
    directory = find_named(name)
    before = read_state(directory)
    if index is not None or (before is not None and len(before.engines) > 1):
        _command(name, RestartEngines(index), timeout_s)
        return
    _check_continued(name, pid)
    with contextlib.suppress(ProcessLookupError):  # which is seen below
        os.kill(pid, signal.SIGHUP)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        state = read_state(directory)
        has_restarted = state is not None and (before is None or state.num_restarts > before.num_restarts)
        if state is not None and has_restarted and state.state == "ready":
            return
        _check_lives(name, pid)
        time.sleep(_POLL_INTERVAL_S)
    raise DaemonError(f"the daemon {name!r} was not ready again within {timeout_s:g} s")


def _start_anew(name: str) -> bool:
    """Put another daemon in the place of one whose files have changed; False if they have not."""
    record = read_record(name)
    change = "" if record is None else record.find_change()
    if record is None or not change:
        return False
    config = record.make_config(name)  # what cannot be started ends nothing
    _log.warning("%s: starting anew: %s", name, change)
    if find_owner(find_named(name)) is not None:
        stop_daemon(name)
    with contextlib.chdir(record.folder):
        start_daemon(name, config, listen=record.listen, keys=record.keys, engine_args=record.args)
    return True


def drain_engine(name: str, index: int, timeout_s: float = 600.0) -> None:
    """Give an engine of a daemon nothing new, have its requests moved, and wait until it has none.

    This and the calls below raise DaemonError for a daemon or engine that is not there and for what cannot
    be done. What takes longer than `timeout_s` goes on all the same.
    """
    _command(name, DrainEngine(index), timeout_s)


def resume_engine(name: str, index: int, timeout_s: float = 600.0) -> None:
    """Give an engine that was drained, or is being drained, requests again."""
    _command(name, ResumeEngine(index), timeout_s)


def add_engine(name: str, timeout_s: float = 600.0) -> int:
    """Start one more engine in a daemon, and wait until it is ready; returns its number."""
    index = _command(name, AddEngine(), timeout_s).index
    assert index is not None
    return index


def remove_engine(name: str, index: int, timeout_s: float = 600.0) -> None:
    """Drain an engine of a daemon, and end it."""
    _command(name, RemoveEngine(index), timeout_s)


def _command(name: str, command: Command, timeout_s: float) -> CommandDone:
    pid = find_daemon(name)
    return send_command(find_named(name), command, timeout_s, lambda: _check_lives(name, pid))


def _check_lives(name: str, pid: int) -> None:
    if find_owner(find_named(name)) != pid:
        raise DaemonError(f"the daemon {name!r} ended meanwhile, see quire daemon logs {name}")
    _check_continued(name, pid)


def _check_continued(name: str, pid: int) -> None:
    if is_stopped(pid):
        raise DaemonError(
            f"a signal has stopped the daemon {name!r} (pid {pid}), `kill -CONT {pid}` continues it"
        )


def inspect_daemons() -> list[DaemonInfo]:
    """All daemons of this user, by name."""
    infos = [inspect_daemon(name) for name in list_daemons()]
    return [info for info in infos if info is not None]


def inspect_daemon(name: str) -> DaemonInfo | None:
    """A daemon at this moment, None if it has ended."""
    directory = find_named(name)
    state = read_state(directory)
    if state is None or find_owner(directory) is None:
        return None
    looks = _look_inside(directory, state)
    engines = [_describe_engine(engine, looks.get(engine.index)) for engine in state.engines]
    processes = [ProcessInfo("supervisor", 0, state.pid)]
    for engine in state.engines:
        processes += _list_processes(engine, looks.get(engine.index))
    return DaemonInfo(
        name=name,
        model=state.model,
        formats=next((look.facts.formats for look in looks.values() if look.facts is not None), None),
        state=state.state,
        uptime_s=max(0.0, time.time() - state.started_at),
        restarts=state.num_restarts,
        # A client of several engines is one of each of them.
        clients=max((engine.clients for engine in engines if engine.clients is not None), default=None),
        num_running=_add([engine.num_running for engine in engines]),
        num_waiting=_add([engine.num_waiting for engine in engines]),
        kv_blocks_used=_add([engine.kv_blocks_used for engine in engines]),
        kv_blocks_total=_add([engine.kv_blocks_total for engine in engines]),
        tokens_per_s=_add([engine.tokens_per_s for engine in engines]),
        processes=processes,
        engines=engines,
    )


def _look_inside(directory: Path, state: DaemonState) -> dict[int, EngineLook]:
    """By number: what its engines show, as far as they serve."""
    addresses = {
        engine.index: make_ipc_address(str(directory / engine.socket))
        for engine in state.engines
        if engine.state in ("ready", "draining", "drained")
    }
    return look_at_engines(addresses, "ps", LOOK_TIMEOUT_S) if addresses else {}


def _describe_engine(engine: EngineState, look: EngineLook | None) -> EngineInfo:
    snapshot, facts = look and look.snapshot, look and look.facts
    stats = snapshot and snapshot.stats
    return EngineInfo(
        index=engine.index,
        state=engine.state,
        restarts=engine.num_restarts,
        last_loss=engine.last_loss,
        clients=snapshot and sum(client.kind not in OBSERVER_KINDS for client in snapshot.clients),
        num_running=stats and stats.num_running,
        num_waiting=stats and stats.num_waiting,
        kv_blocks_used=stats and stats.kv_blocks_used,
        kv_blocks_total=stats and stats.kv_blocks_total,
        tokens_per_s=snapshot and snapshot.generation_tokens_per_s,
        tensor_parallel_size=facts and facts.tensor_parallel_size,
        pipeline_parallel_size=facts and facts.pipeline_parallel_size,
    )


def _list_processes(engine: EngineState, look: EngineLook | None) -> list[ProcessInfo]:
    processes: list[ProcessInfo] = []
    if engine.pid is not None:
        processes.append(ProcessInfo("core", 0, engine.pid, engine.index))
    pids = look.facts.pids if look is not None and look.facts is not None else {}
    workers = sorted((role, pid) for role, pid in pids.items() if role != "core")
    return processes + [
        ProcessInfo("worker", rank, pid, engine.index) for rank, (_, pid) in enumerate(workers)
    ]


_Count = TypeVar("_Count", int, float)


def _add(counts: list[_Count | None]) -> _Count | None:
    """The sum of those that are known, None if none is."""
    known = [count for count in counts if count is not None]
    return sum(known[1:], known[0]) if known else None


def find_log(name: str) -> Path:
    """Where a daemon of this name logs: it stays when the daemon has ended."""
    return find_state_folder() / f"{find_named(name).name}.log"


def _open_log(name: str) -> int:
    """The log, to append to; a long one is put aside first. Raises EngineStartError."""
    path = find_log(name)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > _MAX_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        return os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EngineStartError(f"the log {path} cannot be written: {error.strerror}") from error


_CONNECT_POLL_MS = 10
_LINGER_MS = 200  # for a Goodbye to leave


class EngineLook:
    """What one engine is asked; `facts` and `snapshot` are None while it has not answered."""

    def __init__(self, link: ProtocolLink) -> None:
        self.facts: EngineFacts | None = None
        self.snapshot: EngineSnapshot | None = None
        self.is_over = False
        self.link = link
        self._call_id: int | None = None

    def follow(self, now: float) -> None:
        """Take what has arrived, ask when it is time, and leave with the answer."""
        protocol = self.link.protocol
        if self.is_over:
            return
        try:
            self.link.connect(now)
            while self.link.receive(now):
                pass
        except QuireError:  # it does not start, or it ends: there is nothing to see
            self.is_over = True
        if protocol.is_open and self._call_id is None:
            self._call_id = protocol.start_call(UtilityMethod.SNAPSHOT)
        answer = None if self._call_id is None else protocol.answers.get(self._call_id)
        if answer is not None:
            self.facts, self.snapshot, self.is_over = protocol.facts, answer.snapshot, True
            protocol.outbox.append(GOODBYE)
        self.link.send_waiting()


def look_at_engines(
    addresses: Mapping[int, str], client_kind: str, timeout_s: float
) -> dict[int, EngineLook]:
    """By number: what each shows that answers within `timeout_s`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    deadline = time.monotonic() + timeout_s
    try:
        looks = {
            index: EngineLook(ProtocolLink(context, address, client_kind))
            for index, address in addresses.items()
        }
        while time.monotonic() < deadline:
            for look in looks.values():
                look.follow(time.monotonic())
            waiting = [look.link for look in looks.values() if not look.is_over]
            if not waiting:
                break
            poller = zmq.Poller()
            for link in waiting:
                poller.register(link.socket, zmq.POLLIN)
            is_connecting = any(not link.has_connected for link in waiting)
            poller.poll(_CONNECT_POLL_MS if is_connecting else until_ms(deadline))
    finally:
        context.destroy(linger=_LINGER_MS)
    return looks
