"""Outputs as models write them, tokenizers that hold their markers, and a parser driven by both.

tests/golden/output_formats.json has an output or more of every format, as the models' own templates and
documents show them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgspec
from quire.frontend.events import AssistantMessage, OutputEvent
from quire.frontend.formats.known_formats import FORMATS
from quire.frontend.formats.output_format import OutputFormat
from quire.frontend.formats.reading.output_parser import OutputParser
from quire.frontend.text.detokenizer import Detokenizer
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.tools import Tool
from quire.ipc.params.sampling_params import SamplingParams
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

END = "<|end_of_turn|>"
USER = "<|user|>"
QWEN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
ROME = ("get_weather", '{"city": "Rome", "days": 2}')
FILES = ("list_files", "{}")
GOLDEN = Path(__file__).parents[2] / "golden"


@cache
def make_tokenizer(special: tuple[str, ...], added: tuple[str, ...] = ()) -> Tokenizer:
    """One token a byte, and the added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({character: place for place, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END, USER, *special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return Tokenizer(backend, {"eos_token": END}, None)


TOOLS = [
    Tool(
        "get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "where": {"type": "object"},
                "exact": {"type": "boolean"},
                "factor": {"type": "number"},
            },
        },
    ),
    Tool("list_files", parameters={"type": "object", "properties": {}}),
    Tool("write", parameters={"type": "object", "properties": {"text": {"type": "string"}}}),
]


@dataclass
class Transcript:
    """An output and the message that it is. parts: its text; those in `plain` are no added tokens."""

    format: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, str]] = ()
    prompt: str = USER
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    num_errors: int = 0
    num_reasoning_tokens: int | None = None
    tools: Sequence[Tool] = field(default_factory=lambda: TOOLS)

    @property
    def tokenizer(self) -> Tokenizer:
        return make_tokenizer(self.special, self.added)

    @property
    def output_format(self) -> OutputFormat:
        return _bind(self.format, self.tokenizer)


def _load(name: str) -> dict[str, Transcript]:
    cases = json.loads((GOLDEN / name).read_bytes())
    return {case.pop("case"): msgspec.convert(case, Transcript) for case in cases}


TRANSCRIPTS = _load("output_formats.json")
# What models are reported to write beside their formats.
SLIPS = _load("output_slips.json")
ALL = TRANSCRIPTS | SLIPS


@cache
def _bind(name: str, tokenizer: Tokenizer) -> OutputFormat:
    return FORMATS[name].bind(tokenizer)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids; between two \x00 the text is no added token."""
    ids: list[int] = []
    for place, part in enumerate(text.split("\x00")):
        for piece in part if place % 2 else [part]:
            ids += tokenizer.encode(piece, add_special_tokens=False)
    return ids


def list_deltas(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], cuts: Iterable[int], stop: str = ""
) -> list[tuple[str, list[int], bool]]:
    """Deltas of an output that is cut before the given tokens; with `stop`, text comes late by its length."""
    params = SamplingParams(skip_special_tokens=False, stop=[stop] if stop else None)
    detokenizer = Detokenizer(tokenizer, prompt, params)
    places = [0, *sorted(cuts), len(ids)]
    deltas: list[tuple[str, list[int], bool]] = []
    for begin, end in pairwise(places):
        is_finished = end == len(ids)
        ends = is_finished and ids[-1:] == [tokenizer.eos_token_id]
        detokenizer.add(ids[begin : end - 1 if ends else end])
        if is_finished:
            detokenizer.finish()
        deltas.append((detokenizer.take_delta(is_finished), list(ids[begin:end]), is_finished))
        if is_finished:
            break
    return deltas


@dataclass
class Read:
    """What a parser has made of an output."""

    message: AssistantMessage
    events: list[OutputEvent]
    num_errors: int
    num_reasoning_tokens: int

    @property
    def parts(self) -> tuple[str, str, list[tuple[str, str]]]:
        calls = [(call.name, call.arguments) for call in self.message.tool_calls]
        return self.message.content, self.message.reasoning, calls


def read(transcript: Transcript, cuts: Iterable[int] = (), stop: str = "") -> Read:
    tokenizer = transcript.tokenizer
    prompt = encode(tokenizer, transcript.prompt)
    deltas = list_deltas(tokenizer, prompt, encode(tokenizer, transcript.text), cuts, stop)
    return read_deltas(transcript.output_format, tokenizer, prompt, deltas, transcript.tools)


def read_deltas(
    output_format: OutputFormat,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    deltas: Iterable[tuple[str, list[int], bool]],
    tools: Sequence[Tool] = TOOLS,
) -> Read:
    parser = OutputParser(output_format, tokenizer, prompt, tools)
    message, events = AssistantMessage(), list[OutputEvent]()
    for delta in deltas:
        for event in parser.take(*delta):
            message.add(event)
            events.append(event)
    return Read(message, events, parser.num_errors, parser.num_reasoning_tokens)


def random_cuts(chance: random.Random, length: int) -> list[int]:
    """Some places to cut at: few, many, or all; also the same one twice, for an empty delta."""
    return [chance.randrange(length) for _ in range(chance.choice([1, 3, length // 4, length]))]
