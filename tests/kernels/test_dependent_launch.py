"""Programmatic dependent launch: who gets it. What the compiler makes of it: test_triton_compiles.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton import dependent_launch_triton, triton_faults

CUDA = torch.device("cuda")
OFF = {"USE_PDL": False, "enable_fp_fusion": True}
ON = {"USE_PDL": True, "launch_pdl": True, "enable_fp_fusion": True}


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
    assert card((9, 0), 12_040) == card((10, 0), 13_000) == ON
    assert card((8, 9), 13_000) == OFF
    assert card((9, 0), 12_020) == OFF  # graphs do not capture it
    monkeypatch.setattr(dependent_launch_triton, "gdc_wait", None)
    assert card((9, 0), 13_000) == OFF


def test_one_switch_turns_it_off(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert card((9, 0), 13_000) == ON
    monkeypatch.setattr(dependent_launch_triton, "IS_ENABLED", False)
    assert card((9, 0), 13_000) == OFF


def test_a_machine_without_a_driver_has_no_release() -> None:
    assert dependent_launch_triton.find_driver() >= 0
    assert dependent_launch_triton.launch_options(torch.device("cpu")) == OFF
