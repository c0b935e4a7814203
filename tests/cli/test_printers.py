"""Results are printed in the order of the prompts, whatever order they arrive in."""

from __future__ import annotations

import json

import pytest
from quire.frontend.cli.commands.generate import JsonPrinter, TextPrinter
from quire.frontend.outputs import CompletionOutput, RequestOutput


def delta(text: str, is_last: bool = False) -> RequestOutput:
    completion = CompletionOutput(0, text, list(range(len(text))), finish_reason="stop" if is_last else None)
    return RequestOutput("id", None, [1, 2, 3], None, [completion], is_last, num_cached_tokens=2)


def test_a_single_text_streams_after_its_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    printer = TextPrinter(["Once"], has_echo=True, is_streaming=True)
    printer.take(0, delta(" upon"))
    assert capsys.readouterr().out == "Once upon"
    printer.take(0, delta(" a time", is_last=True))
    assert capsys.readouterr().out == " a time\n"


def test_without_streaming_nothing_is_printed_before_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    printer = TextPrinter(["Once"], has_echo=False, is_streaming=False)
    printer.take(0, delta(" upon"))
    assert capsys.readouterr().out == ""
    printer.take(0, delta(".", is_last=True))
    assert capsys.readouterr().out == " upon.\n"


@pytest.mark.parametrize("is_streaming", [True, False])
def test_several_texts_come_in_the_prompts_order(
    is_streaming: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    printer = TextPrinter(["A", "B", "C"], has_echo=True, is_streaming=is_streaming)
    printer.take(2, delta("3", is_last=True))
    printer.take(1, delta("2"))
    printer.take(0, delta("1", is_last=True))
    printer.take(1, delta("2", is_last=True))
    assert capsys.readouterr().out == "A1\n\nB22\n\nC3\n"


def test_json_lines_have_the_counts_and_come_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    printer = JsonPrinter(["A", "B"])
    printer.take(1, delta("xy", is_last=True))
    assert capsys.readouterr().out == ""
    printer.take(0, delta("x"))
    printer.take(0, delta("\n", is_last=True))
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        "index": 0,
        "prompt": "A",
        "text": "x\n",
        "finish_reason": "stop",
        "stop_reason": None,
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 2,
    }
    assert (second["index"], second["text"]) == (1, "xy")
