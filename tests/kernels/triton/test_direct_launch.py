"""Direct launches: which launches share a compiled kernel, and which go Triton's way."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton.direct_launch import DirectLaunches, recorded_launches

PARAMS = ("x", "y", "count", "size", "eps", "HAS_BIAS", "BLOCK")
X, Y = torch.zeros(64), torch.zeros(64)


@dataclass
class Compiled:
    """A variant; its launches are kept."""

    launched: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    function: str = "function"
    packed_metadata: str = "metadata"

    def run(self, *args: Any) -> None:
        self.launched.append(args)


class Kernel:
    """As much of a JITFunction as a launch sees; every call of `run` is one of Triton's own."""

    def __init__(self) -> None:
        self.pre_run_hooks: list[Any] = []
        self.params = [
            SimpleNamespace(name=name, is_constexpr=name.isupper(), do_not_specialize=name == "count")
            for name in PARAMS
        ]
        self.compiled: list[Compiled] = []

    def run(self, *_args: Any, grid: Any, warmup: bool, **_options: Any) -> Compiled:
        del grid, warmup
        self.compiled.append(Compiled())
        return self.compiled[-1]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    import triton

    driver = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: 100 + device)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    return Kernel()


def launch(direct: DirectLaunches, *args: Any, grid: tuple[int, ...] = (7,), **options: Any) -> Any:
    return direct.run(*args, grid=grid, warmup=False, **({"HAS_BIAS": True, "BLOCK": 16} | options))


def test_a_launch_like_one_before_runs_its_kernel_with_its_own_arguments(kernel: Kernel) -> None:
    direct = DirectLaunches(kernel)
    first = launch(direct, X, Y, 5, 64, 1e-6, num_warps=2)
    assert first is kernel.compiled[0]
    z = torch.ones(64)
    assert launch(direct, X, z, 900, 64, 1e-6, grid=(3, 2), num_warps=2) is None
    assert len(kernel.compiled) == 1
    [args] = kernel.compiled[0].launched
    assert args[:9] == (3, 2, 1, 103, "function", "metadata", None, None, None)
    assert args[9] is X
    assert args[10] is z
    assert args[11:] == (900, 64, 1e-6, True, 16)  # constants in the kernel's order


@pytest.mark.parametrize(
    "other",
    [
        {"args": (X, Y.double(), 5, 64, 1e-6)},
        {"args": (X, Y, 5, 32, 1e-6)},
        {"args": (X, Y, 5, 64, 1e-5)},
        {"options": {"HAS_BIAS": False}},
        {"options": {"num_warps": 4}},
        {"args": (X, Y[1:], 5, 64, 1e-6)},  # not aligned
        {"args": (X, Y, 1 << 40, 64, 1e-6)},  # wider than 32 bits
    ],
)
def test_what_another_kernel_may_be_compiled_for_goes_tritons_way(
    kernel: Kernel, other: dict[str, Any]
) -> None:
    direct = DirectLaunches(kernel)
    launch(direct, X, Y, 5, 64, 1e-6)
    args, options = other.get("args", (X, Y, 5, 64, 1e-6)), other.get("options", {})
    assert launch(direct, *args, **options) is kernel.compiled[1]
    assert not kernel.compiled[0].launched
    assert launch(direct, X, Y, 6, 64, 1e-6) is None  # the first is still kept
    assert len(kernel.compiled[0].launched) == 1


def test_constants_in_another_order_are_not_taken_for_each_other(kernel: Kernel) -> None:
    direct = DirectLaunches(kernel)
    direct.run(X, Y, 5, 64, 1e-6, grid=(1,), warmup=False, HAS_BIAS=1, BLOCK=2)
    assert direct.run(X, Y, 5, 64, 1e-6, grid=(1,), warmup=False, BLOCK=1, HAS_BIAS=2) is kernel.compiled[1]


def test_launches_that_more_may_change_always_go_tritons_way(kernel: Kernel) -> None:
    kernel.pre_run_hooks.append(print)
    direct = DirectLaunches(kernel)
    for number in range(3):
        assert launch(direct, X, Y, 5, 64, 1e-6) is kernel.compiled[number]


def test_integers_that_never_repeat_are_not_kept_for_ever(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.kernels.triton.direct_launch._MAX_KEPT", 3)
    direct = DirectLaunches(kernel)
    for size in range(10):
        launch(direct, X, Y, 5, size, 1e-6)
    assert [launch(direct, X, Y, 5, size, 1e-6) is None for size in range(5)] == [True] * 3 + [False] * 2


def test_a_recorded_call_is_launched_again_with_other_inputs(kernel: Kernel) -> None:
    direct = DirectLaunches(kernel)
    launch(direct, X, Y, 5, 64, 1e-6)
    with recorded_launches((Y,)) as tape:
        launch(direct, X, Y, 5, 64, 1e-6, grid=(4,))
        launch(direct, Y, X, 6, 64, 1e-6)
    assert tape.is_whole
    kernel.compiled[0].launched.clear()
    z = torch.ones(64)
    assert tape.run((z,))
    first, second = kernel.compiled[0].launched
    assert first[:4] == (4, 1, 1, 103)
    assert [first[9] is X, first[10] is z, second[9] is z, second[10] is X] == [True] * 4
    assert (first[11], second[11]) == (5, 6)
    assert not tape.run((z[1:],))  # what it has recorded was compiled for aligned ones
    assert len(kernel.compiled[0].launched) == 2


def test_a_call_of_which_a_part_went_tritons_way_is_not_launched_again(kernel: Kernel) -> None:
    direct = DirectLaunches(kernel)
    launch(direct, X, Y, 5, 64, 1e-6)
    with recorded_launches((Y,)) as tape:
        launch(direct, X, Y, 5, 64, 1e-6)
        launch(direct, X, Y, 5, 32, 1e-6)
    assert not tape.is_whole
    with recorded_launches((Y,)) as tape:
        pass
    assert not tape.is_whole
