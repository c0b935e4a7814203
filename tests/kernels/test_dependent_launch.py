"""Programmatic dependent launch: who gets it, and what the compiler makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton import dependent_launch_triton, triton_faults

_TIMEOUT_S = 280.0
CUDA = torch.device("cuda")
OFF = {"USE_PDL": False, "enable_fp_fusion": True}
ON = {"USE_PDL": True, "launch_pdl": True, "enable_fp_fusion": True}

Instructions = dict[tuple[int, bool], dict[str, list[str]]]

# In a process of its own, because Triton decides at its import whether it interprets.
_SCRIPT = """
import json, re, sys, torch
from quire.kernels.triton import dependent_launch_triton
from quire.kernels.linear.linear_triton import launch_linear
from quire.kernels.norm.rms_norm_triton import launch_rms_norm
from quire.kernels.attention.rotate_and_write_triton import launch_rotate_and_write
from quire.tools.gpu.compiler import compile_launches, make

def launch():
    launch_rms_norm(make(2, 1024), make(2, 1024), make(1024), 1e-6)
    launch_linear(make(1, 1024), make(1024, 1024))
    cache, weight, angle = make(4, 2, 16, 64), make(64), make(2, 32, dtype=torch.float32)
    slots = make(2, dtype=torch.int64)
    launch_rotate_and_write(make(2, 512), 4, angle, angle, (weight, weight, 1e-6), cache, cache, slots)

wanted = r"griddepcontrol\\.\\w+|prefetch\\.global|[ls][dt]\\.global|cp\\.async\\.c\\w|\\w+(?:\\.\\w+)*\\.f32"
made = []
for architecture, is_enabled in json.loads(sys.argv[1]):
    dependent_launch_triton.IS_ENABLED = is_enabled
    found = compile_launches(launch, architecture)
    made.append({one.name: re.findall(wanted, one.asm["ptx"]) for one in found})
print(json.dumps(made))
"""


@pytest.fixture(scope="module")
def compiled() -> Instructions:
    """By (architecture, whether it is enabled) and kernel the instructions that matter here, in order."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cases = [(90, True), (90, False), (80, True)]
    command = [sys.executable, "-P", "-c", _SCRIPT, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.timeout(_TIMEOUT_S + 20)
def test_kernels_wait_once_before_they_touch_what_others_write(compiled: Instructions) -> None:
    loads_of_weights = {"_rms_norm": True, "_rotate_and_write_kernel": True}
    for name, found in compiled[90, True].items():
        waits = [one for one in found if one.startswith("griddepcontrol")]
        assert waits == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"], name
        before = found[: found.index("griddepcontrol.wait")]
        assert "st.global" not in before, name
        assert ("ld.global" in before) == loads_of_weights.get(name, False), name
        assert ("prefetch.global" in before) == (name == "_linear_few"), name


@pytest.mark.timeout(_TIMEOUT_S + 20)
def test_the_arithmetic_is_the_same_with_it_and_without(compiled: Instructions) -> None:
    def count(found: list[str]) -> Counter[str]:
        return Counter(one for one in found if not one.startswith(("griddepcontrol", "prefetch")))

    with_it, without = compiled[90, True], compiled[90, False]
    assert with_it.keys() == without.keys()
    for name, found in without.items():
        assert not any(one.startswith(("griddepcontrol", "prefetch")) for one in found), name
        assert count(found) == count(with_it[name]), name


@pytest.mark.timeout(_TIMEOUT_S + 20)
def test_a_card_before_hopper_has_none_of_it(compiled: Instructions) -> None:
    for name, found in compiled[80, True].items():
        assert not any(one.startswith(("griddepcontrol", "prefetch")) for one in found), name


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say what a card and its driver are."""

    def be(capability: tuple[int, int], driver: int) -> dict[str, bool]:
        dependent_launch_triton._is_supported.cache_clear()
        monkeypatch.setattr(triton_faults, "find_capability", lambda _: capability)
        monkeypatch.setattr(dependent_launch_triton, "find_driver", lambda: driver)
        return dependent_launch_triton.launch_options(CUDA)

    yield be
    dependent_launch_triton._is_supported.cache_clear()


def test_card_driver_and_triton_have_to_know_it(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    off = OFF
    assert card((9, 0), 12_040) == card((10, 0), 13_000) == ON
    assert card((8, 9), 13_000) == off
    assert card((9, 0), 12_020) == off  # graphs do not capture it
    monkeypatch.setattr(dependent_launch_triton, "gdc_wait", None)
    assert card((9, 0), 13_000) == off


def test_one_switch_turns_it_off(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert card((9, 0), 13_000) == ON
    monkeypatch.setattr(dependent_launch_triton, "IS_ENABLED", False)
    assert card((9, 0), 13_000) == OFF


def test_a_machine_without_a_driver_has_no_release() -> None:
    assert dependent_launch_triton.find_driver() >= 0
    assert dependent_launch_triton.launch_options(torch.device("cpu")) == OFF
