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
import operator
import re
from collections.abc import Callable, Collection
from http import HTTPStatus
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT
from starlette.requests import ClientDisconnect, Request

from ....ipc.errors import did_you_mean, shorten, shorten_name
from ....ipc.params.structured_outputs import RENAMED_FIELDS
from ..errors import ApiError, FieldError, missing_field
from ..headers import find_header
from ..limits import (
    MAX_JSON_CONTAINERS,
    MAX_JSON_FLOATS,
    MAX_JSON_LONG_NUMBERS,
    MAX_JSON_STRINGS,
    MAX_JSON_VALUES,
)
from .schema import SharedFields

BODY_EXTENSION = "quire.note_body"  # scope["extensions"]: has the connection look how much it still stores

_AT = " - at `$"  # and a path, at the end of msgspec's messages
_UNKNOWN = "Object contains unknown field `"
_MISSING = "Object missing required field `"
_INVALID = ("Invalid value ", "Invalid enum value ")
_IGNORES = "; --unknown-fields ignore leaves unknown ones out"
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
# Kinds of objects in which unknown fields may be null: each costs decoding again, of a large body some 50 ms.
_MAX_NULL_PLACES = 6
_MAX_NULL_PLACES_OF_LARGE = 1
_MAX_SAID = 200  # characters of what msgspec says, which may be what it was given
_PLACE = re.compile(r"\[\d+\]")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")

R = TypeVar("R")
_Find = Callable[[str], object]
MAX_CHEAP_BYTES = 2**16  # nothing of that size takes long
_LONG_NUMBERS = 100  # 40 us at 700 digits
_LONG_NUMBER = b"0" * 24
_DIGITS_TO_0 = bytes.maketrans(b"123456789", b"000000000")
T = TypeVar("T", bound=msgspec.Struct)


async def parse_request(request: Request, parse: Callable[[bytes], R], max_body_bytes: int) -> R:
    """What `parse` makes of the body. Raises ApiError, or ClientDisconnect when the client has left."""
    given = find_header(request.scope["headers"], b"content-type").decode("latin-1")
    content_type = given.partition(";")[0].strip().lower()
    if content_type != "application/json":
        # It also keeps web pages out: a browser sends JSON to another site only when that site agrees.
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"content-type={shorten(content_type)}: application/json",
            code="unsupported_media_type",
            headers={"connection": "close"},
        )
    body = await _read_body(request, max_body_bytes)
    try:
        if len(body) > MAX_CHEAP_BYTES:  # in a thread, which lets the loop turn between its passes
            await asyncio.to_thread(check_json_cost, body)
        return parse(body)
    finally:
        del body
        if (note_body := request.scope.get("extensions", {}).get(BODY_EXTENSION)) is not None:
            note_body()


def parse_body(body: bytes, kind: type[T]) -> T:
    """The Struct of a JSON text; raises ApiError with status 400."""
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            if not str(error).startswith(_UNKNOWN) or b"null" not in body:
                raise
            values = msgspec.json.decode(body)
            num_places = _MAX_NULL_PLACES if len(body) <= MAX_CHEAP_BYTES else _MAX_NULL_PLACES_OF_LARGE
            return _without_nulls(values, error, functools.partial(_decode_again, kind), num_places)
    except msgspec.ValidationError as error:
        find = functools.partial(_find_value, body) if len(body) <= MAX_CHEAP_BYTES else None
        raise _explain(str(error), find, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"body: JSON ({error})", code="invalid_json") from None
    except RecursionError:
        raise ApiError(HTTPStatus.BAD_REQUEST, "body: JSON of less depth", code="invalid_json") from None


def parse_leniently(body: bytes, kind: type[T]) -> T:
    """As `parse_body`; unknown fields are left out, but none that is an old name of what binds the answer."""
    request = parse_body(body, make_lenient_body(kind))
    for name, new_name in RENAMED_FIELDS.items():
        if (value := getattr(request, name, None)) is not None and name not in kind.__struct_fields__:
            raise FieldError(name, value, _describe_renamed(new_name), "unknown_field")
    return request


def make_struct(values: dict[str, Any], kind: type[T]) -> T:
    """The Struct of fields that came in another form than JSON; raises as `parse_body`."""
    try:
        try:
            return msgspec.convert(values, kind)
        except msgspec.ValidationError as error:
            return _without_nulls(values, error, functools.partial(msgspec.convert, type=kind))
    except msgspec.ValidationError as error:
        raise _explain(str(error), functools.partial(_follow, values), kind) from None


def _decode_again(kind: type[T], values: Any) -> T:
    return msgspec.json.decode(msgspec.json.encode(values), type=kind)


def _without_nulls(
    values: Any,
    error: msgspec.ValidationError,
    decode: Callable[[Any], T],
    num_places: int = _MAX_NULL_PLACES,
) -> T:
    """What `decode` makes of values where unknown fields are null: those are as absent as known ones.

    error: what it said of them. `values` lose the fields. Raises ValidationError for what is wrong otherwise.
    """
    for _ in range(num_places):
        what, _, path = str(error).partition(_AT)
        name = what[len(_UNKNOWN) : -1]
        if not what.startswith(_UNKNOWN) or _follow(values, _join(path[1:-1], name), "") is not None:
            raise error
        for one in _find_all(values, path[1:-1]):
            for key in [key for key, value in one.items() if value is None]:
                del one[key]
        try:
            return decode(values)
        except msgspec.ValidationError as again:
            error = again
    raise error


