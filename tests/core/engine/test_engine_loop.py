"""The turn of an engine, without a process: in which order things are done, and when it ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from fakes import FakeClock, FakeWorker, make_config, make_request
from quire.core.clients.client_registry import OUTBOX_RETRY_S, ClientRegistry
from quire.core.engine.engine_loop import MAX_RECEIVE_S, EngineLoop
from quire.core.stats.engine_facts import StartupClock, format_startup
from quire.core.workers.executor import Executor, ExecutorEvent, WorkerLost
from quire.ipc.processes.process import EXIT_CRASHED, EXIT_OK, EXIT_START_FAILED, EXIT_WORKER_LOST
from quire.ipc.processes.restarts import MAX_WORKER_LOSSES
from quire.ipc.protocol.codec import make_client_codec
from quire.ipc.protocol.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    EngineCoreOutputs,
    FinishReason,
    Hello,
    LeaseCheck,
    ProtocolNotice,
    StartupProgress,
    Welcome,
)
from quire.ipc.protocol.step import SchedulerOutput, WorkerFailed, WorkerReady
from quire.ipc.spec.config import EngineConfig

CONFIG = make_config()
CODEC = make_client_codec()
READY = WorkerReady(64, "fake", [])
LOST = WorkerLost("worker (pid 1) was killed by SIGKILL")


class ScriptedExecutor(Executor):
    """Says what a test puts into `events`; a step is answered when it is submitted."""

    def __init__(self) -> None:
        self.worker = FakeWorker(CONFIG, 64)
        self.events: list[ExecutorEvent] = []
        self.num_starts = 0
        self.num_steps = 0
        self.num_resets = 0
        self.config: EngineConfig | None = None  # of the next worker, where it was told
        self.can_change = True

    def configure(self, config: EngineConfig) -> bool:
        self.config = config
        return self.can_change

    def start(self) -> None:
        self.num_starts += 1
        self.worker.lose()

    def submit(self, step: SchedulerOutput) -> None:
        self.num_steps += 1
        self.events.append(self.worker.execute(step))

    def reset_rows(self) -> None:
        self.num_resets += 1
        self.worker.reset_rows()

    def receive(self) -> list[ExecutorEvent]:
        events, self.events = self.events, []
        return events

    def stop(self, grace_s: float) -> None:
        """Nothing to end."""


class Engine:
    """A loop, what it runs on, and what its clients were sent."""

    def __init__(self, journal_path: str = "", config: EngineConfig = CONFIG) -> None:
        self.clock = FakeClock()
        self.executor = ScriptedExecutor()
        self.sent: list[msgspec.Struct] = []
        self.is_full = False
        self.gone: set[bytes] = set()
        self.registry = ClientRegistry("epoch", 0.0, self._send, self.clock)
        startup = StartupClock("start core", self.clock())
        self.loop = EngineLoop(
            config, self.executor, self.registry, startup, journal_path, self.clock, self.clock, b"fixed"
        )

    def _send(self, identity: bytes, message: msgspec.Struct) -> bool:
        if identity in self.gone:
            raise ConnectionResetError
        if not self.is_full:
            self.sent.append(message)
        return not self.is_full

    def turn(self, *messages: msgspec.Struct, events: tuple[ExecutorEvent, ...] = ()) -> None:
        self.executor.events += events
        self.loop.run_turn([(b"c", CODEC.encode(message)) for message in messages])

    def take_sent(self) -> list[msgspec.Struct]:
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
def ready() -> Engine:
    """An engine with one client that was welcomed."""
    return make_ready()


def make_ready(journal_path: str = "") -> Engine:
    engine = Engine(journal_path)
    engine.loop.start()
    engine.turn(Hello(PROTOCOL_VERSION, "test", 1), events=(READY,))
    engine.take_sent()
    return engine


def collect_tokens(messages: list[msgspec.Struct]) -> list[int]:
    outputs = [
        one for message in messages if isinstance(message, EngineCoreOutputs) for one in message.outputs
    ]
    return [token for output in outputs for token in output.new_token_ids]


def test_who_comes_early_hears_of_the_start_and_is_welcomed():
    engine = Engine()
    engine.loop.start()
    engine.turn(Hello(PROTOCOL_VERSION, "test", 1))
    assert engine.take_sent() == [StartupProgress("start worker")]
    assert engine.loop.next_turn_at is None
    engine.turn(events=(READY,))
    (welcome,) = engine.take_sent()
    assert isinstance(welcome, Welcome)
    assert welcome.facts.num_gpu_blocks == 64


def test_a_request_is_computed_from_the_turn_on_that_brings_it(ready: Engine):
    ready.turn(make_request("r", [1, 2, 3], max_tokens=5))
    assert ready.executor.num_steps == CONFIG.scheduler.run_ahead
    assert ready.take_sent() == []
    ready.turn()
    assert len(collect_tokens(ready.sent)) == CONFIG.scheduler.run_ahead


def test_an_abort_comes_before_the_results_that_arrived_with_it(ready: Engine):
    ready.turn(make_request("r", [1, 2, 3], max_tokens=5))
    ready.turn(AbortRequests(["r"]))
    (outputs,) = ready.take_sent()
    assert isinstance(outputs, EngineCoreOutputs)
    assert [(one.new_token_ids, one.finish_reason) for one in outputs.outputs] == [([], FinishReason.ABORT)]


def test_messages_that_take_long_leave_the_others_to_a_later_turn(ready: Engine):
    frames = [(b"c", CODEC.encode(make_request(f"r{i}", [i + 1, 2]))) for i in range(5)]

    def arrive() -> Iterator[tuple[bytes, tuple[bytes]]]:
        while frames:
            ready.clock.advance(MAX_RECEIVE_S / 2)
            yield frames.pop(0)

    ready.loop.run_turn(arrive())
    assert ready.registry.core is not None
    assert ready.registry.core.num_unfinished == 2
    assert len(frames) == 3
    assert ready.executor.num_steps > 0


def test_nonsense_and_strangers_get_a_notice(ready: Engine):
    ready.loop.run_turn([(b"c", (b"?",)), (b"stranger", CODEC.encode(AbortRequests(["r"])))])
    assert [type(message) for message in ready.sent] == [ProtocolNotice, ProtocolNotice]


def test_who_sends_a_request_that_does_not_decode_is_told_which_one(ready: Engine):
    frame = CODEC.encode(make_request("large", [1], max_tokens=7))[0]
    assert frame.count(b"\x07") == 1
    ready.loop.run_turn([(b"c", (frame.replace(b"\x07", b"\xc3"),)), (b"c", (frame[:1] + b"\x91\xc3",))])
    notices = [message for message in ready.sent if isinstance(message, ProtocolNotice)]
    assert [notice.request_id for notice in notices] == ["large", None]
    assert "max_tokens" in notices[0].reason or "int" in notices[0].reason


def test_a_full_queue_is_tried_again_though_nothing_arrives(ready: Engine):
    ready.turn(make_request("r", [1, 2, 3], max_tokens=2))
    ready.is_full = True
    ready.turn()
    assert ready.loop.next_turn_at == ready.clock() + OUTBOX_RETRY_S
    ready.is_full = False
    ready.turn()
    assert len(collect_tokens(ready.sent)) == 2
    assert ready.loop.next_turn_at is None


def test_a_client_that_is_gone_is_found_after_a_connection_has_ended(ready: Engine):
    ready.turn(make_request("r", [1, 2, 3], max_tokens=None))
    ready.gone.add(b"c")
    ready.registry.leases.note_disconnect()
    assert ready.loop.next_turn_at == ready.clock()
    ready.turn()
    assert ready.registry.clients == {}
    assert ready.registry.core is not None
    assert ready.registry.core.num_unfinished == 0


def test_a_client_that_is_there_stays(ready: Engine):
    ready.registry.leases.note_disconnect()
    ready.turn()
    assert ready.sent == [LeaseCheck()]
    assert list(ready.registry.clients) == [b"c"]


def test_a_lost_worker_gets_no_step_and_its_successor_computes_the_rest(ready: Engine):
    ready.turn(make_request("r", [1, 2, 3], max_tokens=9))
    ready.turn()
    num_steps = ready.executor.num_steps
    ready.executor.events = [LOST]
    ready.turn()
    ready.turn()
    assert (ready.executor.num_starts, ready.executor.num_steps) == (2, num_steps)
    ready.turn(events=(READY,))
    for _ in range(9):
        ready.turn()
    assert len(collect_tokens(ready.sent)) == 9
    assert ready.loop.end is None


@pytest.mark.parametrize("event", [LOST, WorkerFailed("no memory", "OutOfMemoryError")])
def test_too_many_lost_workers_end_the_engine(ready: Engine, event: ExecutorEvent):
    for _ in range(MAX_WORKER_LOSSES):
        ready.turn(events=(event,))
        assert ready.loop.end is None
    ready.turn(events=(event,))
    assert ready.loop.end is not None
    assert ready.loop.end.exit_code == EXIT_WORKER_LOST
    assert ready.loop.end.reason.endswith(", 4 times in 60 s")


CAPTURE_FAILED = WorkerFailed("a CUDA graph could not be captured", "CaptureError")


@pytest.mark.parametrize("start", [Engine, make_ready])
def test_a_worker_whose_capture_failed_is_started_again_without_graphs(
    start: Callable[[], Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    engine.executor.num_starts = 0
    engine.turn(events=(CAPTURE_FAILED,))
    assert engine.executor.num_starts == 1
    assert engine.executor.config is not None
    assert engine.executor.config.model.enforce_eager
    assert engine.executor.config.num_blocks_before == (None if start is Engine else 64)
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said == ["a CUDA graph could not be captured; starting another worker, whose steps run without"]
    engine.turn(Hello(PROTOCOL_VERSION, "test", 1), events=(READY,))
    assert engine.loop.end is None
    assert engine.executor.config.model.enforce_eager  # and so is any later one
    assert engine.executor.config.num_blocks_before == 64


def test_a_worker_that_cannot_be_changed_fails_with_what_to_do() -> None:
    engine = Engine()
    engine.executor.can_change = False
    engine.turn(events=(CAPTURE_FAILED,))
    assert engine.loop.end is not None
    assert engine.loop.end.exit_code == EXIT_START_FAILED


def test_the_next_worker_is_told_how_many_blocks_the_first_had(ready: Engine) -> None:
    assert ready.executor.config is not None
    assert ready.executor.config.num_blocks_before == 64
    assert not ready.executor.config.model.enforce_eager


@pytest.mark.parametrize(
    ("start", "event", "reason"),
    [
        (Engine, WorkerFailed("no such folder", "ModelError"), "no such folder"),
        (Engine, WorkerFailed("no memory", "OutOfMemoryError"), "no memory"),
        (Engine, LOST, f"the engine did not start: {LOST.reason}"),
        (make_ready, WorkerFailed("no such folder", "ModelError"), "no such folder"),
    ],
)
def test_what_is_wrong_with_the_start_or_the_model_ends_the_engine_at_once(
    start: Callable[[], Engine], event: ExecutorEvent, reason: str
):
    engine = start()
    engine.turn(events=(event,))
    assert engine.loop.end is not None
    assert (engine.loop.end.exit_code, engine.loop.end.reason) == (EXIT_START_FAILED, reason)


def test_a_worker_with_fewer_blocks_ends_this_core_with_nobody_to_blame(tmp_path: Path):
    journal = tmp_path / "deaths.json"
    engine = make_ready(str(journal))
    suspect = msgspec.structs.replace(make_request("suspect", [1, 2]), num_attempts=2)
    engine.turn(suspect)
    assert json.loads(journal.read_text())["alone"] == "suspect"
    engine.executor.events = []
    engine.turn(events=(LOST,))
    engine.turn(events=(WorkerReady(63, "fake", []),))
    assert engine.loop.end is not None
    assert engine.loop.end.exit_code == EXIT_CRASHED
    assert json.loads(journal.read_text())["alone"] is None


def test_a_worker_with_fewer_state_slots_ends_this_core_and_another_has_as_many() -> None:
    engine = Engine(config=make_config(num_state_slots=300))
    first = msgspec.structs.replace(READY, num_state_slots=300)
    engine.turn(Hello(PROTOCOL_VERSION, "test", 1), events=(first,))
    assert engine.executor.config is not None
    assert engine.executor.config.cache.num_state_slots == 300
    assert engine.registry.facts is not None
    assert "300 state slots: 256 of running requests, 44 of prefixes" in format_startup(engine.registry.facts)
    engine.turn(events=(LOST,))
    engine.turn(events=(first,))
    assert engine.loop.end is None
    engine.turn(events=(LOST,))
    engine.turn(events=(msgspec.structs.replace(READY, num_state_slots=299),))
    assert engine.loop.end is not None
    assert (
        engine.loop.end.reason
        == "the restarted worker has room for fewer KV blocks or states than before; starting anew"
    )


def test_an_engine_that_is_stopped_blames_nobody(tmp_path: Path):
    journal = tmp_path / "deaths.json"
    engine = make_ready(str(journal))
    engine.turn(msgspec.structs.replace(make_request("suspect", [1, 2]), num_attempts=2))
    engine.loop.finish(EXIT_OK, "the engine was stopped")
    assert json.loads(journal.read_text())["alone"] is None
