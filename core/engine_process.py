"""The engine core's process: the busy loop with the sockets around the pure EngineCore.

One thread. Each turn: take what clients and the worker sent, schedule until run_ahead steps are in flight,
deliver. With nothing to do it blocks in poll; it never spins and never waits for one client.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import sys
import time
import traceback
from typing import NoReturn

import msgspec
import zmq

from ..ipc.codec import make_client_codec
from ..ipc.errors import USER_ERRORS, ProtocolError
from ..ipc.fault_hooks import make_fault_hooks
from ..ipc.launch import PACKAGE_DIR, CoreLaunch
from ..ipc.messages import (
    EngineCoreOutputs,
    EngineDead,
    ProtocolNotice,
    Refusal,
)
from ..ipc.process import (
    EXIT_CRASHED,
    EXIT_OK,
    EXIT_START_FAILED,
    EXIT_WORKER_LOST,
    Lifeline,
    catch_signals,
    enable_stack_dumps,
)
from ..ipc.process_limits import raise_file_limit
from ..ipc.request_price import find_max_frame_bytes
from ..ipc.sockets import bind_router, until_ms
from ..ipc.step import (
    ModelRunnerOutput,
    StepFailed,
    WorkerFailed,
    WorkerProgress,
    WorkerReady,
)
from .blame import WorkerDeath
from .client_registry import ClientRegistry
from .clients import LeaseWatch
from .death_journal import DeathJournal
from .engine_core import EngineCore
from .engine_facts import StartupClock, format_level, format_phases, format_startup, make_engine_facts
from .executor import ExecutorEvent, WorkerLost, make_executor
from .listener import Listener

_log = logging.getLogger(__name__)

MAX_RECEIVE_S = 0.005  # taking clients' messages before the next step is scheduled; they come in turn
OUTBOX_RETRY_MS = 20  # how soon a client whose queue was full is tried again
FIRST_HELLO_TIMEOUT_MS = 2000  # how long a failed start waits for somebody to tell
LAST_WORDS_TIMEOUT_S = 0.5
STOP_GRACE_S = 0.5  # what the worker gets to leave by itself
PARENT_LOST_GRACE_S = 1.2  # then the lifeline's thread ends this process


class EngineCoreProcess:
    """Serves clients until the lifeline closes or the engine cannot go on."""

    def __init__(self, launch: CoreLaunch, lifeline_fd: int, started_at: float) -> None:
        self._config = launch.config
        self._starter_package_dir = launch.package_dir
        max_frame_bytes = find_max_frame_bytes(launch.config.model.max_model_len)
        self._codec = make_client_codec(max_frame_bytes)
        self._faults = make_fault_hooks(launch.config.fault_hooks, "core")
        self._journal = DeathJournal(launch.journal_path)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        if self._faults is not None:
            self._faults.reach("core.bind")
        self._router = bind_router(self._context, launch.client_address, max_frame_bytes=max_frame_bytes)
        self._executor = make_executor(launch.config, self._context, launch.worker_address)
        self._registry = ClientRegistry(secrets.token_hex(8), started_at, self._send)
        self._leases = LeaseWatch(self._router)
        self._listener = Listener(self._router, launch.client_address)
        self._has_worker = False
        self._worker_budget = launch.config.recovery.make_worker_budget()
        self._exit_code: int | None = None
        self._startup = StartupClock("start core", started_at)
        self._lifeline_fd = lifeline_fd
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._leases.monitor, zmq.POLLIN)
        self._poller.register(lifeline_fd, zmq.POLLIN)
        self._signals = catch_signals(signal.SIGTERM)
        self._poller.register(self._signals.fileno(), zmq.POLLIN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the user's program's business

    def run(self) -> int:
        """Serve; returns the exit code. Every way out ends the worker and tells the clients."""
        try:
            self._start()
            while self._exit_code is None:
                self._turn()
        except Exception as error:
            _log.error("engine core failed\n%s", traceback.format_exc())
            self._end(f"engine core failed: {type(error).__name__}: {error}", EXIT_CRASHED)
        self._executor.stop(STOP_GRACE_S)
        self._context.destroy(linger=200)
        assert self._exit_code is not None
        return self._exit_code

    @property
    def _core(self) -> EngineCore | None:
        """The engine once its worker was ready for the first time."""
        return self._registry.core

    # One turn of the loop.

    def _start(self) -> None:
        if self._starter_package_dir != PACKAGE_DIR:
            reason = (
                f"the frontend runs quire from {self._starter_package_dir}, its engine core from "
                f"{PACKAGE_DIR}: start Python in another folder, or install the checkout with pip install -e"
            )
            self._refuse_all(reason, "EngineStartError")
            return
        self._note_phase("start worker", time.time())
        self._executor.register(self._poller)
        self._executor.start()
        for event in self._executor.receive():
            self._on_executor_event(event)

    def _turn(self) -> None:
        # 1. Wait until something arrives.
        ready = self._wait()
        # 2. Take it: the parent's end first, then clients, then results.
        if self._lifeline_fd in ready or self._signals.fileno() in ready:
            self._end("the engine was stopped", EXIT_OK)
            return
        if self._router in ready:
            self._receive_from_clients()
        has_new_connections = self._leases.monitor in ready and self._leases.read_events()
        self._listener.check(time.monotonic(), has_new_connections)
        self._leases.check_if_due(self._registry.check_leases)
        for event in self._executor.receive():
            self._on_executor_event(event)
        if self._core is not None:
            self._core.expire(time.monotonic())
        # 3. Keep the worker fed before anything else, then deliver.
        self._submit_steps()
        self._registry.deliver()
        self._log_requests()

    def _wait(self) -> dict[object, int]:
        in_flight = self._core is not None and self._core.num_in_flight > 0
        if in_flight and not self._executor.pids:
            return dict(self._poller.poll(0))  # in-process: the step's result is already there
        timeout = self._poll_timeout_ms()
        if not in_flight:
            return dict(self._poller.poll(timeout))
        waited_from = time.perf_counter()
        ready = dict(self._poller.poll(timeout))
        assert self._core is not None
        self._core.counters.step_wait_s += time.perf_counter() - waited_from
        return ready

    def _poll_timeout_ms(self) -> int | None:
        """Until something has to be done though nothing arrives; None if there is no such thing."""
        timeouts: list[int] = []
        if any(client.outbox for client in self._registry.clients.values()):
            timeouts.append(OUTBOX_RETRY_MS)
        if (check_at := self._leases.next_check_at) is not None:
            timeouts.append(until_ms(check_at))
        if self._core is not None and (deadline := self._core.next_deadline()) is not None:
            timeouts.append(until_ms(deadline))
        if (answer_at := self._registry.next_answer_at) is not None:
            timeouts.append(until_ms(answer_at))
        if self._core is not None and (submit_at := self._core.next_schedule_at()) is not None:
            timeouts.append(until_ms(submit_at))
        if (look_at := self._executor.next_check_at) is not None:
            timeouts.append(until_ms(look_at))
        return min(timeouts, default=None)

    def _submit_steps(self) -> None:
        core = self._core
        if core is None or not self._has_worker:
            return
        if core.failures.take_reset():
            self._executor.reset_rows()
        while core.num_in_flight < self._config.scheduler.run_ahead:
            if self._faults is not None:
                self._faults.reach("core.schedule")
            self._journal.note_alone(core.failures.alone)
            step = core.schedule()
            if step is None:
                return
            self._executor.submit(step)

    # Clients.

    def _receive_from_clients(self) -> None:
        ends_at = time.monotonic() + MAX_RECEIVE_S
        while True:
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._registry.take(identity, self._codec.decode(frames))
            except ProtocolError as error:
                self._registry.reply(identity, ProtocolNotice(str(error)))
            if time.monotonic() >= ends_at:
                return

    def _send(self, identity: bytes, message: msgspec.Struct) -> bool:
        """True if queued, False if this client's queue is full. Raises ConnectionResetError if it is gone."""
        try:
            frames = self._codec.encode(message)
            if self._faults is not None and isinstance(message, EngineCoreOutputs):
                frames = self._faults.corrupt("core.outputs_frame", frames)
            self._router.send_multipart((identity, *frames), zmq.NOBLOCK)
            return True
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise ConnectionResetError from None
            raise

    # The worker.

    def _on_executor_event(self, event: ExecutorEvent) -> None:
        match event:
            case ModelRunnerOutput():
                assert self._core is not None
                self._core.update(event)
            case StepFailed():
                self._on_step_failed(event)
            case WorkerProgress():
                self._note_phase(event.phase, event.at)
            case WorkerReady():
                self._on_worker_ready(event)
            case WorkerFailed():
                self._on_worker_failed(event)
            case WorkerLost():
                self._on_worker_lost(event)

    def _on_step_failed(self, failed: StepFailed) -> None:
        assert self._core is not None
        if not self._core.failures.fail_step(failed):
            return
        _log.error("step %d failed: %s\n%s", failed.step_id, failed.error, failed.details)
        if failed.is_out_of_memory:
            max_tokens, max_rows = self._core.failures.step_limits
            _log.warning("steps have at most %d tokens and %d requests for a while", max_tokens, max_rows)

    def _log_requests(self) -> None:
        if self._core is None:
            return
        for report in self._core.failures.take_poison_reports():
            _log.error("poison request %s", msgspec.json.encode(report).decode())
        for line in self._core.remarks.take():
            _log.info("%s", line)

    def _on_worker_failed(self, failed: WorkerFailed) -> None:
        """What is wrong with the model stays so; else one in the place of a lost one is tried again."""
        _log.debug("worker start failed\n%s", failed.details)
        if self._core is None or failed.kind in USER_ERRORS:
            self._refuse_all(failed.reason, failed.kind)
        else:
            self._on_worker_lost(WorkerLost(f"the worker did not start again: {failed.reason}"))

    def _on_worker_lost(self, lost: WorkerLost) -> None:
        """Start another worker and compute every running request again; too often, and the engine ends."""
        if self._core is None:
            self._refuse_all(f"the engine did not start: {lost.reason}", "EngineStartError")
            return
        death = self._core.failures.lose_worker(lost.reason)
        if death is WorkerDeath.CONVICTED:
            self._worker_budget.forgive()
        elif death is WorkerDeath.UNEXPLAINED and self._worker_budget.note_loss(time.monotonic()) is None:
            self._end(f"{lost.reason}, {self._worker_budget.excess}", EXIT_WORKER_LOST)
            return
        _log.error("%s; starting another", lost.reason)
        self._has_worker = False
        self._startup = StartupClock("start worker", time.time())
        self._executor.start()

    def _on_worker_ready(self, ready: WorkerReady) -> None:
        self._has_worker = True
        pids = {"core": os.getpid(), **self._executor.pids}
        if self._core is not None:
            facts = self._registry.facts
            assert facts is not None
            if ready.batch_variance_reason != facts.batch_variance_reason:  # a compiler that is gone, for one
                level = format_level(ready.batch_variance_reason)
                _log.error("the restarted worker computes in another way: %s from now on", level)
            self._registry.facts = msgspec.structs.replace(
                facts, pids=pids, batch_variance_reason=ready.batch_variance_reason
            )
            if ready.num_gpu_blocks < self._core.stats().kv_blocks_total:
                _log.error("the restarted worker has room for fewer KV blocks than before; starting anew")
                self._journal.note_alone(None)
                self._has_worker = False
                self._exit_code = EXIT_CRASHED  # another core can go on with fewer
            _log.info("another worker is %s", format_phases(self._startup.measure()))
            return
        core = EngineCore(self._config, ready.num_gpu_blocks, num_deaths_alone=self._journal.num_deaths)
        facts = make_engine_facts(self._config, ready, pids, self._startup)
        for line in format_startup(facts):
            _log.info("%s", line)
        gc.freeze()  # what start-up made lives for ever; the collector need not walk it
        self._registry.open(core, facts)

    # Phases and the end.

    def _note_phase(self, phase: str, at: float) -> None:
        self._startup.begin(phase, at)
        if self._faults is not None:
            self._faults.reach("core.start")
        self._registry.note_phase(phase)

    def _refuse_all(self, reason: str, kind: str) -> None:
        if not self._registry.clients:  # a fast failure: the client that started this has not said Hello yet
            self._router.poll(FIRST_HELLO_TIMEOUT_MS)
            self._receive_from_clients()
        for identity in self._registry.clients:
            self._registry.reply(identity, Refusal(reason, kind))
        self._say_last_words()
        self._exit_code = EXIT_START_FAILED

    def _end(self, reason: str, code: int) -> None:
        """Leave the loop. Clients are told only what is final: else another core takes this one's place."""
        if code == EXIT_OK:
            self._journal.note_alone(None)
        if code == EXIT_WORKER_LOST:
            _log.error("%s", reason)
            for identity in list(self._registry.clients):
                self._registry.reply(identity, EngineDead(reason))
            self._say_last_words()
        self._exit_code = code

    def _say_last_words(self) -> None:
        """Deliver and wait for each client's Goodbye.

        A DEALER with ZMQ_IMMEDIATE drops what it has not read yet when the connection ends, so leaving
        right after sending would lose the reason in the very case that it is for.
        """
        deadline = time.monotonic() + LAST_WORDS_TIMEOUT_S
        self._registry.deliver()
        while self._registry.clients and (left_s := deadline - time.monotonic()) > 0:
            if self._router.poll(int(left_s * 1000)):
                self._receive_from_clients()
            self._registry.deliver()


def main() -> NoReturn:
    """Entry point of `python -m quire.core`."""
    started_at = time.time()
    lifeline = Lifeline()
    lifeline.watch(grace_s=PARENT_LOST_GRACE_S)
    enable_stack_dumps()
    raise_file_limit()
    launch = msgspec.msgpack.decode(lifeline.launch, type=CoreLaunch)
    logging.basicConfig(level=launch.config.log_level, format="quire: %(message)s")
    sys.exit(EngineCoreProcess(launch, lifeline.fd, started_at).run())
