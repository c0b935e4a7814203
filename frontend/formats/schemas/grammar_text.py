"""StructuredOutputsParams -> the text of a grammar, which the compiler has yet to take. Loads no llguidance,
except to read EBNF.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, cast

from ....ipc.errors import SamplingParamsError, did_you_mean
from ....ipc.params.param_fields import make_plain
from ....ipc.params.structured_outputs import StructuredOutputsParams
from ....ipc.protocol.messages import MAX_GRAMMAR_LENGTH
from .json_schema import Schema, make_schema, read_json

# Between the tokens of JSON: nothing, a space, or a new line with an indentation. It cannot go on for long,
# so a model cannot write whitespace instead of an answer.
WHITESPACE_PATTERN = r"( |\n[ \t]{0,40})"

# llguidance follows rules recursively; at twice as many, one below the other, an 8 MB stack was full.
_MAX_RULE_NESTING = 1000
_RULE = re.compile(r"^[ \t]*[?!]*[A-Za-z_][\w-]*[^\n:\"/]*:", re.MULTILINE)
# Literals, regular expressions and comments; one that is not closed goes to the end of its line.
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"?|/(?![/*])(?:\\.|[^/\\\n])+/?|//[^\n]*')
_EMBEDDED_JSON = re.compile(r"%json\s*(?=\{)")
_STRUCTURE_FIELDS = ("begin", "schema", "end")
_TAG_FIELDS = ("type", "structures", "triggers")


class GrammarText(NamedTuple):
    """A grammar as LLMatcher takes it. schemas: the JSON schemas that it follows, by their places.

    place: what the field that it was made of is called in errors. value: what the field holds.
    """

    text: str
    place: str
    value: Any
    schemas: dict[str, dict[str, Any]]


def make_grammar_text(
    params: StructuredOutputsParams, place: str | None = None, is_strict: bool = False
) -> GrammarText:
    """The grammar of `params`. `place`: the field that they were made of, if it is not one of theirs.

    is_strict: a JSON schema has to keep OpenAI's rules as well. Raises SamplingParamsError for what is no
    schema, or has keywords that cannot be honoured.
    """
    kind = params.kind
    value: Any = make_plain(getattr(params, kind))
    place = place or f"structured_outputs.{kind}"
    if isinstance(value, str):
        check_length(place, "a text", value)
    options = _make_options(params)
    schema: dict[str, Any] | None = None
    match kind:
        case "json":
            schema = make_schema(place, value, params.disable_additional_properties, is_strict)
        case "json_object":
            schema = {"type": "object"}
        case "regex":
            lark = f"start: /{_escape_regex(value)}/"
        case "choice":
            # One terminal: as alternatives of a rule they would be an item of the parser each.
            lark = f"start: CHOICE\nCHOICE: {' | '.join(quote(text) for text in value)}"
        case "grammar":
            lark = _read_grammar(place, value, options)
        case "structural_tag":
            lark = _make_tags(place, value, options, params.disable_additional_properties)
    grammar = {"json_schema": schema | options} if schema is not None else {"lark_grammar": lark}  # pyright: ignore[reportPossiblyUnboundVariable]
    text = to_json({"grammars": [grammar]})
    check_length(place, "a grammar", text)
    return GrammarText(text, place, value, {} if schema is None else {place: schema})


def check_length(place: str, what: str, text: str) -> None:
    """Raise SamplingParamsError for a text, or a grammar made of one, that is longer than may be sent."""
    if len(text) > MAX_GRAMMAR_LENGTH:
        allowed = f"at most {MAX_GRAMMAR_LENGTH} (MAX_GRAMMAR_LENGTH)"
        raise SamplingParamsError(place, f"{what} of {len(text)} characters", allowed)


def wrap_schema(schema: Schema) -> str:
    """The grammar text of a schema alone, as the compiler asks for parts of one."""
    return to_json({"grammars": [{"json_schema": schema}]})


def _make_options(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.disable_any_whitespace:
        return {"x-guidance": {"whitespace_flexible": False}}
    return {"x-guidance": {"whitespace_pattern": params.whitespace_pattern or WHITESPACE_PATTERN}}


def to_json(value: Any) -> str:
    """As grammars and their schemas are written: short."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def quote(text: str) -> str:
    """A text as a Lark literal."""
    return json.dumps(text)


def _escape_regex(regex: str) -> str:
    """A regular expression between slashes on one line."""
    from llguidance import regex_to_lark

    return regex_to_lark(regex, "dw")


def _read_grammar(place: str, text: str, options: dict[str, Any]) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = any_to_lark(text)
    except RecursionError:
        raise SamplingParamsError(place, text, "a grammar of less depth") from None
    except Exception as error:  # whatever the converter makes of what is no grammar
        raise SamplingParamsError(place, text, f"Lark, or EBNF as GBNF has it ({error})") from None
    _check_rules(place, text, lark)
    return _read_embedded(place, lark, options)


