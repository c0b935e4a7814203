"""What the parser makes of outputs that are no good transcripts."""

from __future__ import annotations

import ast
import functools
import json
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.frontend.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from quire.frontend.formats.known_formats import FORMATS
from quire.frontend.formats.reading.output_parser import OutputParser
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.tools import Tool
from tokenizers import Tokenizer as Backend
from transcripts import (
    ALL,
    END,
    FILES,
    QWEN,
    ROME,
    TRANSCRIPTS,
    USER,
    Transcript,
    encode,
    list_deltas,
    random_cuts,
    read,
    read_deltas,
)

CALL = '<tool_call>\n{"name": "list_files", "arguments": {}}\n</tool_call>'


def hermes(text: str, **changes: object) -> Transcript:
    return replace(Transcript("hermes", text, added=QWEN), **changes)


def parts_of(text: str, **changes: object) -> tuple[str, str, list[tuple[str, str]]]:
    """Of a hermes output, read in one piece and token by token."""
    transcript = hermes(text, **changes)
    found = read(transcript)
    assert found.parts == read(transcript, range(1, len(encode(transcript.tokenizer, text)))).parts
    return found.parts


def test_thoughts_may_come_again_after_a_call() -> None:
    text = f"<think>a</think>\n{CALL}\n<think>\n\n</think>b <think> c"
    assert parts_of(text) == ("b", "a c"[0] + "c", [FILES])


def test_an_end_of_thoughts_that_nobody_opened_is_left_out() -> None:
    assert parts_of("a \n</think>\n b") == ("ab", "", [])


@pytest.mark.parametrize("close", ["</tool_call>", ""])
def test_open_thoughts_end_with_the_calls_that_the_turn_ends_with(close: str) -> None:
    call = CALL.replace("</tool_call>", close)
    found = read(hermes(f"a {call}\n{CALL}\n", prompt=USER + "<think>\n"))
    assert found.parts == ("", "a", [FILES, FILES])
    assert found.num_reasoning_tokens == 2
    assert parts_of(f"<think>a{call}{END}") == ("", "a", [FILES])


def test_open_thoughts_end_with_a_call_that_is_cut() -> None:
    text = '<think>a <tool_call>{"name": "write", "arguments": {"text": "b'
    assert parts_of(text) == ("", "a", [("write", '{"text": "b')])
    assert parts_of(text[:30]) == ("", text[7:30], [])
    assert parts_of(text + END) == ("", text[7:], [])


@pytest.mark.parametrize("rest", [" b", f"\n{CALL} b", "\n<tool_call>", " b\n</think>\nc"])
def test_open_thoughts_take_a_call_that_more_follows(rest: str) -> None:
    thoughts, _, content = f"a {CALL}{rest}".partition("\n</think>\n")
    assert parts_of(f"a {CALL}{rest}", prompt=USER + "<think>\n") == (content, thoughts, [])
    tokens = read(hermes(thoughts, prompt=USER + "<think>\n")).num_reasoning_tokens
    assert tokens == len(encode(hermes("").tokenizer, thoughts))


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        (USER + "<think>", True),
        (USER + "<think>\n\n</think>\n\n", False),
        (USER + "<think>" + END + "assistant\n", False),
        (USER + "a" + END + "assistant\n<think>\nI have begun", True),
        ("", False),
    ],
)
def test_a_prompt_that_has_opened_the_thoughts_counts(prompt: str, is_open: bool) -> None:
    assert read(hermes("x", prompt=prompt)).parts == (("", "x", []) if is_open else ("x", "", []))


@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "list_files", "arguments": [1]}\n</tool_call>',
        "<tool_call>\nlist_files()\n</tool_call>",
        '<tool_call>{"arguments": {"name": "list_files"}}</tool_call>',
        "<tool_call></tool_call>",
    ],
)
def test_a_call_that_cannot_be_read_stays_content_whole(call: str) -> None:
    text = f"a\n{call}\n{CALL}"
    assert parts_of(text) == (f"a\n{call}", "", [FILES])
    assert read(hermes(text)).num_errors == 1


