"""`quire embed` and `quire rerank` over an engine that answers with what it was sent."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from frontend_fakes import FakeClient, write_encoder_folder
from quire.frontend.cli import entry, session
from quire.frontend.cli.parser import ExitCode
from quire.frontend.client.loop_thread import LoopThread
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.text.tokenizer import load_tokenizer

ENCODER = ("embed", "score", "token_embed")
JUDGE = ("classify", "score", "token_classify")


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """The engine of the commands, which embeds; `facts` may be changed."""
    folder = write_encoder_folder(tmp_path)
    client = FakeClient(lambda _: [2], tasks=ENCODER, model=str(folder), num_gpu_blocks=0, embedding_size=3)
    tokenizer = load_tokenizer(folder)
    monkeypatch.setattr(session, "start_engine", lambda *_: LLMEngine(LoopThread(), client, tokenizer))
    return client


def run(*argv: str) -> int:
    return entry.run_command(argv)


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_vectors_are_printed_a_line_each(client: FakeClient, capsys: Any):
    assert run("embed", "the fox", "dog") == ExitCode.OK
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first[1], second[1]) == (4, len(client.engine.added[1].prompt_token_ids) // 4)


def test_json_lines_say_what_they_are_of(client: FakeClient, capsys: Any):
    assert run("embed", "--json", "the fox") == ExitCode.OK
    line = json.loads(capsys.readouterr().out)
    assert (line["index"], line["text"], line["prompt_tokens"], line["embedding"][1]) == (0, "the fox", 4, 4)
    assert client.num_closed == 1


def test_a_terminal_shows_how_near_texts_are(
    client: FakeClient, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run("embed", "the fox", "the fox") == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1.00", "1.00"]
    assert lines[0].endswith("... 3 numbers]  the fox")
    assert len(client.engine.added) == 2


def test_lines_that_are_piped_in_are_texts(client: FakeClient, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    pipe(monkeypatch, "the fox\r\n\n dog\n")
    assert run("embed", "--json") == ExitCode.OK
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == ["the fox", " dog"]
    assert len(client.engine.added) == 2
    pipe(monkeypatch, "\n")
    assert run("embed") == ExitCode.USAGE
    assert "text='': expected a TEXT, or lines piped in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dimensions", "2"], "dimensions=2: expected absent or 3: this model's"),
        (["--dimensions", "0"], "dimensions=0: expected an integer from 1"),
        (["--prompt-name", "query"], "prompt_name='query': expected absent or"),
    ],
)
def test_options_that_the_model_does_not_have_are_refused(
    client: FakeClient, options: list[str], said: str, capsys: Any
):
    assert run("embed", *options, "fox") == ExitCode.USAGE
    assert said in capsys.readouterr().err
    assert client.engine.added == []


def test_options_of_an_embedding_are_those_of_its_params(client: FakeClient):
    assert run("embed", "--truncate-prompt-tokens", "3", "--prompt", "the ", "fox dog") == ExitCode.OK
    assert len(client.engine.added[0].prompt_token_ids) == 4 * 3


@pytest.mark.parametrize("tasks", [ENCODER, JUDGE], ids=["embeddings", "pairs"])
def test_documents_come_in_the_order_of_their_scores(
    client: FakeClient, tasks: tuple[str, ...], tmp_path: Path, capsys: Any
):
    client.facts = msgspec.structs.replace(client.facts, tasks=tasks)
    more = tmp_path / "more.txt"
    more.write_text("the fox\n\nworld\n")
    assert (
        run("rerank", "--json", "--documents", str(more), "the fox", "a", "dog", "--top-n", "3")
        == ExitCode.OK
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3
    assert [line["score"] for line in lines] == sorted((line["score"] for line in lines), reverse=True)
    documents = ["a", "dog", "the fox", "world"]
    assert all(documents[line["index"]] == line["document"] for line in lines)
    if tasks == ENCODER:
        assert lines[0]["document"] == "the fox"


def test_a_ranking_is_scores_and_documents_with_a_tab_between(
    client: FakeClient, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    pipe(monkeypatch, "fox\nthe fox\n")
    assert run("rerank", "the fox") == ExitCode.OK
    assert capsys.readouterr().out.splitlines()[0] == "1.0000\tthe fox"
    assert len(client.engine.added) == 3


def test_an_instruction_for_a_model_that_takes_none_is_refused(
    client: FakeClient, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    pipe(monkeypatch, "")
    assert run("rerank", "fox", "a", "--instruction", "x") == ExitCode.USAGE
    assert "instruction='x': expected absent: this model takes none" in capsys.readouterr().err
    assert client.engine.added == []


def test_a_text_that_the_engine_fails_ends_the_command(
    client: FakeClient, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    added = client.engine.add

    def add(request: Any) -> None:
        added(request)
        client.engine.failing[request.request_id] = "out of luck"

    monkeypatch.setattr(client.engine, "add", add)
    assert run("embed", "fox") == ExitCode.FAILED
    assert capsys.readouterr().err == "quire: error: out of luck\n"
