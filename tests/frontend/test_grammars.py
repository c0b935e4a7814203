"""Schemas, regular expressions and grammars: which are followed, and what is said of the others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from frontend_fakes import make_facts
from grammar_judge import TOKENIZER, accepts, find_faults, write
from llguidance import LLMatcher, LLParserLimits
from quire.frontend.formats.schemas import compiler as module
from quire.frontend.formats.schemas.compiler import GrammarCompiler
from quire.frontend.formats.schemas.json_schema import check_valid
from quire.frontend.requests.input_processor import InputProcessor
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.errors import SamplingParamsError
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.params.structured_outputs import GRAMMAR_LIMITS, StructuredOutputsParams
from quire.ipc.protocol.messages import MAX_GRAMMAR_LENGTH
from schemas import SchemaCase, all_schemas

CASES = all_schemas()
PAIR = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def compiler(byte_level: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(byte_level)


def refuse(compiler: GrammarCompiler, **fields: Any) -> SamplingParamsError:
    with pytest.raises(SamplingParamsError) as caught:
        compiler.compile(StructuredOutputsParams(**fields))
    return caught.value


def test_there_are_schemas_enough():
    assert len(CASES) == len({case.name for case in CASES})
    assert sum(case.refused is None for case in CASES) >= 300


@pytest.mark.parametrize("case", [one for one in CASES if one.refused], ids=lambda case: case.name)
def test_a_schema_that_cannot_be_honoured_is_refused_at_its_place(
    compiler: GrammarCompiler, case: SchemaCase
):
    assert case.refused is not None
    assert refuse(compiler, json=case.schema).field.endswith(case.refused)


def test_what_follows_a_schema_satisfies_it(compiler: GrammarCompiler):
    followed = [case for case in CASES if case.refused is None]
    num_ended = 0
    for case in followed:
        grammar = compiler.compile(StructuredOutputsParams(json=case.schema))
        written = write(grammar, case.name)
        if written is not None:
            num_ended += 1
            assert find_faults(case.schema, json.loads(written)) == [], (case.name, written)
    assert num_ended > len(followed) * 0.9


@pytest.mark.parametrize("year", [0, 1, 4, 100, 400, 1000, 1900, 2000, 2023, 2024, 2096, 9999])
def test_a_date_is_one_of_the_calendar(compiler: GrammarCompiler, year: int):
    schema = {"type": "string", "format": "date"}
    grammar = compiler.compile(StructuredOutputsParams(json=schema))
    for day in ("01-01", "02-28", "02-29", "02-30", "04-31", "10-31", "12-31", "13-01"):
        date = f"{year:04}-{day}"
        assert accepts(grammar, json.dumps(date)) == (not find_faults(schema, date)), date


@pytest.mark.parametrize(
    ("schema", "value", "is_allowed"),
    [
        ({"format": "time"}, "23:59:59Z", True),
        ({"format": "time"}, "12:30:60Z", False),
        ({"format": "date-time"}, "2024-02-29T00:00:00.5+01:30", True),
        ({"format": "date-time"}, "2023-02-29T00:00:00Z", False),
        ({"format": "date-time"}, "2023-02-28T00:00:60Z", False),
        ({"format": "date", "allOf": [{"pattern": "^19"}]}, "1904-02-29", True),
        ({"format": "date", "allOf": [{"pattern": "^19"}]}, "1905-02-29", False),
        ({"format": "date", "allOf": [{"pattern": "^19"}]}, "2004-02-29", False),
        ({"format": "hostname"}, "a." * 126 + "a", True),
        ({"format": "hostname"}, "a." * 126 + "aa", False),
    ],
    ids=str,
)
def test_a_format_means_what_its_rfc_says(
    compiler: GrammarCompiler, schema: dict[str, Any], value: str, is_allowed: bool
):
    grammar = compiler.compile(StructuredOutputsParams(json=schema))
    assert accepts(grammar, json.dumps(value)) is is_allowed


def test_a_schema_may_be_a_text(compiler: GrammarCompiler):
    texts = [json.dumps(PAIR), json.dumps(PAIR, indent=4)]
    grammars = {compiler.compile(StructuredOutputsParams(json=one)) for one in [*texts, PAIR]}
    assert len(grammars) == 1


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"a":1}', True),
        ('{"a": 1}', True),
        ('{\n    "a": 1\n}', True),
        ('{ "a" : 1 }', True),
        ('{"a":\n' + " " * 40 + "1}", True),
        ('{"a":  1}', False),
        ('{"a":\n\n1}', False),
        ('{"a":\n' + " " * 41 + "1}", False),
        (' {"a":1}', False),
        ('{"a":1}\n', False),
    ],
)
def test_whitespace_comes_to_an_end(compiler: GrammarCompiler, text: str, is_allowed: bool):
    assert accepts(compiler.compile(StructuredOutputsParams(json=PAIR)), text) is is_allowed


def test_whitespace_can_be_ruled_out_or_chosen(compiler: GrammarCompiler):
    none = compiler.compile(StructuredOutputsParams(json=PAIR, disable_any_whitespace=True))
    assert [accepts(none, text) for text in ('{"a":1}', '{"a": 1}')] == [True, False]
    own = compiler.compile(StructuredOutputsParams(json_object=True, whitespace_pattern="[ ]{0,2}"))
    assert [accepts(own, text) for text in ('{"a":  1}', '{"a":\n1}')] == [True, False]
    error = refuse(compiler, json_object=True, whitespace_pattern="(")
    assert error.field == "structured_outputs.whitespace_pattern"


def test_additional_properties_can_be_ruled_out_where_a_schema_does_not_say(compiler: GrammarCompiler):
    open_grammar = compiler.compile(StructuredOutputsParams(json=PAIR))
    closed = compiler.compile(StructuredOutputsParams(json=PAIR, disable_additional_properties=True))
    said = {**PAIR, "additionalProperties": True}
    open_anyway = compiler.compile(StructuredOutputsParams(json=said, disable_additional_properties=True))
    text = '{"a":1,"b":2}'
    assert [accepts(one, text) for one in (open_grammar, closed, open_anyway)] == [True, False, True]


@pytest.mark.parametrize(
    ("fields", "yes", "no"),
    [
        ({"regex": r"[ab]/\d"}, "a/7", "a7"),
        ({"regex": 'a\n"b"'}, 'a\n"b"', "a"),
        ({"choice": ["yes", 'no "really"\n', "é"]}, 'no "really"\n', "ye"),
        ({"json_object": True}, '{"x": [1, {}]}', "[]"),
        ({"grammar": 'start: "a" B\nB: /[0-9]+/'}, "a12", "a"),
        ({"grammar": 'root ::= "a" digit+\ndigit ::= [0-9]'}, "a12", "a"),
        ({"grammar": 'start: "x" %json {"type": "boolean"}'}, "xtrue", "x1"),
    ],
    ids=str,
)
def test_each_kind_is_followed(compiler: GrammarCompiler, fields: dict[str, Any], yes: str, no: str):
    grammar = compiler.compile(StructuredOutputsParams(**fields))
    assert [accepts(grammar, text) for text in (yes, no)] == [True, False]


TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<call=f>", "schema": PAIR, "end": "</call>"}],
    "triggers": ["<call="],
}


def test_a_structural_tag_is_free_text_with_structures(compiler: GrammarCompiler):
    for tag in (TAG, json.dumps(TAG)):
        grammar = compiler.compile(StructuredOutputsParams(structural_tag=tag))
        followed = ["free", 'so <call=f>{"a":1}</call> and <call=f>{"a": 2}</call>']
        assert all(accepts(grammar, text) for text in followed)
        assert not any(accepts(grammar, text) for text in ("<call=g>", "<call=f>{}</call>"))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"triggers": []}, "triggers"),
        ({"triggers": ["<other>"]}, "structures[0].begin"),
        ({"structures": [{"begin": "<call=", "schema": PAIR}]}, "structures[0].end"),
        ({"structures": [{"begin": "<call=", "schema": {"not": {}}, "end": ""}]}, "structures[0].schema.not"),
        ({"format": {}}, "format"),
        ({"type": "other"}, "type"),
    ],
)
def test_a_structural_tag_is_refused_at_its_place(compiler: GrammarCompiler, change: Any, place: str):
    assert refuse(compiler, structural_tag=TAG | change).field == f"structured_outputs.structural_tag.{place}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "(?=a)b"}, r"structured_outputs.regex='\(\?=a\)b': what can be compiled: .*look-around"),
        ({"grammar": "start: nothing"}, "structured_outputs.grammar=.*unknown name"),
        ({"grammar": '{"grammars": []}'}, "structured_outputs.grammar=.*Lark, or EBNF"),
        ({"grammar": 'start: %json {"nott": {}}'}, r"grammar.%json\[0\].nott=.*did you mean 'not'"),
        ({"grammar": "start: <|nothing|>"}, "unknown special token"),
        ({"json": "{"}, r"structured_outputs.json='{': JSON \("),
        ({"json": "[1]"}, r"structured_outputs.json=\[1\]: a JSON schema, which is an object"),
        ({"json": {"$ref": "#/$defs/a"}}, r"json.\$ref='#/\$defs/a': the place of a schema"),
        ({"json": {"$ref": "#"}}, "what some output can satisfy"),
        ({"json": {"a": {1, 2}}}, r"json.a=\[1, 2\]: a keyword of JSON Schema"),
        ({"json": {"multipleOf": 1_000_003}}, "json.multipleOf=1000003: a number above 0 of at most 10000"),
        ({"json": {"oneOf": [{"maxLength": 2}, {"minLength": 3}]}}, "anyOf takes others"),
        ({"regex": "a" * MAX_GRAMMAR_LENGTH}, f"at most {MAX_GRAMMAR_LENGTH}"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_compiled_is_refused_in_words(compiler: GrammarCompiler, fields: Any, message: str):
    error = refuse(compiler, **fields)
    assert re.search(message, str(error)), str(error)


def nest(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def make_optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{place}": {"type": "integer"} for place in range(count)}}


RULES = "start: a0\n" + "\n".join(f"a{place}: a{place + 1}" for place in range(3000))
DOUBLED = "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(30)) + '\nA30: "x"'
CHAIN = {str(place): {"$ref": f"#/$defs/{place + 1}"} for place in range(2000)} | {"2000": {}}


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"json": nest(64)}, "at most 64 levels of nesting"),
        ({"json": "[" * 100_000}, "at most 64 levels of nesting"),
        ({"json": {"$ref": "#/$defs/0", "$defs": CHAIN}}, "at most 1000 levels of nesting in all schemas"),
        ({"json": {"items": make_optional(241)}}, "items.properties=.*at most 240 properties in a row"),
        ({"grammar": RULES}, "at most 1000 rules"),
        ({"grammar": DOUBLED}, "within the limits .*initial_lexer_fuel=1000000"),
        ({"grammar": "root ::= " + "(" * 100_000}, "at most 1000 rules|less depth"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_would_cost_too_much_is_refused_with_the_limit(
    compiler: GrammarCompiler, fields: Any, limit: str
):
    error = refuse(compiler, **fields)
    assert re.search(limit, str(error)), str(error)


@pytest.mark.parametrize("closed", [{}, {"additionalProperties": False}, {"patternProperties": {"^x": {}}}])
def test_as_many_optional_properties_as_are_taken_can_be_followed(
    compiler: GrammarCompiler, closed: dict[str, Any]
):
    grammar = compiler.compile(StructuredOutputsParams(json=make_optional(240) | closed))
    limits = LLParserLimits(**GRAMMAR_LIMITS)
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0, limits=limits)
    for byte in b'{"p7": 1, "p239": 2}':
        matcher.compute_bitmask()
        assert matcher.consume_token(byte), matcher.get_error()
    assert matcher.is_accepting()


def test_thousands_of_choices_are_one_terminal(compiler: GrammarCompiler):
    choices = [f"number {i}" for i in range(9_000)]
    grammar = compiler.compile(StructuredOutputsParams(choice=choices))
    assert accepts(grammar, choices[8_765])
    assert not accepts(grammar, "number x")


def test_a_panic_of_the_library_is_a_refusal(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch):
    class PanicException(BaseException):
        pass

    def panic(*_args: Any, **_kwargs: Any) -> None:
        raise PanicException("assertion failed")

    monkeypatch.setattr("llguidance.LLMatcher", panic)
    assert "llguidance fails: assertion failed" in str(refuse(compiler, regex="panics"))


def test_a_grammar_that_was_taken_is_not_compiled_again(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    compiler = GrammarCompiler(byte_level)
    first = compiler.compile(StructuredOutputsParams(json=PAIR))
    monkeypatch.setattr(module, "make_grammar_text", None)
    assert compiler.compile(StructuredOutputsParams(json=dict(PAIR))) == first


def test_requests_that_share_params_share_the_grammar(byte_level: Tokenizer):
    processor = InputProcessor(make_facts(), byte_level)
    params = SamplingParams(n=2, structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    first, second = processor.prepare_each([params] * 2)
    assert first is second
    request = processor.process("a", [1], first)
    assert {one.grammar for one in request.sequences} == {first.grammar}
    assert accepts(first.grammar, "b")
    assert request.sequences[0].sampling_params.structured_outputs is None
    assert processor.takes_long("a", params)
    assert not processor.takes_long("a", first)
    assert processor.prepare_params(SamplingParams()).grammar == ""


def test_without_a_tokenizer_no_grammar_can_be_followed():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(SamplingParamsError, match="structured_outputs='regex': None: there is no tokenizer"):
        InputProcessor(make_facts(), None).prepare_params(params)


@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 500), pytest.param(500, 10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_whatever_is_asked_for_is_taken_or_refused(byte_level_folder: Path, seed: int, count: int):
    fuzz = Path(__file__).parent / "grammar_fuzz.py"
    words = [sys.executable, str(fuzz), str(byte_level_folder), str(seed), str(count)]
    child = subprocess.run(words, capture_output=True, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    assert int(child.stdout) > count / 20  # were all refused, nothing would be tried


def test_a_schema_that_nobody_follows_may_say_what_cannot_be_followed() -> None:
    for keyword in (
        {"not": {"type": "null"}, "if": {"const": 1}, "then": False, "nullable": True, "uniqueItems": True},
        {
            "items": [{"type": "string"}],
            "additionalItems": False,
            "format": "colour",
            "own": {"type": "none"},
        },
        {
            "multipleOf": 0.123456789,
            "exclusiveMinimum": True,
            "$ref": "https://elsewhere",
            "default": {"type": "none"},
        },
    ):
        check_valid("schema", {"type": "object", "properties": {"a": keyword}})


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"type": "none"}}}, "schema.properties.a.type"),
        ({"properties": {"a": {"required": True}}}, "schema.properties.a.required"),
        ({"properties": ["a"]}, "schema.properties"),
        ({"properties": {"a": 1}}, "schema.properties.a"),
        ({"oneOf": [{"items": [{}, {"minLength": -1}]}]}, "schema.oneOf[0].items[1].minLength"),
        ({"not": {"allOf": {}}}, "schema.not.allOf"),
        ({"$defs": {"a": {"maximum": "9"}}}, "schema.$defs.a.maximum"),
    ],
)
def test_but_has_to_be_a_schema(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(SamplingParamsError) as caught:
        check_valid("schema", schema)
    assert caught.value.field == place
