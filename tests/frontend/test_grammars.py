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
from jsonschema import Draft7Validator, Draft202012Validator
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLParserLimits
from quire.frontend.formats.schemas import compiler as module
from quire.frontend.formats.schemas.compiler import GrammarCompiler
from quire.frontend.formats.schemas.json_schema import check_valid
from quire.frontend.requests.input_processor import InputProcessor
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.errors import SamplingParamsError
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.params.structured_outputs import GRAMMAR_LIMITS, StructuredOutputsParams
from refusals import Refusal, refusals
from schemas import SchemaCase, all_schemas

CASES = all_schemas()
GOLDEN = Path(__file__).parents[1] / "golden"
FOLLOWED: list[dict[str, Any]] = json.loads((GOLDEN / "followed_grammars.json").read_bytes())
GENERATED: list[list[Any]] = json.loads((GOLDEN / "generated_schemas.json").read_bytes())
KEYWORDS: list[list[Any]] = json.loads((GOLDEN / "schema_keywords.json").read_bytes())
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


@pytest.mark.parametrize(("name", "refused", "schema"), GENERATED, ids=[case[0] for case in GENERATED])
def test_what_generators_of_schemas_write_is_followed_or_refused_at_its_place(
    compiler: GrammarCompiler, name: str, refused: str | None, schema: dict[str, Any]
):
    if refused is not None:
        assert refuse(compiler, json=schema).field.endswith(refused)
        return
    grammar = compiler.compile(StructuredOutputsParams(json=schema))
    written = [text for seed in range(3) if (text := write(grammar, f"{name}-{seed}")) is not None]
    assert written
    if "openapi" not in name.lower():  # of whose nullable jsonschema knows nothing
        is_old = '"items": [' in json.dumps(schema)
        default = Draft7Validator if is_old else Draft202012Validator
        judge = validator_for(schema, default=default)(schema)
        assert [error.message for text in written for error in judge.iter_errors(json.loads(text))] == []


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"), KEYWORDS, ids=[json.dumps(case[0])[:60] for case in KEYWORDS]
)
def test_what_a_keyword_says_is_said_of_output(
    compiler: GrammarCompiler, schema: dict[str, Any], allowed: list[str], forbidden: list[str]
):
    grammar = compiler.compile(StructuredOutputsParams(json=schema))
    assert [text for text in allowed if not accepts(grammar, text)] == []
    assert [text for text in forbidden if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("name", "bound"), [("minimum", 10**18), ("exclusiveMaximum", -1e30), ("minimum", 1e300)]
)
def test_a_bound_that_no_number_reaches_is_refused_in_words(
    compiler: GrammarCompiler, name: str, bound: float
):
    error = refuse(compiler, json={"type": "number", name: bound})
    assert error.field.endswith(f".{name}")
    assert "from 0" in str(error)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"propertyNames": {"enum": ["a"]}, "required": 5}, ".required"),
        ({"propertyNames": {"type": 5}}, ".propertyNames.type"),
        ({"propertyNames": {"enum": 5}}, ".propertyNames.enum"),
        ({"properties": {"a": {"not": 1}}}, ".properties.a.not"),
    ],
)
def test_odd_values_of_keywords_are_refused_at_their_place(
    compiler: GrammarCompiler, schema: dict[str, Any], place: str
):
    assert refuse(compiler, json={"type": "object", **schema}).field.endswith(place)


def test_names_that_are_required_are_written_out_within_a_bound(compiler: GrammarCompiler):
    schema: dict[str, Any] = {"type": "integer"}
    names = [f"n{number}" for number in range(10)]
    for _ in range(8):
        record = {"propertyNames": {"enum": names}, "additionalProperties": schema, "required": names}
        schema = {"type": "object", **record}
    assert "schemas" in str(refuse(compiler, json=schema))


@pytest.mark.parametrize("year", [0, 1, 4, 100, 400, 1000, 1900, 2000, 2023, 2024, 2096, 9999])
def test_a_date_is_one_of_the_calendar(compiler: GrammarCompiler, year: int):
    schema = {"type": "string", "format": "date"}
    grammar = compiler.compile(StructuredOutputsParams(json=schema))
    for day in ("01-01", "02-28", "02-29", "02-30", "04-31", "10-31", "12-31", "13-01"):
        date = f"{year:04}-{day}"
        assert accepts(grammar, json.dumps(date)) == (not find_faults(schema, date)), date


def test_a_schema_may_be_a_text(compiler: GrammarCompiler):
    texts = [json.dumps(PAIR), json.dumps(PAIR, indent=4)]
    grammars = {compiler.compile(StructuredOutputsParams(json=one)) for one in [*texts, PAIR]}
    assert len(grammars) == 1


@pytest.mark.parametrize("case", FOLLOWED, ids=lambda case: str(case["fields"])[:60])
def test_each_kind_is_followed(compiler: GrammarCompiler, case: dict[str, Any]):
    """Formats as their RFCs say, white space, properties and free text around structures."""
    grammar = compiler.compile(StructuredOutputsParams(**case["fields"]))
    assert [text for text in case["yes"] + case["no"] if accepts(grammar, text)] == case["yes"]


@refusals("structural_tags")
def test_a_structural_tag_is_refused_at_its_place(compiler: GrammarCompiler, refusal: Refusal):
    refusal.check(lambda fields: compiler.compile(StructuredOutputsParams(**fields)))


@refusals("grammars")
def test_what_cannot_be_compiled_is_refused_in_words(compiler: GrammarCompiler, refusal: Refusal):
    refusal.check(lambda fields: compiler.compile(StructuredOutputsParams(**fields)))


def test_a_value_that_is_no_json_is_refused_at_its_place(compiler: GrammarCompiler):
    text = "json.a=[1, 2]: expected a keyword of JSON Schema"
    assert text in str(refuse(compiler, json={"a": {1, 2}}))


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
    with pytest.raises(
        SamplingParamsError, match="structured_outputs='regex': expected None: there is no tokenizer"
    ):
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


@refusals("schemas")
def test_but_has_to_be_a_schema(refusal: Refusal) -> None:
    refusal.check(lambda schema: check_valid("schema", schema))
