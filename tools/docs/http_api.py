"""docs/http.md: every route with its fields, an example and its answer, from the OpenAPI document."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, cast

from ...frontend.http.app import create_app
from ...frontend.http.bodies.schema import SamplingFields, SilentFields
from ...frontend.http.dialects.table import ROUTES
from ...frontend.http.engines.served_models import ServedModels, ServerParts
from ...frontend.http.limits import Limits, list_limits
from ...frontend.http.options import ServerOptions
from ...ipc.params.param_fields import MAX_INT
from ...ipc.protocol.rights import list_open
from ..markdown import format_table
from .examples import find_example

# What fields of requests mean whose declarations do not say it; a name means the same in every route.
FIELD_TEXTS: dict[str, str] = json.loads(Path(__file__).with_name("field_texts.json").read_text())
_RULES = {route.body.__name__: route.refused for route in ROUTES.values() if route.refused}
_NO_BOUND = f" to {MAX_INT:,}"  # only what an integer can hold
_TYPE_WORDS = {"string": "text", "array": "list", "boolean": "true or false"}
_HEAD = ("field", "type", "meaning")
_SILENT_NAMES = SilentFields.__struct_fields__


@functools.cache
def make_document() -> dict[str, Any]:
    """The OpenAPI document of a server with every route."""
    options = ServerOptions(enable_tokenizer_info_endpoint=True)
    return create_app(ServedModels(ServerParts(options), [])).routes.document


def render_open_routes() -> str:
    """Routes that need no key, and gRPC's methods."""
    return f"Without a key: {', '.join(f'`{path}`' for path in list_open())}.\n"


