"""Fault hooks are off unless asked for, checked at construction, and happen where and when asked."""

from __future__ import annotations

import subprocess
import sys

import pytest
from daemons import runtime_folders
from fakes import make_config
from quire.frontend.cli.commands import serve
from quire.frontend.cli.serve_options import make_parser
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.daemon.daemon_state import DaemonState, write_state
from quire.ipc.errors import ConfigError
from quire.ipc.processes.fault_hooks import (
    POINTS,
    FaultInjected,
    keep_lasting,
    make_fault_hooks,
    parse_fault_hooks,
)


def test_a_process_without_hooks_has_nothing_to_ask() -> None:
    assert make_fault_hooks("", "core") is None
    assert make_fault_hooks("worker.execute:hang@5", "core") is None


def test_a_hook_happens_at_its_count_and_not_again() -> None:
    hooks = make_fault_hooks("core.schedule:raise@3,core.start:raise", "core")
    assert hooks is not None
    assert [hooks.reach("core.schedule") for _ in range(2)] == [False, False]
    with pytest.raises(FaultInjected, match=r"core\.schedule:raise@3"):
        hooks.reach("core.schedule")
    assert hooks.reach("core.schedule") is False
    with pytest.raises(FaultInjected, match=r"core\.start:raise@1"):
        hooks.reach("core.start")


def test_a_hook_of_one_rank_is_not_the_others() -> None:
    spec = "worker.execute#1:raise@2*"
    assert make_fault_hooks(spec, "worker", 0) is None
    hooks = make_fault_hooks(keep_lasting(spec), "worker", 1)
    assert hooks is not None
    assert not hooks.reach("worker.execute")
    with pytest.raises(FaultInjected, match=r"worker\.execute#1:raise@2"):
        hooks.reach("worker.execute")


def test_a_frame_is_cut_once() -> None:
    hooks = make_fault_hooks("core.step_frame:corrupt@2", "core")
    assert hooks is not None
    sent = [hooks.corrupt("core.step_frame", (b"abcdef",)) for _ in range(3)]
    assert sent == [(b"abcdef",), (b"abc",), (b"abcdef",)]


def test_a_replacement_keeps_only_what_lasts() -> None:
    assert keep_lasting("worker.execute:hang@5*, core.schedule:raise@2") == "worker.execute:hang@5*"
    assert keep_lasting("core.schedule:raise@2") == ""
    assert keep_lasting("") == ""


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        ("worker.nowhere:hang", "core.schedule, core.step_frame"),
        ("worker.execute:explode", "raise, hang, segfault, exit, slow"),
        ("worker.logits:hang", "nan"),
        ("worker.execute:hang@0", "point:action@count"),
        ("worker.execute", "point:action@count"),
        (",", "point:action@count"),
        (7, "a text"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(spec: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match="fault_hooks=") as caught:
        EngineArgs(fault_hooks=spec).create_engine_config()
    assert allowed in str(caught.value)


def test_every_point_of_the_table_can_be_asked_for_with_each_of_its_actions() -> None:
    specs = [f"{point}:{action.value}@7" for point, actions in POINTS.items() for action in actions]
    assert [str(hook) for hook in parse_fault_hooks(",".join(specs))] == specs


def test_a_config_without_hooks_is_its_own_replacement() -> None:
    config = make_config()
    assert config.for_replacement() == config


@pytest.mark.parametrize("action", ["segfault", "exit"])
def test_an_end_ends_the_process(action: str) -> None:
    script = f"""
from quire.ipc.processes.fault_hooks import make_fault_hooks
make_fault_hooks("core.start:{action}", "core").reach("core.start")
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-11 if action == "segfault" else 1, b"")


def test_a_server_that_others_can_reach_refuses_them() -> None:
    argv = ["--host", "0.0.0.0", "--port", "0", "--api-key", "k", "--fault-hooks", "core.schedule:raise"]
    with pytest.raises(
        ConfigError, match=r"fault_hooks='core.schedule:raise': expected none with --host 0\.0"
    ):
        serve.run(argv)


def test_a_server_that_others_can_reach_refuses_a_daemon_that_was_started_with_them() -> None:
    with runtime_folders() as folder:
        run_dir = folder / "quire" / "broken"
        run_dir.mkdir(mode=0o700, parents=True)
        (folder / "quire").chmod(0o700)
        state = DaemonState(
            name="broken", model="m", pid=1, started_at=0.0, fault_hooks="core.schedule:raise"
        )
        write_state(run_dir, state)
        argv = ["--host", "0.0.0.0", "--port", "0", "--api-key", "k", "--attach", "broken"]
        with pytest.raises(
            ConfigError, match=r"fault_hooks='core.schedule:raise': expected none with --host 0\.0"
        ):
            serve.run(argv)


def test_the_option_is_not_shown_to_users() -> None:
    assert "--fault-hooks" not in make_parser().format_help()
