"""Messages and tools as chat templates take them: copies in plain JSON types, in transformers' form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from ...ipc.errors import PromptError
from ..tools import Tool

_CONTENT_ALLOWED = 'a text, or a list of {"type": "text", "text": ...} parts'
_REASONING_NAMES = ("reasoning_content", "reasoning")
_THOUGHTS = (*_REASONING_NAMES, "thinking")
_NO_MEDIA = "none: only text is supported"
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_TYPES = ("text", "input_text", "output_text")
ONLY_TEXT = "'text': only text is supported"
_MEDIA_OF_PARTS = ("image_url", "input_audio", "file")
# What clients add to what they were answered, and dump with their messages.
_ECHOES = (
    "refusal",
    "annotations",
    "audio",
    "function_call",
    "parsed",
    "provider_specific_fields",
    "cache_control",
)
_LEFT_OUT_IF_EMPTY = ("name", "tool_call_id", "tool_calls", *_REASONING_NAMES)
_MAX_SHOWN_IDS = 8
_Message = dict[str, Any]


def check_messages(messages: Any, takes_parts: Callable[[], bool], param: str = "messages") -> list[_Message]:
    """Copies of the messages as templates take them, however clients dump them.

    Arguments of calls are objects, parts plain texts; None, empty lists of calls, and what clients echo of an
    answer are left out.

    takes_parts: asked whether a content may stay a list of parts; else their texts are joined. param: what
    the messages are called. Raises PromptError, which names the field that is wrong, also for a tool's result
    without its call.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise PromptError(param, messages, "a list of at least one message")
    known_ids: dict[str, None] | None = None  # of the calls so far; None: there are none
    checked: list[_Message] = []
    for place, value in enumerate(cast(Sequence[Any], messages)):
        name = f"{param}[{place}]"
        message = _check_message(name, value, takes_parts)
        if message["role"] == "tool":
            _check_result(name, message, known_ids)
        if calls := message.get("tool_calls"):
            known_ids = {} if known_ids is None else known_ids
            known_ids |= dict.fromkeys(call["id"] for call in calls if isinstance(call.get("id"), str))
        checked.append(message)
    return checked


def as_template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools in the form that templates know, which is OpenAI's."""
    return [{"type": "function", "function": _to_function(tool)} for tool in tools]


def fill_in(messages: Sequence[_Message], tools: Any) -> tuple[list[_Message], Any]:
    """Copies for a template that fails where OpenAI's forms leave something out, as gpt-oss' does.

    A turn with calls has a text, which is its only one: what was said beside thoughts is one of them. A tool
    has a description.
    """
    filled: list[_Message] = []
    for message in messages:
        content = message.get("content")
        if message.get("tool_calls"):
            thoughts = message.get("thinking")
            if thoughts and isinstance(content, str) and content:
                message = message | dict.fromkeys(_THOUGHTS, f"{thoughts}\n\n{content}") | {"content": ""}
            elif content is None:
                message = message | {"content": ""}
        filled.append(message)
    described = [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools or ()]
    return filled, described or tools


