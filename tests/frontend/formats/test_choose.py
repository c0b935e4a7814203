"""Which format is chosen: by parsers' names, by a response_template, by the chat template's text."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from quire.frontend.formats.known_formats import (
    FORMATS,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    choose_output_format,
)
from quire.frontend.formats.output_format import CallFormat, ThinkingFormat
from quire.frontend.formats.response_template import read_response_template
from quire.frontend.text.tokenizer import Tokenizer
from refusals import Refusal, refusals
from transcripts import GOLDEN, QWEN, TRANSCRIPTS, encode, list_deltas, make_tokenizer, read_deltas

# As transformers has them for families whose checkpoints have none.
RESPONSE_TEMPLATES: dict[str, Any] = json.loads((GOLDEN / "response_templates.json").read_bytes())


def make_own(template: str | None = None, response_template: object = None) -> Tokenizer:
    """A tokenizer with Qwen's markers and what its checkpoint says."""
    return Tokenizer(make_tokenizer((), QWEN).backend, {}, template, response_template)


@pytest.mark.parametrize("name", RESPONSE_TEMPLATES)
def test_a_response_template_reads_its_familys_outputs(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    tokenizer = transcript.tokenizer
    own = Tokenizer(tokenizer.backend, tokenizer.special_tokens, None, RESPONSE_TEMPLATES[name])
    output_format = choose_output_format(own)
    assert output_format is not None
    assert output_format.name == "response_template"
    prompt = encode(own, transcript.prompt)
    deltas = list_deltas(own, prompt, encode(own, transcript.text), [7, 30])
    found = read_deltas(output_format, own, prompt, deltas)
    assert found.parts == (transcript.content, transcript.reasoning, list(transcript.calls))


def test_a_response_template_becomes_the_format_of_our_table() -> None:
    coder = read_response_template(RESPONSE_TEMPLATES["qwen3_coder"])
    known = FORMATS["qwen3_coder"].calls
    assert known is not None
    assert coder.calls == replace(
        known, close="</function>\n</tool_call>", name_close=">", parameter_close="\n</parameter>"
    )
    assert coder.thinking == ThinkingFormat("<think>", "</think>")
    assert read_response_template(RESPONSE_TEMPLATES["hermes"]).calls == CallFormat(
        "<tool_call>", "", "</tool_call>", separator="\n", name_key="name"
    )


@refusals("response_template")
def test_what_a_format_cannot_say_is_refused_by_name(refusal: Refusal) -> None:
    refusal.check(read_response_template)
    refusal.check(lambda template: choose_output_format(make_own("<tool_call>", template), "hf"))


def test_a_response_template_that_says_too_much_leaves_the_chat_template(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        found = choose_output_format(make_own("<tool_call>", {"version": 2}))
    assert found is not None
    assert found.name == "hermes"
    assert "response_template.version=2" in caplog.text


SHOWN: list[Any] = json.loads((GOLDEN / "chat_template_formats.json").read_bytes())


@pytest.mark.parametrize(("template", "calls", "thinking"), SHOWN)
def test_a_chat_template_shows_its_format(template: str, calls: str | None, thinking: str | None) -> None:
    found = choose_output_format(make_own(template))
    if calls is None and thinking is None:
        assert found is None
    else:
        assert found is not None
        assert found.calls == (FORMATS[calls].calls if calls else None)
        assert found.thinking == (FORMATS[thinking].thinking if thinking else None)


def test_names_override_what_the_template_shows_each_for_itself() -> None:
    own = make_own("<think></think><tool_call>")
    found = choose_output_format(own, tool_call_parser="mistral")
    assert found is not None
    assert (found.calls, found.thinking) == (FORMATS["mistral"].calls, FORMATS["hermes"].thinking)
    found = choose_output_format(own, reasoning_parser="granite")
    assert found is not None
    assert found.calls == FORMATS["hermes"].calls
    assert found.thinking == ThinkingFormat("Here is my thought process:", "Here is my response:")
    assert choose_output_format(own, "none", "none") is None
    assert choose_output_format(make_own(), "openai", "openai_gptoss") is not None


@refusals("parsers")
def test_names_that_are_unknown_or_do_not_fit_are_refused(refusal: Refusal) -> None:
    refusal.check(lambda names: choose_output_format(make_own(), *names))


def test_a_format_is_described_in_a_line() -> None:
    assert FORMATS["hermes"].describe() == "calls: hermes; thoughts: <think> ... </think>"
    thoughts = choose_output_format(make_own("</think>"))
    assert thoughts is not None
    assert thoughts.describe() == "calls: none; thoughts: <think> ... </think>"
    assert FORMATS["pythonic"].describe() == "calls: pythonic; thoughts: none"


def test_every_name_of_a_parser_makes_a_format() -> None:
    for name in TOOL_CALL_PARSERS:
        assert choose_output_format(make_own(), tool_call_parser=name) is not None
    for name in REASONING_PARSERS:
        assert choose_output_format(make_own(), reasoning_parser=name) is not None