def _check_rules(place: str, text: str, lark: str) -> None:
    """Bound how deep rules may lie below each other, counting them as if each lay below all others."""
    bare = _LITERAL.sub('""', lark)
    rules = _RULE.split(bare)
    depth = sum(1 + _count_nesting(rule) for rule in rules)
    if depth > _MAX_RULE_NESTING:
        allowed = f"at most {_MAX_RULE_NESTING} rules and brackets within brackets"
        raise SamplingParamsError(place, text, f"{allowed} (there are {depth})")


def _count_nesting(rule: str) -> int:
    depth = deepest = 0
    for char in rule:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth -= 1
    return deepest


def _read_embedded(place: str, lark: str, options: dict[str, Any]) -> str:
    """The grammar with each `%json` schema checked, and its whitespace bounded."""
    decoder = json.JSONDecoder()
    parts: list[str] = []
    end = 0
    for number, match in enumerate(_EMBEDDED_JSON.finditer(lark)):
        if match.start() < end:
            continue
        parts.append(lark[end : match.end()])
        try:
            schema, end = decoder.raw_decode(lark, match.end())
        except ValueError:  # not JSON, for the compiler to say; or a part of a literal
            end = match.end()
            continue
        except RecursionError:
            raise SamplingParamsError(place, "%json", "a schema of less depth") from None
        parts.append(to_json(_make_part(f"{place}.%json[{number}]", schema, options)))
    return "".join([*parts, lark[end:]])


def _make_part(place: str, schema: Any, options: dict[str, Any], closes_objects: bool = False) -> Any:
    """A schema within a grammar; its own options, if it has some, are checked like any keyword."""
    return make_schema(place, schema, closes_objects) | options


def _make_tags(place: str, value: str | dict[str, Any], options: dict[str, Any], closes_objects: bool) -> str:
    """Free text, in which each trigger is the beginning of a structure: begin, JSON of its schema, end."""
    tag = read_json(place, value)
    _check_tag(place, tag)
    rules: list[str] = []
    for number, structure in enumerate(cast(list[Any], tag["structures"])):
        where = f"{place}.structures[{number}]"
        _check_structure(where, structure)
        begin = structure["begin"]
        trigger = next(filter(begin.startswith, tag["triggers"]), None)
        if trigger is None:
            raise SamplingParamsError(f"{where}.begin", begin, "a text that begins with one of the triggers")
        schema = _make_part(f"{where}.schema", structure["schema"], options, closes_objects)
        parts = [quote(begin[len(trigger) :]), f"%json {to_json(schema)}", quote(structure["end"])]
        body = " ".join(part for part in parts if part != '""')
        rules.append(
            f"tag_{number}_trigger[lazy]: TEXT {quote(trigger)}\ntag_{number}: tag_{number}_trigger {body}"
        )
    names = " | ".join(f"tag_{number}" for number in range(len(rules)))
    return "\n".join(["%llguidance {}", f"start: ({names})* last", "last: TEXT", r"TEXT: /(.|\n)*/", *rules])


def _check_tag(place: str, tag: Any) -> None:
    if not isinstance(tag, dict):
        raise SamplingParamsError(place, tag, "an object with structures and triggers")
    _check_fields(place, cast(dict[str, Any], tag), _TAG_FIELDS)
    if tag.get("type", "structural_tag") != "structural_tag":
        raise SamplingParamsError(f"{place}.type", tag["type"], "'structural_tag'")
    for name in ("structures", "triggers"):
        if not isinstance(tag.get(name), list) or not tag[name]:
            raise SamplingParamsError(f"{place}.{name}", tag.get(name), "a list that is not empty")
    for number, trigger in enumerate(tag["triggers"]):
        if not isinstance(trigger, str) or not trigger:
            raise SamplingParamsError(f"{place}.triggers[{number}]", trigger, "a text that is not empty")


def _check_structure(place: str, structure: Any) -> None:
    if not isinstance(structure, dict):
        raise SamplingParamsError(place, structure, "an object with begin, schema and end")
    _check_fields(place, cast(dict[str, Any], structure), _STRUCTURE_FIELDS)
    for name in ("begin", "end"):
        if not isinstance(structure.get(name), str):
            raise SamplingParamsError(f"{place}.{name}", structure.get(name), "a text")
    if not isinstance(structure.get("schema"), dict):
        raise SamplingParamsError(f"{place}.schema", structure.get("schema"), "a JSON schema")


def _check_fields(place: str, fields: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in fields:
        if name not in known:
            allowed = f"one of {', '.join(known)}{did_you_mean(name, known)}"
            raise SamplingParamsError(f"{place}.{name}", fields[name], allowed)
