"""A request's response_format, structured_outputs or text.format -> the grammar that its answer follows.

Grammars are compiled in a text process, where what takes too long or kills the library ends one request.
"""

from __future__ import annotations

import msgspec

from ....ipc.params.structured_outputs import StructuredOutputsFields, StructuredOutputsParams
from ....ipc.protocol.messages import MAX_GRAMMAR_LENGTH
from ...formats.schemas.grammar_cache import make_key
from ...requests.input_processor import check_has_end
from ..bodies import formats as body
from ..bodies.schema import SamplingFields
from ..caller import Caller
from ..errors import FieldError
from ..serving import Serving
from ..text_process.jobs import GrammarJob, Text

_MAX_SOURCE_BYTES = 4 * MAX_GRAMMAR_LENGTH  # more than that makes no grammar that may be sent


def find_format(request: SamplingFields) -> GrammarJob | None:
    """As `read_format`, of a completions or chat request."""
    return read_format("response_format", request.response_format, request.structured_outputs)


def read_format(
    field: str,
    response_format: body.ResponseFormat | body.ResponsesFormat | None,
    outputs: StructuredOutputsFields | None,
) -> GrammarJob | None:
    """What the request's answer has to look like; None for any text. Raises InputErrors.

    field: what the request calls `given`.
    """
    source = _read_format(response_format, field)
    if outputs is None:
        return source
    if source is not None:
        raise FieldError("structured_outputs", "given", f"none beside a {field} that is not text")
    return GrammarJob(params=StructuredOutputsParams(**msgspec.structs.asdict(outputs)))


async def compile_format(serving: Serving, source: GrammarJob, caller: Caller) -> str:
    """The grammar's text, '' where rules enforce nothing. Raises ApiError."""
    if source.rules is not None and not source.rules.binds(source.params is not None):
        source = msgspec.structs.replace(source, rules=None)
    if source.params is None and source.rules is None:
        return ""
    check_has_end(serving.llm.facts, source.params)
    key = make_key(source.params, source.is_strict, source.rules)
    if len(key) > _MAX_SOURCE_BYTES:
        raise FieldError(_name_source(source), f"{len(key)} bytes", f"at most {_MAX_SOURCE_BYTES}")
    if (known := serving.grammars.find(key)) is not None:
        return known
    answer = await serving.text.run(source, caller.tenant)
    assert isinstance(answer, Text)
    serving.grammars.keep(key, answer.text)
    return answer.text


def _name_source(source: GrammarJob) -> str:
    if source.params is not None:
        return source.place or f"structured_outputs.{source.params.kind}"
    return "tools" if source.rules is None else source.rules.tools_place


def _read_format(
    response_format: body.ResponseFormat | body.ResponsesFormat | None, place: str
) -> GrammarJob | None:
    match response_format:
        case body.JsonObjectFormat(schema=schema) if schema:
            return GrammarJob(params=StructuredOutputsParams(json=schema), place=f"{place}.schema")
        case body.JsonObjectFormat() | "json_object":
            return GrammarJob(params=StructuredOutputsParams(json_object=True), place=place)
        case body.JsonSchemaFormat():
            return _read_schema(response_format.json_schema, f"{place}.json_schema.schema")
        case body.JsonSchema():
            return _read_schema(response_format, f"{place}.schema")
        case body.StructuralTagFormat():
            tag = msgspec.to_builtins(response_format)
            return GrammarJob(params=StructuredOutputsParams(structural_tag=tag), place=place)
        case _:
            return None


def _read_schema(json_schema: body.JsonSchema, place: str) -> GrammarJob:
    if not json_schema.schema:
        raise FieldError(place, json_schema.schema, "a JSON schema that is not empty")
    params = StructuredOutputsParams(json=json_schema.schema)
    return GrammarJob(params=params, place=place, is_strict=bool(json_schema.strict))
