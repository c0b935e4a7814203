"""Defaults by card, on a driver's library that is compiled for the test."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from quire.frontend.options import gpu_cards
from quire.frontend.options.engine_args import EngineArgs
from quire.frontend.options.gpu_cards import Card, StepDefaults, choose_step_defaults, find_card

GIB = 1 << 30
# Three cards: an H200, a 3090 and an A100, the last also by its UUID.
SOURCE = """
#include <string.h>
static const char *names[] = {"NVIDIA H200", "NVIDIA GeForce RTX 3090", "NVIDIA A100-SXM4-80GB"};
static const unsigned long long sizes[] = {141, 24, 80};
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index > 2) return 2;
    *handle = (void *)(unsigned long)(index + 1);
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    if (strcmp(uuid, "GPU-abc")) return 6;
    *handle = (void *)3;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) {
    memory[0] = sizes[(unsigned long)handle - 1] << 30;
    return 0;
}
int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    strncpy(name, names[(unsigned long)handle - 1], size);
    return 0;
}
"""


@pytest.fixture(scope="module")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    source, library = folder / "nvml.c", folder / "libnvml.so"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return library


@pytest.fixture
def driver(driver_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_cards, "_LIBRARY", str(driver_library))
    monkeypatch.setattr(gpu_cards, "_DRIVER", driver_library)
    monkeypatch.setattr(gpu_cards, "_is_for_cpus", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("device", "visible", "card"),
    [
        ("auto", None, Card("NVIDIA H200", 141 * GIB)),
        ("cuda:1", None, Card("NVIDIA GeForce RTX 3090", 24 * GIB)),
        ("cuda:1", "1, 0", Card("NVIDIA H200", 141 * GIB)),
        ("cuda", "GPU-abc", Card("NVIDIA A100-SXM4-80GB", 80 * GIB)),
        ("cuda:3", None, None),
        ("cuda:1", "0", None),
        ("auto", "", None),
        ("auto", "MIG-1", None),
    ],
)
def test_the_card_is_the_one_that_the_engine_takes(
    device: str, visible: str | None, card: Card | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find_card(device) == card


@pytest.mark.usefixtures("driver")
def test_a_large_card_has_larger_steps() -> None:
    assert choose_step_defaults("auto") == StepDefaults(8192, 1024)
    assert choose_step_defaults("cuda:1") == choose_step_defaults("cuda:2") == StepDefaults(2048, 256)
    assert choose_step_defaults("cpu") == StepDefaults(2048, 256)
    scheduler = EngineArgs().create_engine_config().scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (8192, 1024)
    scheduler = EngineArgs(max_num_seqs=7).create_engine_config().scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (8192, 7)
    scheduler = EngineArgs(device="cpu").create_engine_config().scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (2048, 256)


def test_without_a_driver_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_cards, "_DRIVER", tmp_path / "absent")
    monkeypatch.setattr(gpu_cards, "_is_for_cpus", lambda: pytest.fail("asked"))
    assert find_card() is None
    monkeypatch.setattr(gpu_cards, "_DRIVER", tmp_path)
    monkeypatch.setattr(gpu_cards, "_is_for_cpus", lambda: False)
    monkeypatch.setattr(gpu_cards, "_LIBRARY", "libno-such-library.so")
    assert find_card() is None
