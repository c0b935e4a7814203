"""Which GPU a worker takes, and what is said of one that cannot be used, on faked runtimes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.errors import ConfigError
from quire.ipc.spec.config import ParallelConfig
from quire.worker import devices
from quire.worker.devices import find_gpu_fault, resolve_device
from quire.worker.rank import check_num_ranks


class FakeCuda:
    """torch.cuda with so many GPUs, as far as devices are chosen."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, count: int, capability: tuple[int, int] = (9, 0)
    ) -> None:
        self.current = 0
        self.count = count
        fakes = {
            "is_available": lambda: count > 0,
            "device_count": lambda: count,
            "current_device": lambda: self.current,
            "set_device": lambda index: setattr(self, "current", index),
            "get_device_name": lambda device: f"Card {device}",
            "get_device_capability": lambda _device: capability,
            "get_arch_list": lambda: ["sm_75", "sm_90", "compute_120"],
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


@pytest.mark.parametrize(
    ("name", "number", "index"),
    [("auto", 0, 0), ("cuda", 3, 3), ("cuda", 5, 1), ("cuda:1", 0, 1), ("cuda:1", 2, 3)],
)
def test_workers_take_one_gpu_after_the_other(
    name: str, number: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch, 4)
    assert resolve_device(name, number) == torch.device("cuda", index)
    assert cuda.current == index


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    with pytest.raises(ConfigError) as refusal:
        resolve_device("cuda:2")
    assert str(refusal.value) == (
        "device='cuda:2': expected one of cuda:0 (Card 0), cuda:1 (Card 1), which CUDA_VISIBLE_DEVICES=5,7 "
        "leaves; a worker would need cuda:2"
    )
    with pytest.raises(ConfigError, match="tensor_parallel_size=2: expected at most 1"):
        check_num_ranks(ParallelConfig(device="cuda:1", tensor_parallel_size=2), torch.device("cuda"))


@pytest.mark.parametrize("name", ["cuda:", "cuda:x", "cuda:-1", "gpu", "", "cuda:0 "])
def test_a_name_of_no_device_is_refused_before_anything_starts(name: str) -> None:
    with pytest.raises(ConfigError, match=r"device=.*one of auto, cpu, cuda, or a GPU by its number"):
        EngineArgs(device=name).create_engine_config()
    assert EngineArgs(device="cuda:1").create_engine_config().parallel.device == "cuda:1"


@pytest.fixture
def with_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with a GPU that torch does not see."""
    FakeCuda(monkeypatch, 0)
    driver = tmp_path / "nvidiactl"
    driver.touch()
    monkeypatch.setattr(devices, "_DRIVER", driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def fail_init(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def fail() -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch.cuda, "init", fail)


@pytest.mark.usefixtures("with_driver")
def test_an_old_driver_is_named_and_auto_goes_on_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = "The NVIDIA driver on your system is too old (found version 11040). Please update"
    fail_init(monkeypatch, said)
    with pytest.raises(ConfigError, match=r"cpu or auto: NVIDIA's driver is too old for CUDA 13.0: install"):
        resolve_device("cuda:0")
    with caplog.at_level(logging.WARNING):
        assert resolve_device("auto") == torch.device("cpu")
    [record] = caplog.records
    assert record.getMessage().startswith("models run on the CPU, though there is a GPU: NVIDIA's driver is")


@pytest.mark.usefixtures("with_driver")
def test_other_reasons_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert find_gpu_fault() == "this torch is built for CPUs only: pip install a torch that is built for CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert (find_gpu_fault() or "").startswith("torch finds none of the driver's devices")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    assert find_gpu_fault() == "CUDA_VISIBLE_DEVICES=9 leaves no GPU of this machine"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_gpu_fault() is None  # hidden on purpose


def test_a_card_that_this_torch_has_no_kernels_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, 1, capability=(6, 1))
    with pytest.raises(ConfigError, match=r"has compute capability 6\.1, this torch's kernels need 7\.5"):
        resolve_device("cuda")
    assert resolve_device("auto") == torch.device("cpu")


def test_a_machine_without_a_gpu_has_no_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeCuda(monkeypatch, 0)
    monkeypatch.setattr(devices, "_DRIVER", tmp_path / "absent")
    assert find_gpu_fault() is None
    with pytest.raises(ConfigError, match="torch finds no CUDA device here"):
        resolve_device("cuda")
