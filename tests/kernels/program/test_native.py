"""The compiled library: it builds here, shares torch's threads, and its absence is survivable."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from quire.ipc.errors import ConfigError
from quire.kernels.program import build, native
from quire.tools.probe import probe_cpu_kernels
from quire.worker.worker import check_switch


@pytest.mark.usefixtures("library")
def test_the_library_compiles_and_adds_no_second_openmp_runtime() -> None:
    torch.ones(1 << 18).sum()  # torch's own threads have run
    mapped = {
        line.rpartition("/")[2]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libgomp" in line or "libiomp" in line or "libomp" in line
    }
    assert len(mapped) == 1


@pytest.mark.parametrize("flaw", ["no compiler", "compiler fails", "writable by others", "switched off"])
def test_any_failure_costs_one_log_line_and_no_error(
    flaw: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("QUIRE_NATIVE_KERNELS", "0" if flaw == "switched off" else "1")
    if flaw == "no compiler":
        monkeypatch.setattr(build.shutil, "which", lambda _name: None)
    elif flaw == "compiler fails":
        monkeypatch.setattr(build, "_FLAGS", ("--no-such-flag",))
    elif flaw == "writable by others":
        (tmp_path / "quire").mkdir()
        (tmp_path / "quire").chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert native.load_library.__wrapped__() is None
    told = [record.message for record in caplog.records]
    assert [line.split()[0] for line in told[:-1]] == ["compiling"] * (flaw == "compiler fails")
    assert "native CPU kernels are off" in caplog.text
    assert ("QUIRE_NATIVE_KERNELS=0" in caplog.text) == (flaw == "switched off")


@pytest.mark.parametrize("value", ["2", "off", ""])
def test_a_switch_that_says_neither_on_nor_off_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_NATIVE_KERNELS", value)
    for refused, error in ((native.load_library.__wrapped__, ValueError), (check_switch, ConfigError)):
        with pytest.raises(error, match=f"QUIRE_NATIVE_KERNELS='{value}': expected 0 .*, 1, or not set"):
            refused()


def test_doctor_notes_that_the_kernels_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger(native.__name__)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setenv("QUIRE_NATIVE_KERNELS", "0")
    monkeypatch.setattr(native, "load_library", native.load_library.__wrapped__)
    report = probe_cpu_kernels()
    assert not report["is_native"]
    assert report["detail"].endswith("torch operations take their place: QUIRE_NATIVE_KERNELS=0")


def test_types_and_devices_without_a_kernel_get_none() -> None:
    assert native.find_library(torch.float16, torch.device("cpu")) is None
    assert native.find_library(torch.float32, torch.device("meta")) is None