def test_an_output_that_begins_calls_without_end_is_not_read_again_for_each() -> None:
    text = '<tool_call>{"arguments": {"a":' * 1500
    transcript = hermes(text, added=())
    parser = OutputParser(transcript.output_format, transcript.tokenizer, [], transcript.tools)
    (told,) = parser.take(text, encode(transcript.tokenizer, text), True)
    assert told == TextDelta(text)
    assert len(text) < parser._source.num_rewound < 10 * len(text)


@pytest.mark.parametrize(
    ("format_name", "text"),
    [
        ("hermes", "{ " * 2000),
        ("hermes", "```" * 1500),
        ("hermes", '{"name": "list_files", "x": 1}' * 300),
        ("qwen3_coder", "<function=list_files> " * 400),
        ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=text>\n" + "\n</function>\n" * 600),
        ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=text>\n</function>" + " " * 120_000 + "a"),
        ("qwen3_coder", "<think>" + "<tool_call>\n<function=list_files>\n</function>\n</tool_call> a" * 200),
    ],
)
def test_what_looks_like_slips_is_not_read_again_for_each(format_name: str, text: str) -> None:
    transcript = Transcript(format_name, text)
    parser = OutputParser(transcript.output_format, transcript.tokenizer, [], transcript.tools)
    for place in range(0, len(text), 50):
        parser.take(text[place : place + 50], [97], place + 50 >= len(text))
    assert parser._source.num_rewound < 3 * len(text)


def test_arguments_that_go_wrong_are_counted() -> None:
    text = '<tool_call>{"name": "write", "arguments": {"text": 1</tool_call>'
    assert parts_of(text) == ("", "", [("write", '{"text": 1')])
    assert read(hermes(text)).num_errors == 1
    text = '<tool_call>{"name": "write", "arguments": {"text"; 1}}</tool_call>b'
    assert parts_of(text) == ("b", "", [("write", '{"text"; 1}')])
    assert read(hermes(text)).num_errors == 1


@pytest.mark.parametrize(("end", "num_errors"), [("", 0), (END, 1)])
def test_a_cut_call_is_what_there_is(end: str, num_errors: int) -> None:
    found = read(hermes('<tool_call>{"name": "write", "arguments": {"text": "ab' + end))
    assert found.parts == ("", "", [("write", '{"text": "ab')])
    assert not any(isinstance(event, ToolCallEnd) for event in found.events)
    assert found.num_errors == num_errors
    found = read(hermes('a <tool_call>{"name": "wri' + end))
    assert found.parts == ('a <tool_call>{"name": "wri', "", [])
    assert found.num_errors == num_errors


@pytest.mark.parametrize(
    ("format_name", "text", "arguments"),
    [
        ("glm45", "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>1", ""),
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>R</arg_value>\n",
            '"city": "R"',
        ),
        ("gemma4", "<|tool_call>call:get_weather{city", ""),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<para", ""),
        ("pythonic", "[get_weather(days=1", ""),
    ],
)
def test_a_value_that_may_go_on_where_a_call_is_cut_is_not_told(
    format_name: str, text: str, arguments: str
) -> None:
    known = next(one for one in TRANSCRIPTS.values() if one.format == format_name)
    found = read(replace(known, text=text))
    content, _, ((name, told),) = found.parts
    assert (content, name) == ("", "get_weather")
    assert told.removeprefix("{").removesuffix('"days": ') == arguments
    assert not any(isinstance(event, ToolCallEnd) for event in found.events)
    assert found.num_errors == 0


@pytest.mark.parametrize("close", ["</func", "</function>\n</tool"])
def test_a_close_that_is_cut_is_no_content(close: str) -> None:
    text = "<tool_call>\n<function=list_files>\n" + close
    found = read(Transcript("qwen3_coder", text))
    assert found.parts == ("", "", [FILES])
    assert found.num_errors == 0


def test_a_stop_string_within_a_marker_leaves_the_text_before_it() -> None:
    transcript = hermes("")
    ids = encode(transcript.tokenizer, "x <tool_call>")
    deltas = [("x ", ids[:-1], False), ("<tool_c", ids[-1:], True)]
    found = read_deltas(transcript.output_format, transcript.tokenizer, [], deltas)
    assert found.parts == ("x <tool_c", "", [])


