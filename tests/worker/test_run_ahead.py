"""The worker's loop on a simulated device: it is kept busy, and what its errors lead to."""

from __future__ import annotations

import os

import pytest
import torch
from quire.ipc.processes.process import EXIT_DEVICE_LOST
from quire.ipc.protocol.step import ModelRunnerOutput, StepFailed, WorkerFailed
from quire.worker.devices import is_out_of_memory, is_sticky
from simulated_device import Exited, SimulatedDevice, mean_step_s, serve

ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")


@pytest.mark.parametrize(("step_s", "most_s"), [(1.0e-3, 1.05e-3), (2.5e-3, 2.55e-3), (0.5e-3, 0.53e-3)])
def test_the_device_never_waits_for_its_next_step(step_s: float, most_s: float) -> None:
    core = serve(SimulatedDevice(step_s), 300)
    assert [answer.step_id for answer in core.answers] == list(range(300))
    assert 0.999 * step_s <= mean_step_s(core) <= most_s


def test_a_device_without_run_ahead_is_collected_at_once() -> None:
    device = SimulatedDevice(1e-3, is_async=False)
    core = serve(device, 50)
    assert [answer.step_id for answer in core.answers] == list(range(50))


def test_steps_before_one_that_cannot_be_launched_are_answered_with_their_tokens() -> None:
    device = SimulatedDevice(1e-3, launch_errors={5: ValueError("row 3 is wrong")})
    core = serve(device, 12)
    kinds = {answer.step_id: type(answer) for answer in core.answers}
    assert all(kinds[step_id] is ModelRunnerOutput for step_id in range(5))
    failed = [answer for answer in core.answers if isinstance(answer, StepFailed)]
    assert (failed[0].step_id, failed[0].error) == (5, "row 3 is wrong")
    assert [answer.error for answer in failed[1:]] == ["an earlier step failed"] * (len(failed) - 1)
    assert isinstance(core.answers[-1], ModelRunnerOutput)  # after the reset it goes on


@pytest.mark.parametrize("where", ["launch_errors", "collect_errors", "reset_error"])
def test_an_error_that_stays_ends_the_process_before_another_step(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Exited

    monkeypatch.setattr(os, "_exit", leave)
    device = SimulatedDevice(1e-3)
    if where == "reset_error":
        device.reset_error, device.launch_errors = ILLEGAL, {4: ValueError("first")}
    else:
        setattr(device, where, {4: ILLEGAL})
    sent: list[object] = []
    monkeypatch.setattr("simulated_device.SimulatedCore.send_multipart", _make_recorder(sent))
    with pytest.raises(Exited):
        serve(device, 100)
    assert codes == [EXIT_DEVICE_LOST]
    last = sent[-1]
    assert isinstance(last, WorkerFailed)
    assert last.kind == "RuntimeError"
    assert last.reason.startswith("its device has failed: RuntimeError: CUDA error: an illegal")
    assert "\n" not in last.reason
    if where != "reset_error":  # nobody is blamed for what may be another's
        assert not any(isinstance(one, StepFailed) for one in sent)


def _make_recorder(sent: list[object]):
    from simulated_device import SimulatedCore

    send = SimulatedCore.send_multipart

    def record(self: SimulatedCore, frames: list[bytes]) -> None:
        message = self._codec.decode([bytes(frame) for frame in frames])
        sent.append(message)
        if isinstance(message, WorkerFailed):
            return
        send(self, frames)

    return record


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cudaErrorMemoryAllocation",
        "Triton Error [CUDA]: out of memory",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_too_little_memory_is_known_by_any_library(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert not is_sticky(RuntimeError(text))


class CodedError(torch.AcceleratorError):
    """As torch raises it: with CUDA's code."""

    def __init__(self, text: str, error_code: int) -> None:
        super().__init__(text)
        self.error_code = error_code


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (CodedError("CUDA error: an illegal memory access was encountered", 700), True),
        (CodedError("CUDA error: something new", 9999), True),
        (CodedError("CUDA error: invalid argument", 1), False),
        (CodedError("CUDA error", 2), False),  # memory
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("an illegal memory access, says a user"), False),
        (MemoryError(), False),
    ],
)
def test_errors_that_stay_are_told_from_those_of_a_step(error: Exception, stays: bool) -> None:
    assert is_sticky(error) is stays
