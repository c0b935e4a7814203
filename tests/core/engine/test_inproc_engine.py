"""The engine without processes, around FakeWorker: it is the process's loop, failures included."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest
from fakes import FakeWorker, expected_output, make_config, make_request
from quire.core.engine.inproc_engine import InprocEngine
from quire.core.workers import executor
from quire.ipc.errors import EngineDeadError, ModelError
from quire.ipc.protocol.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    UtilityCall,
    UtilityMethod,
)
from quire.ipc.protocol.step import ModelRunnerOutput, SchedulerOutput, StepFailed, WorkerReady
from quire.ipc.spec.config import EngineConfig

CONFIG = make_config()


class FakeInprocWorker:
    """FakeWorker with the face of worker.Worker: what fails, raises."""

    def __init__(self, config: EngineConfig, on_phase: Callable[[str], None]) -> None:
        self._fake = FakeWorker(config, num_blocks=256, poisoned={"poison"}, bad={"bad"})
        self._on_phase = on_phase
        self._name = config.model.served_model_name

    def start(self) -> WorkerReady:
        self._on_phase("load fake weights")
        if self._name == "missing":
            raise ModelError("model", "missing", "a folder")
        return WorkerReady(256, "fake", [])

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        answer = self._fake.execute(step)
        if isinstance(answer, StepFailed):
            raise RuntimeError(answer.error)
        return answer

    def describe_failure(self, step_id: int, error: Exception) -> StepFailed:
        return StepFailed(step_id, f"RuntimeError: {error}")

    def reset_rows(self) -> None:
        self._fake.reset_rows()


@pytest.fixture(autouse=True)
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(Worker=FakeInprocWorker)
    monkeypatch.setattr(executor.importlib, "import_module", lambda _name, _package: module)


def run(engine: InprocEngine, requests: list[EngineCoreRequest]) -> dict[str, list[EngineCoreOutput]]:
    """Each request's outputs, until all have ended."""
    outputs: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    for _ in range(1000):
        for output in engine.run_step():
            outputs[output.request_id].append(output)
        if all(some and some[-1].finish_reason is not None for some in outputs.values()):
            return outputs
    raise AssertionError(f"no end after 1,000 steps: {outputs}")


def test_poison_fails_alone_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    engine = InprocEngine(CONFIG, None)
    requests = [make_request(f"r-{i}", [i + 1, 2, 3], max_tokens=1 + i % 20) for i in range(30)]
    poison, bad = make_request("poison", [99, 1]), make_request("bad", [98, 1])
    outputs = run(engine, [*requests[:15], poison, bad, *requests[15:]])
    for request in requests:
        tokens, reason = expected_output(request, CONFIG.model.max_model_len)
        assert [token for output in outputs[request.request_id] for token in output.new_token_ids] == tokens
        assert outputs[request.request_id][-1].finish_reason == reason
    (end,) = outputs["poison"]
    assert (end.error_code, end.error) == (ErrorCode.POISON_REQUEST, "RuntimeError: poisoned by ['poison']")
    assert outputs["bad"][-1].error_code == ErrorCode.BAD_LOGITS
    assert engine.call_utility(UtilityCall(1, UtilityMethod.CHECK_INTEGRITY)).error is None
    reports = [record.message for record in caplog.records if record.message.startswith("poison request")]
    assert len(reports) == 1
    assert '"request_id":"poison"' in reports[0]


def test_a_turn_delivers_what_a_step_gave_before_the_next_one_runs() -> None:
    engine = InprocEngine(CONFIG, None)
    engine.add_request(make_request("r", [1, 2], max_tokens=3))
    assert [[output.start for output in engine.run_step()] for _ in range(4)] == [[0], [1], [2], []]


def test_what_is_aborted_is_answered_without_a_step() -> None:
    engine = InprocEngine(CONFIG, None)
    engine.add_request(make_request("r", [1, 2]))
    engine.abort_requests(["r", "unknown"])
    (output,) = engine.run_step()
    assert (output.request_id, output.finish_reason, output.new_token_ids) == ("r", FinishReason.ABORT, [])
    snapshot = engine.call_utility(UtilityCall(1, UtilityMethod.SNAPSHOT)).snapshot
    assert snapshot is not None
    assert [client.kind for client in snapshot.clients] == ["inproc"]
    assert snapshot.stats.num_steps_total == 0


def test_phases_of_the_start_are_told_and_its_failure_is_raised() -> None:
    phases: list[str] = []
    InprocEngine(CONFIG, phases.append)
    assert phases == ["start worker", "load fake weights"]
    model = msgspec.structs.replace(CONFIG.model, served_model_name="missing")
    with pytest.raises(ModelError, match="model='missing'"):
        InprocEngine(msgspec.structs.replace(CONFIG, model=model), None)


def test_a_closed_engine_says_so() -> None:
    engine = InprocEngine(CONFIG, None)
    engine.close()
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.run_step()
