"""`quire top`: what a frame shows, at any size, and that it leaves when told to."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from daemons import Daemon, fake_modules, runtime_folders
from fakes import make_config
from quire.frontend.cli.commands import top
from quire.frontend.cli.entry import run_command
from quire.ipc.engine_views import ClientView, EngineLoad, EngineSnapshot, RequestView, SchedulerStats
from rich.console import Console

DEADLINE_S = 20.0


def make_request(name: str, **changes: Any) -> RequestView:
    values = {
        "request_id": name,
        "client": "llm-7",
        "state": "running",
        "waits_for": "",
        "num_prompt_tokens": 20,
        "num_computed_tokens": 25,
        "num_output_tokens": 5,
        "max_total_tokens": 40,
        "num_blocks": 2,
        "num_preemptions": 0,
        "age_s": 65.0,
    }
    return RequestView(**{**values, **changes})


def make_client(name: str) -> ClientView:
    return ClientView(
        name=name,
        kind="llm",
        pid=7,
        weight=1.0,
        num_running=1,
        num_waiting=0,
        tokens_served_total=12345,
        num_unsent=0,
        connected_s=4000.0,
    )


def make_snapshot(requests: list[RequestView] | None = None, **changes: Any) -> EngineSnapshot:
    stats = SchedulerStats(
        num_running=1,
        num_waiting=1234,
        num_clients=1,
        kv_blocks_used=30,
        kv_blocks_total=120,
        prefix_cache_queries_total=100,
        prefix_cache_hits_total=25,
        num_preemptions_total=3,
        num_steps_total=10,
        prompt_tokens_total=100,
        generation_tokens_total=200,
        schedule_s_total=0.1,
        update_s_total=0.1,
        step_wait_s_total=0.1,
    )
    values = {
        "at": 1000.0,
        "epoch": "e",
        "model": "pocket",
        "max_num_seqs": 256,
        "uptime_s": 7500.0,
        "stats": stats,
        "prompt_tokens_per_s": 310.0,
        "generation_tokens_per_s": 1501.0,
        "steps_per_s": 20.0,
        "schedule_ms": 0.1,
        "update_ms": 0.2,
        "step_wait_ms": 5.0,
        "requests": [make_request("one")] if requests is None else requests,
        "num_hidden_requests": 0,
        "block_map": bytes((255, 255)) * 30 + bytes((0, 255)) * 30 + bytes((0, 0)) * 60,
        "blocks_per_cell": 1,
        "clients": [make_client("llm-7")],
    }
    return EngineSnapshot(**{**values, **changes})


def draw(snapshot: EngineSnapshot, width: int = 80, height: int = 24) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(top.render(snapshot, [0.0, 750.0, 1501.0], width, height))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_each_of_several_engines_has_a_line_as_long_as_there_is_room():
    engines = [
        EngineLoad(
            index=index,
            num_running=3,
            num_waiting=4,
            kv_blocks_used=index,
            kv_blocks_total=4,
            prompt_tokens_per_s=5.0,
            generation_tokens_per_s=1234.0,
        )
        for index in range(3)
    ]
    lines = draw(make_snapshot(engines=engines)).splitlines()
    shown = [line for line in lines if line.startswith("engine")]
    assert len(shown) == 3
    expected = "engine 1   1,234 tok/s   5 prompt tok/s   3 running   4 waiting   KV 25 %"
    assert shown[1].rstrip() == expected
    for height in range(1, 30):
        assert len(draw(make_snapshot(engines=engines), height=height).splitlines()) <= max(height, 10)


def test_a_frame_shows_rates_load_blocks_clients_and_requests():
    text = draw(make_snapshot())
    for part in ("pocket", "1,501", "310", "1 of 256 running", "1,234 waiting", "25 % prefix hits", "30/120"):
        assert part in text
    for part in (
        "update 0.20 ms",
        "wait 5.00 ms",
        "20/s",
        "llm-7",
        "12,345",
        "one",
        "20+5",
        "1 min",
        "2 h 5 min",
    ):
        assert part in text


def test_the_block_map_shows_used_cached_and_free_runs():
    (line,) = [line for line in draw(make_snapshot()).splitlines() if line.startswith("KV")]
    cells = line.removeprefix("KV  25 % ").removesuffix(" 30/120").strip()
    assert len(cells) > 40
    for sign, share in (("█", 0.25), ("░", 0.25), ("·", 0.5)):
        assert cells.count(sign) == pytest.approx(share * len(cells), abs=1)


def test_a_block_in_use_is_never_drawn_as_free():
    block_map = bytes((0, 0)) * 511 + bytes((1, 0))
    (line,) = [
        line for line in draw(make_snapshot(block_map=block_map)).splitlines() if line.startswith("KV")
    ]
    assert "▁" in line


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 12), (200, 50), (20, 5)])
@pytest.mark.parametrize("num_requests", [0, 1, 300])
def test_a_frame_fits_the_terminal(width: int, height: int, num_requests: int):
    requests = [make_request(f"request-{number}-" + "x" * 40) for number in range(num_requests // 2)]
    requests += [
        make_request(f"waiting-{number}", state="waiting", waits_for="KV blocks: 31 needed, 2 free " * 4)
        for number in range(num_requests - len(requests))
    ]
    clients = [make_client(f"client-{number}") for number in range(num_requests // 10)]
    text = draw(make_snapshot(requests, clients=clients, num_hidden_requests=7), width, height)
    assert max(map(len, text.splitlines())) <= width
    if height >= 12:
        assert len(text.splitlines()) < height


def test_the_waiting_keep_a_place_and_the_rest_is_counted():
    requests = [make_request(f"r{number}") for number in range(100)]
    requests += [make_request(f"w{number}", state="waiting", waits_for="its turn") for number in range(50)]
    text = draw(make_snapshot(requests, num_hidden_requests=1000))
    shown = sum(line.startswith(("r", "w")) and "20+5" in line for line in text.splitlines())
    assert "r0" in text
    assert "w0" in text
    assert "its turn" in text
    assert f"and {1150 - shown:,} more" in text


def test_a_prompt_being_computed_shows_how_far_it_is():
    view = make_request("one", num_output_tokens=0, num_prompt_tokens=100, num_computed_tokens=50)
    assert "prefill" in draw(make_snapshot([view]))


@dataclass
class FakeEngine:
    """What `top` asks of an LLMEngine."""

    taken: EngineSnapshot
    num_closed: int = 0

    def snapshot(self) -> EngineSnapshot:
        return self.taken

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.num_closed += 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine(make_snapshot())
    monkeypatch.setattr(top, "attach_engine", lambda _name: fake)
    return fake


@pytest.mark.parametrize("argv", [["top"], ["top", "--once"]])
def test_one_frame_is_printed_where_nobody_can_press_a_key(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], argv: list[str]
):
    assert run_command(argv) == 0
    text = capsys.readouterr().out
    assert "1,501" in text
    assert "\x1b" not in text
    assert engine.num_closed == 1


def test_json_prints_the_snapshot(engine: FakeEngine, capsys: pytest.CaptureFixture[str]):
    assert run_command(["top", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=EngineSnapshot) == engine.taken


def test_a_name_that_no_daemon_has_is_an_error_in_one_line(capsys: pytest.CaptureFixture[str]):
    assert run_command(["top", "--attach", "nobody-has-this-name"]) != 0
    error = capsys.readouterr().err
    assert "nobody-has-this-name" in error
    assert "Traceback" not in error


SCREEN = """
import sys
sys.path[:0] = {folders!r}
import test_top
from quire.frontend.cli.commands import top
from quire.frontend.cli.entry import run_command
top.attach_engine = lambda name: test_top.FakeEngine(test_top.make_snapshot())
sys.exit(run_command(["top"]))
"""


@pytest.mark.parametrize("way", ["q", "ctrl-c"])
def test_the_screen_moves_until_it_is_told_to_leave(way: str):
    main, terminal = pty.openpty()
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    script = SCREEN.format(folders=folders)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    try:
        read_until(main, b"1,501", times=2)
        if way == "q":
            os.write(main, b"q")
        else:
            child.send_signal(signal.SIGINT)
        assert child.wait(DEADLINE_S) == 0
    finally:
        child.kill()
        child.wait()
        os.close(main)


def read_until(descriptor: int, wanted: bytes, times: int) -> None:
    """Read until `wanted` has come so often; fails at the deadline."""
    deadline, seen = time.monotonic() + DEADLINE_S, b""
    while seen.count(wanted) < times:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{wanted!r} came {seen.count(wanted)} times: {seen[-300:]!r}"
        seen += os.read(descriptor, 65536)


def test_a_daemons_engine_is_shown_with_who_looks_at_it(capsys: pytest.CaptureFixture[str]):
    with runtime_folders(), fake_modules(), Daemon("look", make_config()):
        assert run_command(["top", "--attach", "look", "--json"]) == 0
        snapshot = msgspec.json.decode(capsys.readouterr().out, type=EngineSnapshot)
        assert run_command(["top", *["--attach", "look"] * 2, "--json"]) == 0
        both = msgspec.json.decode(capsys.readouterr().out, type=list[EngineSnapshot])
        assert [one.model for one in both] == ["fake", "fake"]
        assert run_command(["top", *["--attach", "look"] * 2]) == 0
        assert capsys.readouterr().out.count("Quire fake") == 2
        assert run_command(["top", "--attach", "look"]) == 0
    (own,) = [client for client in snapshot.clients if client.kind == "top"]
    assert own.pid == os.getpid()
    assert own.name in capsys.readouterr().out
    assert snapshot.stats.num_clients == len(snapshot.clients)
    assert (snapshot.model, snapshot.requests) == ("fake", [])
    assert len(snapshot.epoch) > 0
    assert snapshot.uptime_s > 0
