"""A request's response_format, structured_outputs or text.format -> the grammar that its answer follows.

Grammars are compiled in a text process, where what takes too long or kills the library ends one request.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from ....ipc.params.structured_outputs import StructuredOutputsFields, StructuredOutputsParams
from ....ipc.protocol.messages import MAX_GRAMMAR_LENGTH
from ...formats.grammars.rules import OutputRules
from ...formats.schemas.grammar_cache import make_key
from ...requests.input_processor import check_has_end
from ..bodies import formats as body
from ..bodies.responses import ResponsesRequest
from ..bodies.schema import SamplingFields
from ..caller import Caller
from ..errors import FieldError
from ..serving import Serving
from ..text_process.jobs import GrammarJob, Text

_MAX_SOURCE_BYTES = 4 * MAX_GRAMMAR_LENGTH  # more than that makes no grammar that may be sent


class FormatSource(NamedTuple):
    """What a grammar is made of: what the answer looks like, rules of the turn that it is part of, or both.

    `place`: the request's field that `params` were made of, None for structured_outputs. is_strict: their
    JSON schema has to keep OpenAI's rules.
    """

    params: StructuredOutputsParams | None
    place: str | None = None
    is_strict: bool = False
    rules: OutputRules | None = None


def find_format(request: SamplingFields | ResponsesRequest) -> FormatSource | None:
    """What the request's answer has to look like; None for any text. Raises InputErrors."""
    if isinstance(request, ResponsesRequest):
        field, source = (
            "text.format",
            _read_format(request.text.format if request.text else None, "text.format"),
        )
    else:
        field, source = "response_format", _read_format(request.response_format, "response_format")
    given = request.structured_outputs
    if given is None:
        return source
    if source is not None:
        raise FieldError("structured_outputs", "given", f"none beside a {field} that is not text")
    return FormatSource(StructuredOutputsParams(**_as_fields(given)))


async def compile_format(serving: Serving, source: FormatSource, caller: Caller) -> str:
    """The grammar's text, '' where rules enforce nothing. Raises ApiError."""
    params, rules = source.params, source.rules
    if rules is not None and not rules.binds(params is not None):
        rules = None
    if params is None and rules is None:
        return ""
    check_has_end(serving.llm.facts, params)
    key = make_key(params, source.is_strict, rules)
    fields = None if params is None else StructuredOutputsFields(**_as_fields(params))
    job = GrammarJob(fields=fields, place=source.place, is_strict=source.is_strict, rules=rules)
    if len(key) > _MAX_SOURCE_BYTES:
        raise FieldError(_name_source(source), f"{len(key)} bytes", f"at most {_MAX_SOURCE_BYTES}")
    if (known := serving.grammars.find(key)) is not None:
        return known
    answer = await serving.text.run(job, caller.tenant)
    assert isinstance(answer, Text)
    serving.grammars.keep(key, answer.text)
    return answer.text


def _name_source(source: FormatSource) -> str:
    if source.params is not None:
        return source.place or f"structured_outputs.{source.params.kind}"
    return "tools" if source.rules is None else source.rules.tools_place


def _as_fields(fields: StructuredOutputsFields) -> dict[str, Any]:
    return {name: getattr(fields, name) for name in StructuredOutputsFields.__struct_fields__}


def _read_format(
    given: body.JsonSchemaFormat | body.StructuralTagFormat | body.ResponsesFormat | None, place: str
) -> FormatSource | None:
    match given:
        case body.JsonObjectFormat():
            return FormatSource(StructuredOutputsParams(json_object=True), place)
        case body.JsonSchemaFormat():
            return _read_schema(given.json_schema, f"{place}.json_schema.schema")
        case body.JsonSchema():
            return _read_schema(given, f"{place}.schema")
        case body.StructuralTagFormat():
            tag = msgspec.to_builtins(given)
            return FormatSource(StructuredOutputsParams(structural_tag=tag), place)
        case _:
            return None


def _read_schema(given: body.JsonSchema, place: str) -> FormatSource:
    if not given.schema:
        raise FieldError(place, given.schema, "a JSON schema that is not empty")
    return FormatSource(StructuredOutputsParams(json=given.schema), place, bool(given.strict))
