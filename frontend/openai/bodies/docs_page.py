"""/docs: the OpenAPI document as one page without scripts, so that it needs no network."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from typing import Any

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem}
body{margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h2{font-size:1rem;margin:2rem 0 .3rem;font-family:ui-monospace,monospace}
table{border-collapse:collapse;width:100%;font-size:.9rem}
td,th{text-align:left;vertical-align:top;padding:.2rem .6rem;border-bottom:1px solid #ddd}
code{font-family:ui-monospace,monospace}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}td,th{border-color:#444}a{color:#8bf}}
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
CONTENT_SECURITY_POLICY = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; frame-ancestors 'none'"
_TYPE_WORDS = {"string": "text", "array": "list", "boolean": "true or false"}
_NOTES = {"stream": "answer as server-sent events", "model": "the served model's name; it may be left out"}


def render_docs(document: dict[str, Any]) -> str:
    """The page: every route with its fields and its answers."""
    schemas: dict[str, Any] = document["components"]["schemas"]
    routes = [
        _render_route(method, path, operation, schemas)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    info = document["info"]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        f"<style>{_STYLE}</style><h1>{escape(info['title'])} {escape(info['version'])}</h1>"
        f'<p>{escape(info["description"])} The whole description for programs: <a href="openapi.json">'
        f"/openapi.json</a>. A field that is not listed is refused (see --unknown-fields).</p>"
        f"{''.join(routes)}</html>"
    )


def _render_route(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    fields = ""
    if body and "anyOf" in body:
        fields = f"<p>Takes {escape(describe_type(body))}</p>"
    elif body:
        fields = _render_fields(schemas[_name_of(body)])
    answers = ", ".join(
        f"{status} {escape(answer.get('description', ''))}"
        for status, answer in operation["responses"].items()
    )
    return (
        f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation.get('summary', ''))}</p>"
        f"{fields}<p>Answers: {answers}</p>"
    )


def _render_fields(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        f"<tr><td><code>{escape(name)}</code><td>{escape(describe_type(field))}"
        f"<td>{'required' if name in required else ''}<td>{escape(_NOTES.get(name, ''))}"
        for name, field in sorted(
            schema.get("properties", {}).items(), key=lambda item: item[0] not in required
        )
    ]
    return f"<table>{''.join(rows)}</table>"


def describe_type(field: dict[str, Any]) -> str:
    """A field's type and range in words: 'integer 1 to 128', 'text or list of text'."""
    if "anyOf" in field:
        kinds = [describe_type(one) for one in field["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in field:
        return _name_of(field)
    kind = str(field.get("type", "anything"))
    kind = _TYPE_WORDS.get(kind, kind)
    if kind == "list" and field.get("items"):
        kind = f"list of {describe_type(field['items'])}"
    low = field.get("minimum", field.get("exclusiveMinimum"))
    high = field.get("maximum", field.get("exclusiveMaximum"))
    if low is not None:
        kind += f", {'above' if 'exclusiveMinimum' in field else 'from'} {low:,}"
    return kind if high is None else f"{kind} to {high:,}"


def _name_of(reference: dict[str, Any]) -> str:
    return str(reference["$ref"]).rpartition("/")[2]
