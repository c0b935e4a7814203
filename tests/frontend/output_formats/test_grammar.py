"""What follows a grammar of a turn is read back by the format's parser: thoughts, answers and calls."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import pytest
from grammar_judge import find_faults
from llguidance import LLMatcher, LLTokenizer
from quire.frontend.output_formats.events import AssistantMessage
from quire.frontend.output_formats.formats import FORMATS
from quire.frontend.output_formats.grammar import make_output_grammar
from quire.frontend.output_formats.output_format import OutputFormat
from quire.frontend.output_formats.output_parser import OutputParser
from quire.frontend.output_formats.rules import OutputRules, make_output_rules
from quire.frontend.output_formats.tools import Tool, ToolChoice
from quire.frontend.text.tokenizer import Tokenizer

from output_formats.transcripts import END, USER, make_tokenizer

# What of a marker is a token in the models' own tokenizers.
TOKEN = re.compile(r"<(?!/?parameter|/?function)[^<>\s=]+>|\[[A-Z_/]+\]")
OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": False}
WEATHER = OBJECT | {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "units": {"enum": ["metric", "imperial"]},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "where": {"anyOf": [{"type": "null"}, OBJECT | {"properties": {"x": {"type": "number"}}}]},
    },
    "required": ["city", "units"],
}
RUN = OBJECT | {"properties": {"in": {"type": "string"}}, "required": ["in"]}
TOOLS = [
    Tool("run", parameters=RUN),
    Tool("run_in", parameters=WEATHER),
    Tool("now", parameters={"type": "object", "properties": {}}),
    Tool("ping"),
]
STRICT = [Tool(tool.name, None, tool.parameters, True) for tool in TOOLS]


def find_tokens(name: str) -> tuple[str, ...]:
    found = (token for marker in FORMATS[name].list_markers() for token in TOKEN.findall(marker))
    return tuple(dict.fromkeys(found))


@cache
def bind(name: str, has_tokens: bool = True) -> tuple[Tokenizer, OutputFormat, LLTokenizer]:
    """A tokenizer with a format's markers as tokens, or without; the format; llguidance's tokenizer."""
    tokenizer = make_tokenizer((), find_tokens(name) if has_tokens else ())
    ends = [tokenizer.eos_token_id]
    inner = LLTokenizer(tokenizer.backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=ends)
    return tokenizer, FORMATS[name].bind(tokenizer), inner


def make_rules(name: str, tools: list[Tool], has_tokens: bool = True, **fields: Any) -> OutputRules:
    tokenizer, output_format, _ = bind(name, has_tokens)
    choice = fields.pop("choice", ToolChoice())
    return make_output_rules(output_format, [tokenizer.eos_token_id], tools, choice, **fields)


def write(grammar: str, inner: LLTokenizer, favoured: list[list[int]], seed: object) -> list[int] | None:
    """Random token ids that follow a grammar, often those of `favoured`; None if they come to no end."""
    chance, matcher = random.Random(str(seed)), LLMatcher(inner, grammar, log_level=0)
    token_ids: list[int] = []
    while len(token_ids) < 2000:
        assert not matcher.is_error(), matcher.get_error()
        tokens = chance.choice(favoured if token_ids else [favoured[0], favoured[1]])
        if matcher.validate_tokens(tokens) < len(tokens) or chance.random() < 0.5:
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            tokens = [chance.choice([token for token in range(inner.vocab_size) if mask >> token & 1])]
        token_ids += tokens
        if token_ids[-1] == inner.eos_token:
            return token_ids
        assert matcher.consume_tokens(tokens), matcher.get_error()
    return None


def read(
    rules: OutputRules, tokenizer: Tokenizer, tools: list[Tool], token_ids: list[int]
) -> AssistantMessage:
    prompt = tokenizer.encode(USER + ("<think>" if rules.is_reasoning_open else ""), add_special_tokens=False)
    parser = OutputParser(rules.format, tokenizer, prompt, tools)
    message = AssistantMessage()
    text = tokenizer.decode(token_ids[:-1], skip_special_tokens=False)
    for event in parser.take(text, token_ids, is_finished=True):
        message.add(event)
    assert parser.num_errors == 0, text
    return message


def generate(
    name: str, rules: OutputRules, tools: list[Tool], has_tokens: bool, seed: object
) -> AssistantMessage | None:
    tokenizer, _, inner = bind(name, has_tokens)
    made = make_output_grammar(rules)
    assert made is not None
    calls = rules.format.calls
    assert calls is not None
    head = f'{{"name": "run", "{calls.arguments_key}": ' if calls.name_key else "run("
    texts = [
        calls.section_open + head,
        END,
        *'"}]),',
        *(marker.strip() for marker in rules.format.list_markers() if marker.strip()),
    ]
    favoured = [tokenizer.encode(text, add_special_tokens=False) for text in filter(None, texts)]
    token_ids = write(made.text, inner, favoured, seed)
    return None if token_ids is None else read(rules, tokenizer, tools, token_ids)


CHOICES = {
    "auto": ToolChoice(),
    "required": ToolChoice("required"),
    "named": ToolChoice("required", frozenset({"run_in"})),
    "allowed": ToolChoice("auto", frozenset({"run", "now"})),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "harmony"])
def test_what_is_generated_is_read_back(name: str, choice: str) -> None:
    chosen = CHOICES[choice]
    rules = make_rules(name, TOOLS, choice=chosen)
    num_ended = num_calls = 0
    for seed in range(40):
        message = generate(name, rules, TOOLS, True, seed)
        if message is None:
            continue
        num_ended += 1
        num_calls += len(message.tool_calls)
        check(message, TOOLS, chosen)
    assert num_ended > 3
    assert num_calls > 3


def check(message: AssistantMessage, tools: list[Tool], choice: ToolChoice) -> None:
    offered = {tool.name: tool for tool in tools if choice.names is None or tool.name in choice.names}
    for call in message.tool_calls:
        tool, arguments = offered[call.name], json.loads(call.arguments)
        assert isinstance(arguments, dict)
        if tool.parameters is None or tool.parameters.get("properties") == {}:
            assert arguments == {}
        elif tool.strict or choice.mode == "required":
            assert find_faults(tool.parameters, arguments) == [], call.arguments
    if choice.mode == "required":
        assert message.content == ""
        assert message.tool_calls
    if choice.mode == "required" and len(offered) == 1:
        assert len(message.tool_calls) == 1