def _find_all(value: Any, path: str) -> list[dict[str, Any]]:
    """The objects at msgspec's path, of each list on it those at every place."""
    found = [value]
    for is_place, name in _STEP.findall(path):
        if is_place:
            found = [one for each in found if isinstance(each, list) for one in cast(list[Any], each)]
        else:
            found = [
                cast(dict[str, Any], one)[name] for one in found if isinstance(one, dict) and name in one
            ]
    return [cast(dict[str, Any], one) for one in found if isinstance(one, dict)]


async def _read_body(request: Request, max_body_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    has_more = True
    while has_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, has_more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > max_body_bytes:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"body={size} bytes: at most {max_body_bytes} (max_body_bytes)",
                code="body_too_large",
                headers={"connection": "close"},
            )
        if part:  # joining the only one copies nothing
            parts.append(part)
    return b"".join(parts)


def _explain(text: str, find: _Find | None, kind: type[msgspec.Struct]) -> ApiError:
    """msgspec's message in the house's form. It may hold a name or a value of the body, of any length.

    `find`: the value at a path; None when that is dear.
    """
    what, found, path = text.rpartition(_AT)
    if not found:
        what, path = text, ""
    path = path.removeprefix(".").removesuffix("`")
    if what.startswith((_UNKNOWN, _MISSING)) and (wrong := _find_wrong_type(path, find, kind)) is not None:
        return wrong
    if what.startswith(_UNKNOWN):
        name = _join(path, what[len(_UNKNOWN) : -1])
        if not path and name in RENAMED_FIELDS:
            return _make_field_error(name, find, _describe_renamed(RENAMED_FIELDS[name]), "unknown_field")
        # Only the request's own fields are close enough to a typing mistake to guess from.
        allowed = f"no such field{'' if path else did_you_mean(name, kind.__struct_fields__)}{_IGNORES}"
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
    found = find(f"{path}.type") if known and find is not None else None
    is_wrong = isinstance(found, str) and found not in known
    return FieldError(f"{path}.type", found, allowed) if is_wrong else None


def _describe_renamed(new_name: str) -> str:
    return f"no such field: it is {new_name}"


def _make_field_error(field: str, find: _Find | None, allowed: str, code: str | None = None) -> ApiError:
    """A FieldError with the value, if it can be found."""
    shown = shorten_name(field)
    if find is None or shown != field:
        return ApiError(HTTPStatus.BAD_REQUEST, f"{shown}: {allowed}", param=field, code=code)
    return FieldError(field, find("" if field == "body" else field), allowed, code)


def _read_value(what: str) -> object:
    """The value that msgspec says is none of the allowed ones."""
    _, found, value = what.partition("'")
    return value.removesuffix("'") if found else _Literal(what.rpartition(" ")[2])


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
        text = f"body={count} {what}: at most {allowed} in JSON of more than {MAX_CHEAP_BYTES} bytes"
        raise ApiError(HTTPStatus.BAD_REQUEST, text, code="json_too_complex")


def make_lenient(kind: type[T]) -> type[T]:
    """A subclass whose values, and those within them, have unknown fields left out when they are decoded."""
    return cast(type[T], _make_kind(kind))


def make_lenient_body(kind: type[T]) -> type[T]:
    """As make_lenient, of a whole body: a field that has another name today is still known, to be refused."""
    return cast(type[T], _make_body_kind(kind))


@functools.cache
def _make_body_kind(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    if not issubclass(kind, SharedFields):
        return _make_kind(kind)
    old = [(name, Any, None) for name in RENAMED_FIELDS]
    bases = (_make_kind(kind),)
    return msgspec.defstruct(kind.__name__, old, bases=bases, module=kind.__module__, kw_only=True)


@functools.cache
def _make_kind(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    hints = get_type_hints(kind, include_extras=True)
    changed: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(kind):
        hint = _relax(hints[field.name])
        if hint is hints[field.name]:
            continue
        if field.default_factory is not NODEFAULT:
            changed.append((field.name, hint, msgspec.field(default_factory=field.default_factory)))
        elif field.default is not NODEFAULT:
            changed.append((field.name, hint, field.default))
        else:
            changed.append((field.name, hint))
    config = kind.__struct_config__
    return msgspec.defstruct(
        kind.__name__,
        changed,
        bases=(kind,),
        module=kind.__module__,
        tag=config.tag,
        tag_field=config.tag_field,
        frozen=config.frozen,
        omit_defaults=config.omit_defaults,
        kw_only=True,
        forbid_unknown_fields=False,
    )


def is_lenient(request: msgspec.Struct) -> bool:
    """Whether a body was decoded as such a kind."""
    return not type(request).__struct_config__.forbid_unknown_fields


def _relax(hint: Any) -> Any:
    """A field's type with the lenient kinds; the same object where it has no kinds."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _make_kind(hint)
    origin, given = get_origin(hint), get_args(hint)
    if origin is None or not given:
        return hint
    inner = given[:1] if origin is Annotated else given
    relaxed = tuple(map(_relax, inner))
    if all(map(operator.is_, relaxed, inner)):
        return hint
    if origin is Annotated:
        return Annotated[(relaxed[0], *given[1:])]
    if origin in (Union, UnionType):
        return functools.reduce(operator.or_, relaxed)
    return origin[relaxed]