def test_a_text_that_looks_like_a_marker_is_no_marker() -> None:
    text = f"\x00<tool_call>\x00 is <tool\x00_call>\x00, a\x00</think>\x00 {CALL}\x00<tool_call>\x00 b {CALL}"
    content = "<tool_call> is <tool_call>, a</think><tool_call> b"
    assert parts_of(text) == (content, "", [FILES, FILES])


def test_without_tools_no_call_is_looked_for() -> None:
    assert parts_of(f"<think>a</think>{CALL}", tools=[]) == (CALL, "a", [])


def test_a_fragment_leaves_with_its_token() -> None:
    text = '<tool_call>{"name": "write", "arguments": {"text": "abc\\n"}}</tool_call>'
    transcript = hermes(text)
    events = read(transcript, range(1, len(encode(transcript.tokenizer, text)))).events
    start, *deltas, end = events
    assert isinstance(start, ToolCallStart)
    assert start.name == "write"
    assert re.fullmatch("call_[0-9a-f]{24}", start.call_id)
    assert end == ToolCallEnd(0)
    assert deltas == [
        ToolCallDelta(0, piece) for piece in ["{", *'"text"', ":", " ", '"', "a", "b", "c", "\\n", '"', "}"]
    ]


def test_content_and_thoughts_leave_with_their_tokens() -> None:
    text = "<think>ab</think>c d"
    events = read(hermes(text), range(1, 7)).events
    assert events == [ReasoningDelta("a"), ReasoningDelta("b"), TextDelta("c"), TextDelta(" d")]


def test_mistrals_call_ids_have_nine_letters_and_digits() -> None:
    given_id, made_id = [call.call_id for call in read(TRANSCRIPTS["mistral"]).message.tool_calls]
    assert given_id == "abc123DEF"
    assert re.fullmatch("[0-9A-Za-z]{9}", made_id)


def test_kimis_calls_keep_the_ids_that_it_wrote() -> None:
    call = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    names = ["functions.list_files:7", "functions.list_files:7", "functions.list_files", "list_files:9"]
    text = f"<think>{call.format(names[0])} hm</think>" + "".join(map(call.format, names))
    found = read(replace(TRANSCRIPTS["kimi_k2"], text=text))
    ids = [call.call_id.replace("list_files", "") for call in found.message.tool_calls]
    assert ids == ["functions.:7", "functions.:1", "functions.:2", ":9"]


def test_markers_are_found_where_a_decoder_puts_spaces_around_tokens(metaspace: Tokenizer) -> None:
    backend = Backend.from_str(metaspace.backend.to_str())
    backend.add_special_tokens(["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"])
    tokenizer = Tokenizer(backend, {"eos_token": "</s>"}, None)
    text = '[THINK]the fox[/THINK]hello[TOOL_CALLS]get_weather[ARGS]{"city": "the world"}</s>'
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = list_deltas(tokenizer, [], ids, range(1, len(ids)))
    found = read_deltas(FORMATS["mistral"].bind(tokenizer), tokenizer, [], deltas)
    assert found.parts == ("hello", "the fox", [("get_weather", '{"city": "the world"}')])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": [{}, 5, "integer"]},
        {"type": "integer", "anyOf": 5, "oneOf": {"a": 1}, "enum": "x"},
        {"anyOf": [{"$ref": "#"}, {"type": "integer"}, 7, None]},
        functools.reduce(lambda inner, _: {"anyOf": [inner]}, range(900), {"const": 1}),
    ],
)
def test_any_schema_of_a_parameter_will_do(schema: object) -> None:
    tool = Tool("f", parameters={"properties": {"a": schema}})
    text = "<tool_call>\n<function=f>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"
    found = read(replace(TRANSCRIPTS["qwen3_coder"], text=text, tools=[tool]))
    assert found.parts == ("", "", [("f", '{"a": 2}')])