def as_plain(value: Any) -> Any:
    """A copy in JSON's types: objects with methods stay outside of the sandbox, as their type's name."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(item) for item in cast(Sequence[Any], value)]
    # Subclasses (enums and the like) carry methods and are reduced to their base.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    return f"<{type(value).__name__}>"


def _to_function(tool: Tool) -> dict[str, Any]:
    description = {} if tool.description is None else {"description": tool.description}
    parameters = tool.parameters or {"type": "object", "properties": {}}
    return {"name": tool.name, **description, "parameters": parameters}


def _check_message(name: str, message: Any, takes_parts: Callable[[], bool]) -> _Message:
    if not isinstance(message, Mapping):
        raise PromptError(name, message, "a dict with 'role' and 'content'")
    plain = {key: value for key, value in as_plain(message).items() if value is not None}
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise PromptError(f"{name}.role", role, "a text such as 'system', 'user' or 'assistant'")
    for field, allowed in (("audio", _NO_MEDIA), ("function_call", "none: use tool_calls")):
        if plain.get(field):
            raise PromptError(f"{name}.{field}", plain[field], allowed)
    if plain.get("content") is None and plain.get("refusal"):
        plain["content"] = plain["refusal"]
    for field in (*_ECHOES, *(field for field in _LEFT_OUT_IF_EMPTY if not plain.get(field))):
        plain.pop(field, None)
    if thoughts := next((plain[key] for key in _REASONING_NAMES if plain.get(key)), None):
        plain |= dict.fromkeys(_THOUGHTS, thoughts)  # templates know one or the other
    if calls := plain.get("tool_calls"):
        _check_calls(f"{name}.tool_calls", calls)
        # Templates ask whether the content of a turn with calls is none; others leave it out.
        plain.setdefault("content", None)
        if plain["content"] is None:
            return plain
    content = plain.get("content")
    if content is None and role == "assistant":  # an answer without a text, as it was given
        plain["content"] = content = ""
    if isinstance(content, list):
        texts = [_part_text(f"{name}.content[{i}]", part) for i, part in enumerate(cast(list[Any], content))]
        parts = [{"type": "text", "text": text} for text in texts]
        plain["content"] = parts if takes_parts() else "\n".join(texts)
    elif not isinstance(content, str):
        raise PromptError(f"{name}.content", content, _CONTENT_ALLOWED)
    return plain


def _check_calls(name: str, calls: Any) -> None:
    """Check a turn's calls, and make their arguments the objects that templates take."""
    if not isinstance(calls, list):
        raise PromptError(name, calls, "a list of calls")
    for place, call in enumerate(cast(list[Any], calls)):
        where = f"{name}[{place}]"
        if not isinstance(call, dict):
            raise PromptError(where, call, 'a call {"id": ..., "type": "function", "function": {...}}')
        call = cast(dict[str, Any], call)
        function: Any = call
        if "function" in call or "name" not in call:  # transformers knows calls without the outer object, too
            where, function = f"{where}.function", call.get("function")
        if not isinstance(function, dict) or not isinstance(cast(_Message, function).get("name"), str):
            raise PromptError(where, function, 'an object {"name": ..., "arguments": ...}')
        function["arguments"] = _read_arguments(
            f"{where}.arguments", cast(_Message, function).get("arguments")
        )


def _read_arguments(name: str, value: Any) -> dict[str, Any]:
    arguments = value
    if value is None or value == "":  # of a tool that takes none
        return {}
    if isinstance(value, str):
        try:
            arguments = json.loads(value, parse_constant=_refuse_constant)
        except ValueError:
            arguments = None
        except RecursionError:
            raise PromptError(name, "JSON", "JSON of less depth") from None
    if not isinstance(arguments, dict):
        raise PromptError(name, value, "a JSON object, or the text of one")
    return cast(dict[str, Any], arguments)


def _refuse_constant(name: str) -> None:
    """NaN and the infinities, which Python takes for JSON."""
    raise ValueError(name)


def _check_result(name: str, message: _Message, known_ids: dict[str, None] | None) -> None:
    call_id = message.get("tool_call_id")
    if known_ids is None:
        raise PromptError(f"{name}.role", "tool", "a result only after a message with tool_calls")
    if call_id is not None and call_id not in known_ids:
        ids = ", ".join(map(repr, [*known_ids][-_MAX_SHOWN_IDS:])) or "none: the calls before it have no id"
        raise PromptError(f"{name}.tool_call_id", call_id, f"the id of a call before it ({ids})")


def _part_text(name: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise PromptError(name, part, 'a part {"type": "text", "text": ...}')
    fields = cast(dict[str, Any], part)
    if fields.get("type") not in TEXT_TYPES:
        raise PromptError(f"{name}.type", fields.get("type"), ONLY_TEXT)
    if media := next((field for field in _MEDIA_OF_PARTS if fields.get(field)), None):
        raise PromptError(f"{name}.{media}", fields[media], _NO_MEDIA)
    if not isinstance(text := fields.get("text"), str):
        raise PromptError(f"{name}.text", text, "a text")
    return text