def render_routes() -> str:
    """A list of the routes, and a section for each."""
    document = make_document()
    schemas: dict[str, Any] = document["components"]["schemas"]
    operations = [
        (method, path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    index = [(f"`{method.upper()} {path}`", operation["summary"]) for method, path, operation in operations]
    sections = [part for entry in operations for part in _render_route(*entry, schemas)]
    return "\n".join([format_table(("route", "does"), index), *sections])


def _render_route(
    method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]
) -> Iterator[str]:
    yield f"## {method.upper()} {path}\n"
    yield f"{operation['summary']}.\n"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body and "anyOf" in body:
        yield f"Takes {_describe_type(body)}.\n"
    elif body:
        yield from _render_fields(str(body["$ref"]).rpartition("/")[2], schemas)
    if example := find_example(method, path):
        yield example.render()


def _render_fields(kind: str, schemas: dict[str, Any]) -> Iterator[str]:
    """Fields of a request that are its own, and the names of those that it shares."""
    properties: dict[str, Any] = schemas[kind]["properties"]
    shared = [name for name in properties if name in _SHARED_NAMES]
    required = set(schemas[kind].get("required", ()))
    is_split = len(shared) > len(_SHARED_NAMES) / 3
    hidden = {*_SILENT_NAMES, *(shared if is_split else ())} - required
    rows = _list_fields(
        {name: schema for name, schema in properties.items() if name not in hidden}, kind, required
    )
    yield format_table(_HEAD, rows)
    if is_split:
        names = ", ".join(f"`{name}`" for name in shared)
        has_all = len(shared) == len(_SHARED_NAMES)
        listed = "" if has_all else f": {names}"
        yield f"And {'all ' if has_all else ''}[sampling fields](#sampling-fields){listed}.\n"


def _list_fields(
    properties: dict[str, Any], kind: str, required: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """Rows, required fields first."""
    rules = _RULES.get(kind, {})
    for name, schema in sorted(properties.items(), key=lambda item: item[0] not in required):
        meaning = (
            f"only {rules[name][0]}" if name in rules else _find_text(schema) or FIELD_TEXTS.get(name, "")
        )
        notes = ["required"] if name in required else []
        yield f"`{name}`", _tell_value(schema), "; ".join([*notes, *([meaning] if meaning else [])])


def _describe_type(field: dict[str, Any]) -> str:
    """A field's type and range in words: 'integer 1 to 128', 'text or list of text'."""
    if "anyOf" in field:
        kinds = [_describe_type(kind) for kind in field["anyOf"] if kind.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    kind = str(field.get("type", "anything"))
    kind = _TYPE_WORDS.get(kind, kind)
    if kind == "list" and field.get("items"):
        kind = f"list of {_describe_type(field['items'])}"
    low = field.get("minimum", field.get("exclusiveMinimum"))
    high = field.get("maximum", field.get("exclusiveMaximum"))
    if low is not None:
        kind += f", {'above' if 'exclusiveMinimum' in field else 'from'} {low:,}"
    return kind if high is None else f"{kind} to {high:,}"


def _find_text(schema: dict[str, Any]) -> str:
    """What a field means, where its declaration says it."""
    texts = (part.get("description", "") for part in (schema, *schema.get("anyOf", ())) if "$ref" not in part)
    return next(filter(None, texts), "")


def render_sampling_fields() -> str:
    """Those that completions and chats share."""
    properties = make_document()["components"]["schemas"]["CompletionRequest"]["properties"]
    named = {name: properties[name] for name in _SHARED_NAMES}
    return format_table(_HEAD, _list_fields(named, "CompletionRequest", ()))


def render_types() -> str:
    """What the requests' fields are made of, a line for each type."""
    document = make_document()
    schemas: dict[str, Any] = document["components"]["schemas"]
    bodies = [
        operation["requestBody"]
        for operations in document["paths"].values()
        for operation in operations.values()
        if "requestBody" in operation
    ]
    requests = dict.fromkeys(name for body in bodies for name in _find_references(body))
    known: dict[str, None] = dict.fromkeys(requests)
    for name in (pending := list(requests)):
        new = [type_name for type_name in _find_references(schemas[name]) if type_name not in known]
        known |= dict.fromkeys(new)
        pending += new
    rows = [
        (f"`{type_name}`", _tell_fields(schemas[type_name]))
        for type_name in sorted(known)
        if type_name not in requests
    ]
    return format_table(("type", "is"), rows)


def _find_references(schema: Any) -> Iterator[str]:
    """Names of the types that a schema is made of."""
    if isinstance(schema, dict):
        parts = cast(dict[str, Any], schema)
        if isinstance(parts.get("$ref"), str):
            yield str(parts["$ref"]).rpartition("/")[2]
        yield from (name for part in parts.values() for name in _find_references(part))
    elif isinstance(schema, list):
        yield from (name for part in cast(list[Any], schema) for name in _find_references(part))


def _tell_fields(schema: dict[str, Any]) -> str:
    if "properties" not in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", ())) or _describe_type(schema)
    required = schema.get("required", ())
    named = ((name, _tell_value(field)) for name, field in schema["properties"].items())
    return "; ".join(f"`{name}`{' (required)' if name in required else ''}: {text}" for name, text in named)


def _tell_value(schema: dict[str, Any]) -> str:
    """A type, or the words that are allowed."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    texts = [
        ", ".join(f"`{word if isinstance(word, str) else json.dumps(word)}`" for word in kind["enum"])
        if "enum" in kind
        else _describe_type(kind).replace(_NO_BOUND, "")
        for kind in kinds
    ]
    return " or ".join(texts) or "null"


def render_silent_fields() -> str:
    """Names of the fields that are taken and left."""
    return f"{', '.join(f'`{name}`' for name in _SILENT_NAMES)}\n"


def render_limits() -> str:
    """Every limit of a server that nobody has set otherwise."""
    rows = [
        (f"`{limit.name}`", f"{limit.value:.12g}", limit.meaning, limit.answer)
        for limit in list_limits(Limits())
    ]
    return format_table(("limit", "value", "of", "a request past it gets"), rows)


_SHARED_NAMES = [name for name in SamplingFields.__struct_fields__ if name not in _SILENT_NAMES]
