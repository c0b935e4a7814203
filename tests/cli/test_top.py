"""`quire top`: what a frame shows, at any size."""

from __future__ import annotations

import io
import os
from typing import Any

import msgspec
import pytest
from daemons import Daemon, fake_modules, runtime_folders
from fakes import make_config
from quire.frontend.cli import engine_choice
from quire.frontend.cli.commands import top
from quire.frontend.cli.entry import run_command
from quire.frontend.cli.top.frame import render
from quire.frontend.cli.top.view import EngineWatcher, FrameData, ProcessUsage, View, find_quantiles
from quire.ipc.protocol.engine_views import EngineLoad, EngineSnapshot, Histogram
from rich.console import Console
from top_fakes import FakeEngine, make_client, make_facts, make_request, make_snapshot


def make_look(snapshot: EngineSnapshot, usage: ProcessUsage | None = None, **facts: Any) -> FrameData:
    latencies = {"TTFT": (0.012, 0.04, 0.0801), "ITL": None}
    return FrameData(snapshot, make_facts(**facts), usage, latencies)


def draw(snapshot: EngineSnapshot, width: int = 80, height: int = 24, view: View | None = None) -> str:
    return draw_look(make_look(snapshot), width, height, view)


def draw_look(look: FrameData, width: int = 80, height: int = 24, view: View | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(render(look, width, height, view))
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
    of_two_daemons = draw(make_snapshot(engines=engines[:2]), height=12)
    assert "engine 0 " in of_two_daemons
    assert "engine 1 " in of_two_daemons
    assert "and 2 more engines" in draw(make_snapshot(engines=engines), height=12)


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


def test_names_are_shown_as_they_are_whatever_they_would_mean_to_rich():
    view = View()
    view.press("down", [make_request("[/b]")])
    clients = [make_client("[red]x[/foo]")]
    text = draw(
        make_snapshot([make_request("[/b]"), make_request("[bold]a[/bold]")], clients=clients), view=view
    )
    assert "[red]x[/foo]" in text
    assert "▶ [/b]" in text
    assert "[bold]a[/bold]" in text


def test_the_block_map_shows_used_cached_and_free_runs():
    (line,) = [line for line in draw(make_snapshot()).splitlines() if line.startswith("KV")]
    cells = line.removeprefix("KV  25 % ").removesuffix(" 30/120").strip()
    assert len(cells) > 40
    for sign, share in (("█", 0.25), ("░", 0.25), ("·", 0.5)):
        assert cells.count(sign) == pytest.approx(share * len(cells), abs=1)


def test_state_slots_stand_beside_the_blocks_of_a_model_that_has_them():
    stats = msgspec.structs.replace(
        make_snapshot().stats, state_slots_used=3, state_slots_cached=1200, state_slots_total=2048
    )
    assert "30/120   states 3+1,200/2,048" in draw(make_snapshot(stats=stats))
    assert "states" not in draw(make_snapshot())


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


def test_what_a_row_took_for_itself_is_shown_where_it_is_much():
    views = [make_request("one", work_s=0.05), make_request("two", work_s=12.34)]
    text = draw(make_snapshot(views), width=120)
    assert text.count("own work") == 1
    assert "own work 12.3 s" in text


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine(make_snapshot())
    monkeypatch.setattr(top, "attach_engine", lambda _name: fake)
    monkeypatch.setattr(engine_choice, "list_daemons", lambda: ["only"])
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


def test_a_frame_shows_latencies_device_weights_ranks_and_processes():
    usage = ProcessUsage(cpu_percent=187.0, rss_bytes=812_000_000, num_processes=3)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    text = draw_look(make_look(make_snapshot(), usage, weights="int4", **sizes), width=120)
    for part in ("TTFT 12/40/80.1 ms", "ITL -", "p50/p95/p99, all since the start", "cpu, int4 weights"):
        assert part in text
    for part in ("2 ranks, 3 stages", "502 MB on the device", "187 % CPU", "812 MB in 3 processes"):
        assert part in text
    assert "cpu, float32   " in draw(make_snapshot())


def test_a_model_that_only_makes_vectors_shows_whole_requests():
    engine: Any = FakeEngine(make_snapshot())
    assert list(EngineWatcher(engine, is_local=False).look().latencies) == ["TTFT", "ITL"]
    engine.facts = make_facts(tasks=("embed", "score"))
    assert list(EngineWatcher(engine, is_local=False).look().latencies) == ["E2E"]


def test_quantiles_are_of_what_came_in_between():
    bounds = (0.1, 0.2, 0.4)
    before = Histogram(bounds=bounds, counts=[100, 0, 0, 0], sum=0.0)
    now = Histogram(bounds=bounds, counts=[110, 10, 0, 5], sum=0.0)
    assert find_quantiles(now, before) == pytest.approx((0.125, 0.4, 0.4))
    assert find_quantiles(before, None) == pytest.approx((0.05, 0.095, 0.099))
    assert find_quantiles(now, now) is None
    assert find_quantiles(before, now) is None  # another core has begun to count


def test_without_a_name_all_daemons_are_looked_at(capsys: pytest.CaptureFixture[str]):
    with runtime_folders(), fake_modules():
        assert run_command(["top", "--once"]) == 1
        assert "no daemon runs; `quire daemon start` starts one" in capsys.readouterr().err
        with Daemon("one", make_config()):
            assert run_command(["top", "--once", "--sort", "age"]) == 0
            out = capsys.readouterr().out
            assert "Quire fake" in out
            assert "% CPU" in out
            assert "sorted by age" in out
            with Daemon("two", make_config()):
                assert run_command(["top"]) == 0
                assert capsys.readouterr().out.count("Quire fake") == 2
                assert run_command(["top", "two", "--json"]) == 0
                assert run_command(["ps", "two", "--json"]) == 0
                capsys.readouterr()
                assert run_command(["ps", "two"]) == 0
                assert "one" not in capsys.readouterr().out
                assert run_command(["ps", "tow"]) == 2
                assert "those that run: one, two" in capsys.readouterr().err


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
