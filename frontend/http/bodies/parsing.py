"""A request's body or fields -> a Struct, by msgspec; mistakes name field, value and what is allowed.

A body's kind may have two tables for that, by a path without places in lists: CHOICES says what is allowed
where values are listed, KNOWN_TYPES which types an object may have, and what is said of another.

What a large body costs to decode is told before it is: msgspec holds the interpreter meanwhile. Megabytes of
text or token ids take milliseconds; as many numbers that are hard to round, or little lists, take seconds.
Only what stands outside of strings counts: in a text every sign is as cheap as any other.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Any, TypeVar, cast

import msgspec
import msgspec.inspect
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from ....ipc.decoding import convert, decode_json, make_json_decoder
from ....ipc.errors import describe_allowed, describe_refusal, did_you_mean, shorten_name
from ....ipc.params.structured_outputs import RENAMED_FIELDS
from ..errors import ApiError, FieldError, is_ollama_path, missing_field
from ..headers import find_header
from ..limits import (
    MAX_JSON_CONTAINERS,
    MAX_JSON_FLOATS,
    MAX_JSON_LONG_NUMBERS,
    MAX_JSON_STRINGS,
    MAX_JSON_VALUES,
)
from .other_fields import (
    ITEM_FIELDS,
    MESSAGE_FIELDS,
    PART_FIELDS,
    REQUEST_FIELDS,
    TOOL_FIELDS,
    take_other_fields,
)
from .schema import SharedFields

BODY_EXTENSION = "quire.note_body"  # scope["extensions"]: has the connection look how much it still stores

_AT = " - at `$"  # and a path, at the end of msgspec's messages
_UNKNOWN = "Object contains unknown field `"
_MISSING = "Object missing required field `"
_FLOAT = "got `float`"
_INVALID = ("Invalid value ", "Invalid enum value ")
_IGNORES = "; the server's option --unknown-fields ignore leaves unknown ones out"
# pydantic's words for a bound, which clients of vLLM look for.
_BOUNDS = {
    ">=": ("greater_than_equal", "greater than or equal to"),
    "<=": ("less_than_equal", "less than or equal to"),
    ">": ("greater_than", "greater than"),
    "<": ("less_than", "less than"),
}
_BOUND = re.compile(r"Expected `(?:int|float)[^`]*` (>=|<=|>|<) (\S+)$")
# vLLM's words, by the field that is not there or is null.
NEEDS_PROMPT = "Either prompt or prompt_embeds must be provided and non-empty."
_REQUIRED = {
    "prompt": NEEDS_PROMPT,
    "response_format.json_schema": (
        "When response_format type is 'json_schema', the 'json_schema' field must be provided."
    ),
}
_MAX_SAID = 200  # characters of what msgspec says, which may be what it was given
_PLACE = re.compile(r"\[\d+\]")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")

R = TypeVar("R")
_Find = Callable[[str], object]
_MAX_EXACT = 2**53  # floats below it have no neighbour that is another integer
MAX_CHEAP_BYTES = 2**16  # nothing of that size takes long
_GZIP = b"\x1f\x8b"  # at its beginning
_LONG_NUMBER = b"0" * 24
_DIGITS_TO_0 = bytes.maketrans(b"123456789", b"000000000")
T = TypeVar("T", bound=msgspec.Struct)


async def parse_request(request: Request, parse: Callable[[bytes], R]) -> R:
    """What `parse` makes of the body. Raises ApiError, or ClientDisconnect when the client has left."""
    header = find_header(request.scope["headers"], b"content-type").decode("latin-1")
    content_type = header.partition(";")[0].strip().lower()
    if content_type != "application/json" and not _is_sent_by_curl(request.scope, content_type):
        # It also keeps web pages out: a browser sends JSON to another site only when that site agrees.
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            describe_refusal("content-type", content_type, "application/json"),
            code="unsupported_media_type",
            headers={"connection": "close"},
        )
    message = await request.receive()  # the body whole, and as large as it may be: so connections have it
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    body: bytes = message["body"]
    del message
    try:
        if len(body) <= MAX_CHEAP_BYTES:
            return parse(_find_utf8(body))
        return await asyncio.to_thread(_check_and_parse, body, parse)  # the loop turns between its passes
    finally:
        del body
        if (note_body := request.scope.get("extensions", {}).get(BODY_EXTENSION)) is not None:
            note_body()


def _is_sent_by_curl(scope: Scope, content_type: str) -> bool:
    """Whether it is JSON as the examples of Ollama's documents send it: as a form, by what is no browser.

    A browser names the page (Origin) with what it sends to another site.
    """
    is_form = content_type in ("", "application/x-www-form-urlencoded")
    is_from_page = any(find_header(scope["headers"], name) for name in (b"origin", b"sec-fetch-site"))
    return is_form and not is_from_page and is_ollama_path(scope["path"])


def _check_and_parse(body: bytes, parse: Callable[[bytes], R]) -> R:
    body = _find_utf8(body)
    check_json_cost(body)
    return parse(body)


def _find_utf8(body: bytes) -> bytes:
    """A JSON text as msgspec reads it: some clients write it with a mark of the order of bytes, or as UTF-16.

    What it is tells the beginning (as to Python's json, and so to vLLM), never a charset in a header.
    """
    if body.startswith(_GZIP):
        text = "body: expected JSON; this is gzip, and no content-encoding says so"
        raise ApiError(HTTPStatus.BAD_REQUEST, text, code="invalid_json")
    encoding = json.detect_encoding(body[:4])
    try:
        return body if encoding == "utf-8" else body.decode(encoding).encode()
    except UnicodeDecodeError as error:
        text = f"body: expected JSON in UTF-8 ({error.reason} in {encoding})"
        raise ApiError(HTTPStatus.BAD_REQUEST, text, code="invalid_json") from None


def parse_body(body: bytes, kind: type[T], ignores_unknown: bool = False) -> T:
    """The Struct of a JSON text; raises ApiError with status 400.

    An unknown field that is null is as absent as a known one; those of other engines and clients are taken as
    other_fields.py says. A number is an integer if its value is, as in JSON schemas. ignores_unknown: any
    other unknown field is left out, but for an old name of what binds the answer.
    """
    try:
        try:
            return decode_json(body, kind)
        except msgspec.ValidationError as error:
            if not str(error).startswith(_UNKNOWN) and _FLOAT not in str(error):
                raise
        values = _decode_loosely(body)
        renamed = RENAMED_FIELDS if issubclass(kind, SharedFields) else ()
        _prune(values, _plan(kind), ignores_unknown, kept=renamed)
        return decode_json(msgspec.json.encode(values), kind)
    except msgspec.ValidationError as error:
        find = functools.partial(_find_value, body) if len(body) <= MAX_CHEAP_BYTES else None
        raise _explain(str(error), find, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(
            HTTPStatus.BAD_REQUEST, f"body: expected JSON ({error})", code="invalid_json"
        ) from None
    except RecursionError:
        raise ApiError(
            HTTPStatus.BAD_REQUEST, "body: expected JSON of less depth", code="invalid_json"
        ) from None


def make_struct(values: dict[str, Any], kind: type[T], ignores_unknown: bool = False) -> T:
    """The Struct of fields that came in another form than JSON, which may lose some; as `parse_body`."""
    try:
        try:
            return convert(values, kind)
        except msgspec.ValidationError as error:
            if not str(error).startswith(_UNKNOWN):
                raise
        _prune(values, _plan(kind), ignores_unknown)
        return convert(values, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), functools.partial(_follow, values), kind) from None


def _read_float(text: str) -> float | int:
    number = float(text)
    if math.isinf(number):
        raise ValueError("Number out of range")
    return int(number) if number.is_integer() and abs(number) < _MAX_EXACT else number


_decode_loosely = make_json_decoder(cast(type[Any], Any), _read_float)


class _Plan:
    """What values of a type may have in them. items: of lists; structs: of objects, by tag."""

    def __init__(self) -> None:
        self.items: _Plan | None = None
        self.tag_field = ""
        self.structs: dict[Any, tuple[bool, set[str], dict[str, _Plan]]] = {}


@functools.cache
def _plan(kind: type[msgspec.Struct]) -> _Plan:
    return _make_plan(msgspec.inspect.type_info(kind)) or _Plan()


def _make_plan(kind: msgspec.inspect.Type) -> _Plan | None:
    """None where there are no Structs."""
    if isinstance(kind, msgspec.inspect.Metadata):
        return _make_plan(kind.type)
    plan = _Plan()
    for member in kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,):
        if isinstance(member, msgspec.inspect.ListType):
            plan.items = _make_plan(member.item_type)
        elif isinstance(member, msgspec.inspect.StructType):
            inner = {field.encode_name: _make_plan(field.type) for field in member.fields}
            plan.tag_field = member.tag_field or ""
            deeper = {name: made for name, made in inner.items() if made is not None}
            plan.structs[member.tag] = member.forbid_unknown_fields, {*inner, plan.tag_field}, deeper
    return plan if plan.items or plan.structs else None


# By the place without numbers.
_OTHER_FIELDS = {
    "": REQUEST_FIELDS,
    "messages[]": MESSAGE_FIELDS,
    "messages[].content[]": PART_FIELDS,
    "input[].content[]": PART_FIELDS,
    "input[]": ITEM_FIELDS,
    "tools[]": TOOL_FIELDS,
    "tools[].tools[]": TOOL_FIELDS,
}


def _prune(value: Any, plan: _Plan, takes_all: bool, place: str = "", kept: Collection[str] = ()) -> None:
    """Take unknown fields out of a decoded value's objects: all but `kept`, or those that ask for nothing."""
    if isinstance(value, list) and plan.items is not None:
        for number, item in enumerate(cast(list[Any], value)):
            _prune(item, plan.items, takes_all, f"{place}[{number}]")
    elif isinstance(value, dict) and plan.structs:
        fields = cast(dict[str, Any], value)
        tag = fields.get(plan.tag_field) if plan.tag_field else None
        tag = tag if tag is None or isinstance(tag, str) else ""  # which none is
        forbids, known, deeper = plan.structs.get(tag, (False, set[str](), {}))
        if forbids and (rows := _OTHER_FIELDS.get(_PLACE.sub("[]", place))):
            take_other_fields(fields, known, rows, place)
        for name in fields.keys() - known if forbids else ():
            if fields[name] is None or (takes_all and name not in kept):
                del fields[name]
        for name in deeper.keys() & fields.keys():
            _prune(fields[name], deeper[name], takes_all, f"{place}.{name}" if place else name)


def _explain(text: str, find: _Find | None, kind: type[msgspec.Struct]) -> ApiError:
    """msgspec's message in the house's form. It may hold a name or a value of the body, of any length.

    `find`: the value at a path; None when that is dear.
    """
    what, separator, path = text.rpartition(_AT)
    if not separator:
        what, path = text, ""
    path = path.removeprefix(".").removesuffix("`")
    if what.startswith((_UNKNOWN, _MISSING)) and (wrong := _find_wrong_type(path, find, kind)) is not None:
        return wrong
    if what.startswith(_UNKNOWN):
        name = _join(path, what[len(_UNKNOWN) : -1])
        allowed = _describe_unknown(path, what[len(_UNKNOWN) : -1], kind)
        return _make_field_error(name, find, allowed, "unknown_field")
    if what.startswith(_MISSING):
        name = _join(path, what[len(_MISSING) : -1])
        return missing_field(name, _REQUIRED.get(name, ""))
    if what.startswith(_INVALID):  # and the value follows
        choices: dict[str, str] = getattr(kind, "CHOICES", {})
        allowed = choices.get(_PLACE.sub("[]", path), "one of the values in /openapi.json")
        return _make_field_error(path, find or (lambda _: _read_value(what)), allowed)
    allowed = what[:1].lower() + what[1:_MAX_SAID]
    if what.endswith("got `null`") and path in _REQUIRED:
        allowed = _REQUIRED[path]
    elif bound := _BOUND.match(what):
        name, words = _BOUNDS[bound[1]]
        allowed += f" ({name}: input should be {words} {bound[2]})"
    return _make_field_error(path or "body", find, allowed)


def _find_wrong_type(path: str, find: _Find | None, kind: type[msgspec.Struct]) -> ApiError | None:
    """The error of an object of an unknown type: of another type its fields are not what is wrong."""
    known_types: dict[str, tuple[Collection[str], str]] = getattr(kind, "KNOWN_TYPES", {})
    known, allowed = known_types.get(_PLACE.sub("[]", path), ((), ""))
    tag = find(f"{path}.type") if known and find is not None else None
    is_wrong = isinstance(tag, str) and tag not in known
    return FieldError(f"{path}.type", tag, allowed) if is_wrong else None


def _describe_unknown(path: str, name: str, kind: type[msgspec.Struct]) -> str:
    row = _OTHER_FIELDS.get(_PLACE.sub("[]", path), {}).get(name)
    if row is not None and (not row.becomes or row.becomes.partition(".")[0] in kind.__struct_fields__):
        # What binds the answer is not left out, whatever the server's option says.
        return f"no such field: {row.hint}{'' if name in RENAMED_FIELDS else _IGNORES}"
    # Only the request's own fields are close enough to a typing mistake to guess from.
    return f"no such field{'' if path else did_you_mean(name, kind.__struct_fields__)}{_IGNORES}"


def _make_field_error(field: str, find: _Find | None, allowed: str, code: str | None = None) -> ApiError:
    """A FieldError with the value, if it can be found."""
    shown = shorten_name(field)
    if find is None or shown != field:
        return ApiError(
            HTTPStatus.BAD_REQUEST, f"{shown}: {describe_allowed(allowed)}", param=field, code=code
        )
    return FieldError(field, find("" if field == "body" else field), allowed, code)


def _read_value(what: str) -> object:
    """The value that msgspec says is none of the allowed ones."""
    _, quote, value = what.partition("'")
    return value.removesuffix("'") if quote else _Literal(what.rpartition(" ")[2])


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _find_value(body: bytes, path: str) -> object:
    """As `_follow`, for which the body is decoded once more."""
    try:
        return _follow(json.loads(body, parse_float=_read_number, parse_int=_read_number), path)
    except (ValueError, RecursionError):
        return None


def _follow(value: Any, path: str, otherwise: object = None) -> object:
    """The value at msgspec's path such as `messages[0].role`; `otherwise` when it cannot be followed."""
    try:
        for place, name in _STEP.findall(path):
            value = cast(list[Any], value)[int(place)] if place else cast(dict[str, Any], value)[name]
    except (LookupError, TypeError, ValueError):
        return otherwise
    return value


class _Literal:
    """A number that is shown as it was written, since nothing that computes can hold it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _read_number(text: str) -> object:
    try:
        number = int(text) if text.lstrip("-").isdigit() else float(text)
        return number if abs(number) < math.inf else _Literal(text)
    except ValueError:  # more digits than Python converts
        return _Literal(text)


def check_json_cost(body: bytes) -> None:
    """Raise ApiError 400 for a text that would take longer than some 50 ms to decode."""
    if len(body) <= MAX_CHEAP_BYTES:
        return
    _check("strings", _count_strings(body), MAX_JSON_STRINGS)
    rest = _cut_strings(body)
    _check("values", rest.count(b","), MAX_JSON_VALUES)
    _check("lists and objects", rest.count(b"[") + rest.count(b"{"), MAX_JSON_CONTAINERS)
    num_floats = max(rest.count(b"."), rest.count(b"e") + rest.count(b"E"))
    _check("floats", num_floats, MAX_JSON_FLOATS)
    num_long = rest.translate(_DIGITS_TO_0).count(_LONG_NUMBER)
    _check(f"times {len(_LONG_NUMBER)} digits in a row", num_long, MAX_JSON_LONG_NUMBERS)


def _count_strings(body: bytes) -> int:
    """At least as many as there are; escaped quotes are few, or dear themselves."""
    return (body.count(b'"') - body.count(b'\\"')) // 2


def _cut_strings(body: bytes) -> bytes:
    """What stands between strings."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(body.split(b'"')[::2])


def _check(what: str, count: int, allowed: int) -> None:
    if count > allowed:
        text = f"body={count} {what}: expected at most {allowed} in JSON of more than {MAX_CHEAP_BYTES} bytes"
        raise ApiError(HTTPStatus.BAD_REQUEST, text, code="json_too_complex")
