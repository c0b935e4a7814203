"""When Triton is used, and what is said where it cannot be."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from quire.kernels.attention import flashinfer_attention
from quire.kernels.triton import triton_runtime
from quire.tools import probe
from quire.worker import devices
from quire.worker.layers.norm import RMSNorm

CPU = torch.device("cpu")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton asked to serve the CPU, as if it had never been tried."""
    monkeypatch.setattr(triton_runtime, "DEVICE_TYPES", {"cpu"})
    triton_runtime.find_fault.cache_clear()
    yield
    triton_runtime.find_fault.cache_clear()


def test_a_cpu_worker_never_loads_triton() -> None:
    script = (
        "import sys, torch\n"
        "from quire.worker.models import builder\n"
        "builder.RMSNorm(torch.ones(4), 1e-6)(torch.ones(1, 4)), builder.Embedding(torch.ones(1, 4))\n"
        "builder.GatedActivation('silu', torch.float32, torch.device('cpu'))\n"
        "assert not any(name.partition('.')[0] == 'triton' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True, timeout=60)


@pytest.mark.usefixtures("runtime")
def test_a_missing_triton_costs_one_log_line_and_torch_takes_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "quire.kernels.program.gather_rows_triton", raising=False)
    with caplog.at_level(logging.WARNING):
        norms = [RMSNorm(torch.ones(4), 1e-6) for _ in range(3)]
    assert torch.allclose(norms[0](torch.full((1, 4), 2.0)), torch.ones(1, 4))
    assert [record.message[:24] for record in caplog.records] == ["Triton's kernels are off"]


@pytest.mark.usefixtures("runtime")
def test_a_failing_compiler_counts_as_a_missing_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    gather_rows_triton = pytest.importorskip("quire.kernels.program.gather_rows_triton")

    def fail(*_: torch.Tensor) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(gather_rows_triton, "launch_gather_rows", fail)
    assert not triton_runtime.can_use_triton(CPU)


@pytest.mark.usefixtures("runtime")
def test_a_working_triton_serves_the_layers() -> None:
    pytest.importorskip("triton")
    assert triton_runtime.can_use_triton(CPU)
    assert RMSNorm(torch.ones(4), 1e-6)._kernel.__module__ == "quire.kernels.norm.rms_norm_triton"


def test_the_doctor_says_why_a_gpu_has_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "find_gpu_fault", lambda: None)
    monkeypatch.setattr(triton_runtime, "find_fault", {"cuda": "no C compiler"}.get)
    report = probe.probe_triton()
    assert report["is_needed"]
    assert not report["is_usable"]
    assert report["detail"] == "slower torch operations instead: no C compiler"


def test_the_doctor_describes_no_gpu_whose_driver_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(_: int) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # NVML counts it
    monkeypatch.setattr(torch.cuda, "get_device_properties", describe)
    monkeypatch.setattr(devices, "find_gpu_fault", lambda: "NVIDIA's driver is too old")
    report = probe.probe_torch()
    assert (report["gpus"], report["gpu_fault"]) == ([], "NVIDIA's driver is too old")


@pytest.mark.parametrize(
    ("version", "fault", "detail"),
    [
        ("0.7.2", None, "0.7.2, used where attention_backend=FLASHINFER asks for it"),
        (
            None,
            flashinfer_attention.NOT_INSTALLED,
            "not installed: attention_backend=FLASHINFER (pip install flashinfer-python)",
        ),
        ("0.7.2", "it has no nvcc", "0.7.2, but it has no nvcc"),
    ],
)
def test_the_doctor_says_whether_flashinfer_is_there_and_why_it_is_not_used(
    monkeypatch: pytest.MonkeyPatch, version: str | None, fault: str | None, detail: str
) -> None:
    monkeypatch.setattr(probe, "find_version", {"flashinfer-python": version}.get)
    monkeypatch.setattr(flashinfer_attention, "find_fault", lambda: fault)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    without = probe.probe_flashinfer()
    assert not without["is_needed"]
    assert without["detail"] == (
        "not needed without a GPU" if version is None else "0.7.2, not used without a GPU"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "find_gpu_fault", lambda: None)
    report = probe.probe_flashinfer()
    assert report["is_needed"]
    assert report["is_usable"] is (fault is None)
    assert report["detail"].startswith(detail)
