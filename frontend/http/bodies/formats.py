"""What requests say of how the answer has to look: OpenAI's response_format and text.format."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Verbosity = Literal["low", "medium", "high"]
SchemaName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$", max_length=64)]


class _Format(msgspec.Struct, tag_field="type", frozen=True, forbid_unknown_fields=True):
    """One of the kinds, which `type` names."""


class TextFormat(_Format, tag="text", frozen=True):
    """Any text."""


class JsonObjectFormat(_Format, tag="json_object", frozen=True):
    """Any JSON object; of the schema, where llama.cpp's clients give one."""

    schema: dict[str, Any] | None = None


class JsonSchema(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """JSON that satisfies a schema. strict: the schema keeps OpenAI's rules, or is refused."""

    name: SchemaName
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(_Format, tag="json_schema", frozen=True):
    """As `json_schema` says."""

    json_schema: JsonSchema


class StructuralTagFormat(_Format, tag="structural_tag", kw_only=True, frozen=True):
    """Free text with structures (begin, schema, end), each of which begins with a trigger."""

    structures: list[dict[str, Any]]
    triggers: list[str]


class ResponsesJsonSchemaFormat(
    JsonSchema, tag_field="type", tag="json_schema", frozen=True, forbid_unknown_fields=True
):
    """A schema as /v1/responses has it."""


# What needs no more than its type some clients send as a text.
ResponseFormat = (
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat | Literal["text", "json_object"]
)
ResponsesFormat = TextFormat | JsonObjectFormat | ResponsesJsonSchemaFormat


class ResponsesText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the text of a response has to look. verbosity: advice, which changes nothing here."""

    format: ResponsesFormat | None = None
    verbosity: Verbosity | None = None
