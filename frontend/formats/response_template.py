"""A checkpoint's own `response_template` -> a format.

The data is transformers' (version 1 of `transformers/utils/chat_parsing`): fields with literals or regular
expressions where each begins and ends. Those expressions are read as literals with white space and names
between them; what says more is refused with its field's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from ...ipc.decoding import convert
from ...ipc.errors import ModelError
from .output_format import CallFormat, OutputFormat, ThinkingFormat

_THINKING_FIELDS = ("thinking", "reasoning_content", "reasoning")
# A group of a name, or of a value up to what follows it; white space; a literal character.
_PATTERN_PART = re.compile(
    r"\(\?P<(?P<group>\w+)>(?:\[\^[^\]]*\]|\\w|\\S|\.)[+*]\??\)|(?P<space>\\s[*+]\??|\\n)|\\(?P<escaped>\W)|(?P<plain>[^\\()\[\]{}|?*+.^$])"
)
_WHOLE_CALL = {"type": "function", "function": "{content}"}


def read_response_template(template: object, eos_token: str | None = None) -> OutputFormat:
    """The format that a template describes. Raises ModelError naming what cannot be expressed.

    eos_token: what ends a turn, which closes nothing besides.
    """
    fields = _as_object("", template)
    version = fields.get("version", 1)
    if version != 1:
        raise _refusal("version", version, "1")
    regions = _as_object("fields", fields.get("fields"))
    thinking = next((name for name in _THINKING_FIELDS if name in regions), None)
    return OutputFormat(
        "response_template",
        _read_thinking(thinking, regions[thinking]) if thinking else None,
        _read_calls(regions["tool_calls"], eos_token) if "tool_calls" in regions else None,
    )


def _read_thinking(name: str, value: object) -> ThinkingFormat:
    region = _as_object(f"fields.{name}", value)
    opened, closed = (_read_anchor(f"fields.{name}", region, key) for key in ("open", "close"))
    return ThinkingFormat(opened[0], closed[0])


def _read_calls(value: object, eos_token: str | None) -> CallFormat:
    place = "fields.tool_calls"
    region = _as_object(place, value)
    opened, closed = (_read_anchor(place, region, key) for key in ("open", "close"))
    closed[0] = "" if closed[0] == eos_token else closed[0]
    transform, content = region.get("transform"), region.get("content", "text")
    names = _read_transform(place, transform)
    if region.get("transform_each") and content == "json" and names:
        return CallFormat(
            section_open=opened[0] + "[",
            separator=", ",
            section_close="]" + closed[0],
            name_key=names[0],
            arguments_key=names[1],
        )
    if content == "json" and (names or transform in (None, _WHOLE_CALL)):
        name_key, arguments_key = names or ("name", "arguments")
        return CallFormat(
            opened[0], "", closed[0], separator="\n", name_key=name_key, arguments_key=arguments_key
        )
    if len(opened) != 2:
        raise _refusal(
            f"{place}.open_pattern", region.get("open_pattern"), "a pattern with one group, the name"
        )
    return _read_named_calls(place, region, opened, closed[0])


def _read_named_calls(place: str, region: Mapping[str, Any], opened: list[str], close: str) -> CallFormat:
    """Calls whose name stands before their arguments."""
    arguments = _as_object(f"{place}.content_args", region.get("content_args") or {})
    match region.get("content"):
        case "json" if arguments.get("unquoted_keys"):
            quote = _read_quote(f"{place}.content_args.string_delims", arguments.get("string_delims"))
            return CallFormat(opened[0], opened[1], close, form="braces", quote=quote)
        case "json":
            return CallFormat(opened[0], opened[1], close, separator="\n")
        case "xml-inline":
            pattern = arguments.get("tag_pattern")
            parts = _read_pattern(f"{place}.content_args.tag_pattern", pattern)
            if len(parts) != 3:
                raise _refusal(
                    f"{place}.content_args.tag_pattern", pattern, "a pattern with the groups key and value"
                )
            return CallFormat(
                opened[0],
                opened[1],
                close,
                separator="\n",
                form="xml",
                parameter_open=parts[0],
                value_open=parts[1],
                parameter_close=parts[2],
            )
        case other:
            raise _refusal(f"{place}.content", other, "'json' or 'xml-inline'")


def _read_quote(place: str, delimiters: object) -> str:
    """What texts stand within, '' if nothing is said."""
    if not delimiters:
        return ""
    try:
        [(opened, closed)] = convert(delimiters, list[tuple[str, str]])
    except (msgspec.ValidationError, ValueError):
        opened, closed = "", "other"
    if opened != closed:
        raise _refusal(place, delimiters, "one delimiter, the same at both ends")
    return opened


def _read_transform(place: str, transform: object) -> tuple[str, str] | None:
    """The keys of name and arguments, where a transform takes both from the content or its items."""
    function = cast(dict[str, Any], transform).get("function") if isinstance(transform, dict) else None
    if not isinstance(function, dict):
        return None
    values = [cast(dict[str, Any], function).get(key) for key in ("name", "arguments")]
    if values == ["{name}", "{content}"]:
        return None
    keys = [re.fullmatch(r"\{(?:content\.)?(\w+)\}", str(value)) for value in values]
    if keys[0] is None or keys[1] is None:
        raise _refusal(f"{place}.transform", transform, "name and arguments from the content or the pattern")
    return keys[0][1], keys[1][1]


def _read_anchor(place: str, region: Mapping[str, Any], key: str) -> list[str]:
    """The literals of an anchor, of a pattern those before and after its group."""
    literal, pattern = region.get(key), region.get(f"{key}_pattern")
    if pattern is not None:
        return _read_pattern(f"{place}.{key}_pattern", pattern)
    if isinstance(literal, list) and len(cast(list[Any], literal)) == 1:
        literal = cast(list[Any], literal)[0]
    if not isinstance(literal, str) or not literal:
        raise _refusal(f"{place}.{key}", literal, "one text")
    return [literal]


def _read_pattern(place: str, pattern: object) -> list[str]:
    """A regular expression's literals, cut at its groups. White space at its ends is left out."""
    parts, end = [""], 0
    text = pattern if isinstance(pattern, str) else ""
    while (match := _PATTERN_PART.match(text, end)) is not None:
        end = match.end()
        if match["group"]:
            parts.append("")
        else:
            parts[-1] += "\n" if match["space"] else match["escaped"] or match["plain"]
    if end < len(text) or not any(part.strip() for part in parts):
        raise _refusal(place, pattern, "literals, white space and named groups")
    parts[0] = parts[0].lstrip()
    parts[-1] = parts[-1].rstrip()
    return parts


def _as_object(place: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _refusal(place, value, "an object")
    return cast(dict[str, Any], value)


def _refusal(place: str, value: object, allowed: str) -> ModelError:
    """The error for what cannot be expressed."""
    name = f"response_template.{place}" if place else "response_template"
    return ModelError(f"tokenizer_config.json {name}", value, allowed)
