"""`quire run-batch`: one result for every line, whatever the line, and an interrupted run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from daemons import Daemon, runtime_folders
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.cli.batch import batch_run
from quire.frontend.cli.batch.batch_files import InputLine, ResultFile, read_lines, read_progress
from quire.frontend.cli.batch.batch_run import BatchRun, LineError, parse_line
from quire.frontend.cli.commands import run_batch
from quire.frontend.cli.entry import run_command
from quire.frontend.models.model_folder import pocket_folder
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.errors import EngineDeadError
from quire.ipc.params.sampling_params import SamplingParams
from refusals import Refusal, refusals, run_refused
from tool_template import TEMPLATE


def make_line(custom_id: str, url: str, body: dict[str, Any], method: str = "POST") -> str:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def ask(text: str) -> dict[str, Any]:
    return {
        "model": "pocket",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 20,
        "temperature": 0,
    }


GOOD = [make_line(f"sum-{n}", "/v1/chat/completions", ask(f"What is {n} plus 30?")) for n in range(20)]
OTHERS = [
    make_line("text", "/v1/completions", {"model": "pocket", "prompt": "Once upon a time", "max_tokens": 3}),
    make_line("response", "/v1/responses", {"model": "pocket", "input": "What is 1 plus 2?"}),
    make_line("negative", "/v1/completions", {"model": "pocket", "prompt": "x", "max_tokens": -2}),
    make_line("other", "/v1/chat/completions", ask("x") | {"model": "gpt-9"}),
    make_line("stream", "/v1/chat/completions", ask("x") | {"stream": True}),
    make_line("embed", "/v1/embeddings", {"input": ["a fox", "the sea"]}),
    make_line("score", "/v1/score", {"text_1": "a fox", "text_2": ["a fox", "the sea"]}),
    make_line("rank", "/v1/rerank", {"query": "a fox", "documents": ["the sea", "a fox"]}),
    make_line("image", "/v1/images/generations", {"prompt": "x"}),
    make_line("get", "/v1/completions", {}, method="GET"),
    '{"custom_id": "half", "method": "POST"',
    '{"custom_id": "no-body", "method": "POST", "url": "/v1/completions"}',
    '{"custom_id": 7}',
    "\x00",
    "",
    make_line("pool", "/pooling", {"input": "a fox"}),
    make_line("class", "/classify", {"input": "a fox"}),
]


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answer_of(result: dict[str, Any]) -> str:
    return result["response"]["body"]["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def attach() -> Iterator[tuple[str, str]]:
    """The option that names a running engine, of the pocket model, which embeds too."""
    config = EngineArgs(runner="generate", convert="embed").create_engine_config()
    with runtime_folders(), Daemon("batch", config):
        yield "--attach", "batch"


@pytest.fixture(scope="module")
def finished(attach: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with in.jsonl and, of one run over it, out.jsonl."""
    folder = tmp_path_factory.mktemp("batch")
    (folder / "in.jsonl").write_text("\n".join([*GOOD, *OTHERS]))
    files = [str(folder / "in.jsonl"), str(folder / "out.jsonl")]
    assert run_command(["run-batch", *files, *attach]) == 1
    return folder


def test_every_line_has_one_result_with_its_answer_or_its_error(finished: Path) -> None:
    results = read_results(finished / "out.jsonl")
    assert sorted(int(result["id"].split("_")[2]) for result in results) == [*range(1, 35), 36, 37]
    assert all((result["response"] is None) != (result["error"] is None) for result in results)
    by_id = {result["custom_id"]: result for result in results if result["custom_id"]}
    assert answer_of(by_id["sum-12"]) == "12 plus 30 is 42."
    assert by_id["sum-12"]["response"]["request_id"].startswith("chatcmpl-")
    statuses = {
        name: by_id[name]["response"]["status_code"] for name in ("text", "response", "negative", "other")
    }
    assert statuses == {"text": 200, "response": 200, "negative": 400, "other": 404}
    bodies = {name: by_id[name]["response"]["body"] for name in ("embed", "score", "rank")}
    assert [len(one["embedding"]) for one in bodies["embed"]["data"]] == [192, 192]
    assert bodies["score"]["data"][0]["score"] > bodies["score"]["data"][1]["score"]
    assert [one["index"] for one in bodies["rank"]["results"]] == [1, 0]
    assert len(by_id["pool"]["response"]["body"]["data"][0]["data"]) == 192
    assert by_id["class"]["response"]["body"]["error"]["code"] == "unsupported_task"
    assert by_id["negative"]["response"]["body"]["error"]["param"] == "max_tokens"
    codes = {name: by_id[name]["error"]["code"] for name in ("stream", "image", "get", "no-body")}
    assert codes == {
        "stream": "invalid_request",
        "image": "invalid_url",
        "get": "invalid_method",
        "no-body": "invalid_request",
    }
    nameless = {result["error"]["message"].split(":")[0] for result in results if result["custom_id"] is None}
    assert nameless == {"line 31", "line 33", "line 34"}