@pytest.mark.parametrize(
    "value",
    [
        "[1,-2,0,1_000,.5,1.,1e9,+3]",
        "[True,None,[],(),{},((1,),)]",
        "{'a':1,\"b\":{'':(2,3,)},}",
        """['','a','it"s',"it's",'''x'y''',\"\"\"x\"\"\",""]""",
        r"""['\n\'\\','\x41\u00e9','\q',"\U0001F600","\
"]""",
    ],
)
@pytest.mark.filterwarnings("ignore:invalid escape:DeprecationWarning")
def test_python_values_are_the_same_json_however_they_are_cut(value: str) -> None:
    transcript = replace(TRANSCRIPTS["pythonic"], text=f"[get_weather(days=1,where={value},)]")
    length = len(encode(transcript.tokenizer, transcript.text))
    ((_, arguments),) = read(transcript).parts[2]
    assert json.loads(arguments)["where"] == json.loads(json.dumps(ast.literal_eval(value)))
    for cuts in (range(1, length), range(2, length, 2), range(1, length, 3)):
        assert read(transcript, cuts).parts[2] == [("get_weather", arguments)]


@pytest.mark.parametrize("text", ["[get_weather(days={})]", '[TOOL_CALLS]list_files[ARGS]{{"a": {}}}'])
def test_a_number_without_end_is_as_long_as_it_may_be_however_it_is_cut(text: str) -> None:
    name = "pythonic" if text.startswith("[g") else "mistral"
    transcript = replace(TRANSCRIPTS[name], text=text.format("1" * 1100))
    length = len(encode(transcript.tokenizer, transcript.text))
    whole, cut = read(transcript), read(transcript, range(1, length))
    assert (whole.parts, whole.num_errors) == (cut.parts, cut.num_errors)


def test_harmony_calls_nothing_that_is_not_offered() -> None:
    text = '<|channel|>commentary to=functions.rm code<|message|>{"a": 1}<|call|>'
    found = read(replace(TRANSCRIPTS["harmony"], text=text))
    assert found.parts == (text, "", [])
    assert found.num_errors == 1


def test_harmony_takes_headers_as_models_write_them() -> None:
    text = (
        " to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>"
        '{"city": "Rome", "days": 2}<|call|><|start|>assistant<|channel|>final<|message|> Hi \n<|return|>'
    )
    assert read(replace(TRANSCRIPTS["harmony"], text=text)).parts == (" Hi \n", "", [ROME])
    plain = replace(TRANSCRIPTS["harmony"], text="Just text.")
    assert read(plain).parts == ("Just text.", "", [])


SNIPPETS = [*" \n😀a{}[]():,=1'", '"', "\\", "get_weather"]


@st.composite
def wild_outputs(draw: st.DrawFn) -> Transcript:
    """Pieces of a transcript's text, in any order, and others."""
    transcript = ALL[draw(st.sampled_from(sorted(ALL)))]
    tokens = [re.escape(text) for text in (*transcript.special, *transcript.added)]
    pieces = re.findall("|".join([*tokens, r"\w+|\s+|."]), transcript.text.replace("\x00", ""), re.DOTALL)
    begin = draw(st.integers(0, len(pieces)))
    changes = draw(st.lists(st.sampled_from([*SNIPPETS, *pieces]), max_size=12))
    end = draw(st.integers(begin, len(pieces)))
    return replace(transcript, text="".join([*pieces[:begin], *changes, *pieces[end:]]))


@settings(max_examples=120)
@given(wild_outputs(), st.randoms(use_true_random=False))
def test_any_output_is_read_alike_however_it_is_cut(transcript: Transcript, chance: random.Random) -> None:
    whole = read(transcript)
    length = len(encode(transcript.tokenizer, transcript.text))
    if length:
        cut = read(transcript, random_cuts(chance, length), chance.choice(["", "\t\t\t"]))
        assert (cut.parts, cut.num_errors) == (whole.parts, whole.num_errors)
        for call in whole.message.tool_calls:
            if not whole.num_errors and ToolCallEnd(0) in whole.events:
                json.loads(whole.message.tool_calls[0].arguments)
            assert call.name in {tool.name for tool in transcript.tools}