@pytest.mark.slow  # what a line offers goes the way of a request over HTTP
def test_lines_may_offer_tools(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(pocket_folder(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    function = {"name": "weather", "parameters": schema}
    offer = {"model": "m", "temperature": 0, "tool_choice": "required", "parallel_tool_calls": False}
    chat = offer | {"messages": [{"role": "user", "content": "Rome?"}], "max_tokens": 400}
    response = offer | {"input": "Rome?", "max_output_tokens": 400}
    tool = {"type": "function", "function": function}
    lines = [
        make_line("chat", "/v1/chat/completions", chat | {"tools": [tool]}),
        make_line("response", "/v1/responses", response | {"tools": [{"type": "function"} | function]}),
        make_line("twice", "/v1/chat/completions", chat | {"tools": [tool, tool]}),
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    command = ["run-batch", str(source), str(output), "--model", str(folder), "--served-model-name", "m"]
    assert run_command(command) == 1  # a line was refused
    answers = {result["custom_id"]: result["response"]["body"] for result in read_results(output)}
    (choice,) = answers["chat"]["choices"]
    (said,) = choice["message"]["tool_calls"]
    (item,) = [one for one in answers["response"]["output"] if one["type"] == "function_call"]
    assert choice["finish_reason"] == "tool_calls"
    for call in (said["function"], item):
        assert call["name"] == "weather"
        assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    assert answers["twice"]["error"]["param"] == "tools[1].function.name"


def test_a_finished_batch_is_left_as_it_is(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished / "out.jsonl").read_bytes()
    command = ["run-batch", "-i", str(finished / "in.jsonl"), "-o", str(finished / "out.jsonl")]
    # An engine could not even start with this model.
    assert run_command([*command, "--attach", "no-such-daemon"]) == 0
    assert "36 lines, every one has a result" in capsys.readouterr().out
    assert (finished / "out.jsonl").read_bytes() == before


def after_results(monkeypatch: pytest.MonkeyPatch, count: int, act: Callable[[], None]) -> None:
    """Call `act` once, when a run has written its result number `count`."""
    numbers = iter(range(1, 10_000))

    def take(_self: object, _result: object) -> None:
        if next(numbers) == count:
            act()

    monkeypatch.setattr(run_batch._Bar, "take", take)


def test_an_interrupted_run_goes_on_and_ends_with_the_same_answers(
    finished: Path,
    attach: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out.jsonl"
    command = ["run-batch", str(finished / "in.jsonl"), str(output), "--max-concurrency", "2", *attach]
    after_results(monkeypatch, 5, lambda: signal.raise_signal(signal.SIGINT))
    assert run_command(command) == 130
    assert "the same command goes on" in capsys.readouterr().out
    before = output.read_bytes()
    assert 5 <= len(before.splitlines()) < 36
    output.write_bytes(before + b'{"id":"batch_req_31_')
    assert run_command(command) == 1  # lines were refused
    assert output.read_bytes().startswith(before)
    results, expected = read_results(output), read_results(finished / "out.jsonl")
    assert Counter(result["id"] for result in results) == Counter(result["id"] for result in expected)
    sums = {r["custom_id"]: answer_of(r) for r in results if str(r["custom_id"]).startswith("sum-")}
    assert sums == {r["custom_id"]: answer_of(r) for r in expected if r["custom_id"] in sums}
    assert len(sums) == 20


@pytest.mark.slow
def test_a_killed_core_costs_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(GOOD))
    killed: list[int] = []

    def kill_core() -> None:
        for child in psutil.Process().children():
            # Another test's child may be a zombie still, which has no command line.
            if child.status() != psutil.STATUS_ZOMBIE and "quire.core" in child.cmdline():
                os.kill(child.pid, signal.SIGKILL)
                killed.append(child.pid)

    after_results(monkeypatch, 3, kill_core)
    assert run_command(["run-batch", str(source), str(output), "--max-concurrency", "4"]) == 0
    assert len(killed) == 1
    results = {result["custom_id"]: result for result in read_results(output)}
    assert len(results) == 20
    assert answer_of(results["sum-12"]) == "12 plus 30 is 42."


class FakeLLM:
    """As much of AsyncLLM as a run needs whose app is replaced."""

    def __init__(self) -> None:
        self.facts = SimpleNamespace(max_num_seqs=2, served_model_name="fake", max_model_len=64)
        self.num_engines = 1
        self.dead_error: Exception | None = None
        self.is_shut_down = False

    async def start(self, _on_phase: object = None) -> None:
        pass

    async def abort(self, _request_id: object) -> None:
        pass

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    def shutdown(self) -> None:
        self.is_shut_down = True


def run_with_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call_app: Any, llm: FakeLLM, num_lines: int
) -> tuple[BatchRun, bool]:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(GOOD[:num_lines]))
    monkeypatch.setattr(batch_run, "call_app", call_app)
    monkeypatch.setattr(batch_run, "create_app", lambda serving: serving)
    progress = read_progress(str(source))
    results = ResultFile.open(str(tmp_path / "out.jsonl"), overwrite=False)

    async def run() -> tuple[BatchRun, bool]:
        batch = BatchRun(cast(AsyncLLM, llm), read_lines(str(source)), progress, results, None)
        return batch, await batch.run()

    try:
        return asyncio.run(run())
    finally:
        results.close()


def test_no_more_lines_are_under_way_than_asked_for_and_failures_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[int] = [0]
    most: list[int] = [0]

    async def call_app(_app: object, _path: str, body: bytes) -> tuple[int, bytes]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0)
        running[0] -= 1
        return (500, b"{}") if b" 3 plus" in body else (200, b'{"id": "x"}')

    llm = FakeLLM()
    batch, is_whole = run_with_answers(tmp_path, monkeypatch, call_app, llm, 20)
    assert is_whole
    assert most == [4], "twice the engine's max_num_seqs"
    assert (batch.counts.num_answered, batch.counts.num_failed) == (19, 1)
    assert llm.is_shut_down


def test_a_line_for_which_there_is_no_room_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([(429, b"{}"), (429, b"{}"), (200, b"{}")])

    async def call_app(*_arguments: object) -> tuple[int, bytes]:
        return next(answers)

    monkeypatch.setattr(batch_run, "_RETRY_S", 0.0)
    batch, _ = run_with_answers(tmp_path, monkeypatch, call_app, FakeLLM(), 1)
    assert (batch.counts.num_answered, batch.counts.num_results) == (1, 1)


def test_an_answer_of_a_dead_engine_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM()

    async def call_app(*_arguments: object) -> tuple[int, bytes]:
        llm.dead_error = EngineDeadError("the core was killed")
        return 503, b"{}"

    with pytest.raises(EngineDeadError, match="the core was killed"):
        run_with_answers(tmp_path, monkeypatch, call_app, llm, 3)
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_signal_ends_a_run_whose_lines_are_all_refused(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("{}\n" * 1000)
    progress = read_progress(str(source))

    async def run(results: ResultFile) -> BatchRun:
        lines = read_lines(str(source))
        batch = BatchRun(
            cast(AsyncLLM, FakeLLM()),
            lines,
            progress,
            results,
            1,
            lambda _: signal.raise_signal(signal.SIGINT),
        )
        assert not await batch.run()
        return batch

    with contextlib.closing(ResultFile.open(str(output), overwrite=False)) as results:
        assert 0 < asyncio.run(run(results)).counts.num_refused < 1000


@pytest.mark.parametrize("name", ["stream", "background"])
def test_a_line_whose_answer_would_come_later_is_refused(name: str) -> None:
    text = make_line("a", "/v1/responses", {"input": "x", name: True}).encode()
    with pytest.raises(LineError, match=f"line 4: {name}=True: expected false or absent in a batch"):
        parse_line(InputLine(4, text, is_cut=False, digest=1))


def test_a_cut_line_and_a_deep_one_are_errors() -> None:
    with pytest.raises(LineError, match="line 4: expected at most") as caught:
        parse_line(InputLine(4, b"{", is_cut=True, digest=1))
    assert caught.value.code == "line_too_long"
    deep = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": ' + b"[" * 100_000
    with pytest.raises(LineError):
        parse_line(InputLine(4, deep, is_cut=False, digest=1))


@pytest.mark.parametrize("field", ["url", "method"])
@pytest.mark.parametrize("character", ["n", "\0", "\U0001f600"])
def test_a_line_is_refused_without_repeating_it_at_length(field: str, character: str) -> None:
    asked = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}
    text = json.dumps(asked | {field: character * 10_000}).encode()
    with pytest.raises(LineError, match=f"^line 4: {field}='.*: expected (POST|one of /v1/)") as caught:
        parse_line(InputLine(4, text, is_cut=False, digest=1))
    assert len(str(caught.value)) < 300


@refusals("run_batch")
def test_bad_options_are_refused_and_nothing_is_run(
    refusal: Refusal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "IN").write_text(GOOD[0])

    def run(arguments: list[str]) -> None:
        words = [str(tmp_path / word) if word in ("IN", "OUT") else word for word in arguments]
        run_refused(["run-batch", *words], capsys)

    refusal.check(run, tmp_path)
    assert (tmp_path / "IN").read_text() == GOOD[0]
