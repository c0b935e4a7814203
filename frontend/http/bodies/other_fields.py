"""Fields of other engines and clients that requests do not have: which are taken, what is said of others.

Only a body with a field that its Struct does not know is read by these tables, so other requests pay nothing.
A row takes the values that ask for nothing; a value with exactly the meaning of a field of ours becomes that
field; of any other value its hint says what there is instead. What is taken and dropped is small.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from ....ipc.params.absent_arguments import AbsentArgument, read_rows
from ..errors import FieldError

_MAX_DROPPED_BYTES = 4096  # of a value that is taken and says nothing of the answer
DROPPED = object()  # what a row makes of a value that asks for nothing


class OtherField(NamedTuple):
    """`read` makes the value of our field `becomes` of another's, DROPPED of what asks for nothing.

    It makes None of a value that is refused, of which `hint` says what there is instead, and Several of what
    several fields of ours say. unless: fields of the request that bring the value to bear, with what leaves
    them off; with another it is refused. beside: fields of ours that say the same, so with one it is dropped.
    """

    hint: str
    read: Callable[[Any], Any]
    becomes: str = ""
    unless: Mapping[str, Any] = {}
    beside: Collection[str] = ()


class Several(dict[str, Any]):
    """What a value becomes, by the paths of our fields."""


def _off(row: AbsentArgument) -> OtherField:
    """Taken if it asks for nothing, or is empty."""
    return OtherField(
        row.reason, lambda value: DROPPED if row.is_off(value) or value in ("", [], {}) else None
    )


def _same(name: str, *off_values: Any) -> OtherField:
    """Another name of our field `name`, whose own check knows its values."""
    off = _off(AbsentArgument("", off_values)).read
    return OtherField(f"it is {name} here", lambda value: off(value) or value, name)


def _read_small(value: Any) -> Any:
    return DROPPED if len(msgspec.json.encode(value)) <= _MAX_DROPPED_BYTES else None


_SMALL = OtherField("a small value, which says nothing of the answer", _read_small)


_ENABLED = "chat_template_kwargs.enable_thinking"
_BUDGET = "thinking_token_budget"


def _read_reasoning(value: Any) -> Any:
    """OpenRouter's, and that of clients that send both APIs of OpenAI the same: there are no summaries."""
    if not isinstance(value, dict):
        return None
    made = Several()
    for name, item in cast(dict[str, Any], value).items():
        match name, item:
            case ("effort", str()):
                made["reasoning_effort"] = item
            case ("enabled", bool()):
                made |= {_ENABLED: True} if item else {"reasoning_effort": "none"}
            case ("max_tokens", int()) if not isinstance(item, bool):
                made[_BUDGET] = item
            case ("exclude", True):
                made["include_reasoning"] = False
            case ("exclude", None | False) | ("summary" | "generate_summary", _):
                pass
            case _:
                return None
    return made or DROPPED


def _read_thinking(value: Any) -> Any:
    """Anthropic's, as DeepSeek, GLM and Kimi have it in chats."""
    match value:
        case {"type": "disabled"} if len(value) == 1:
            return Several(reasoning_effort="none")
        case {"type": "enabled" | "adaptive", **rest}:
            budget = rest.pop("budget_tokens", None)
            if rest.pop("clear_thinking", None) not in (None, False) or rest:
                return None
            return Several({_ENABLED: True} if budget is None else {_ENABLED: True, _BUDGET: budget})
        case _:
            return None


def _read_usage(value: Any) -> Any:
    """OpenRouter's."""
    return True if value == {"include": True} else DROPPED if value in ({}, {"include": False}) else None


def _join_thoughts(value: Any) -> Any:
    """A message's thoughts as OpenRouter and LiteLLM list them; those that another server has encrypted are
    left out, as in /v1/responses.
    """
    if not isinstance(value, list):
        return None
    texts: list[str] = []
    for part in cast(list[Any], value):
        match part:
            case {"type": "reasoning.text", "text": str(text)} | {"type": "thinking", "thinking": str(text)}:
                texts.append(text)
            case {"type": "reasoning.summary" | "reasoning.encrypted" | "redacted_thinking"}:
                pass
            case _:
                return None
    return "".join(texts) or DROPPED


# same: names of one meaning, of TGI, SGLang, Cohere, Mistral, llama.cpp, DashScope, and of vLLM before.
# dropped: what only another field brings to bear, and what says nothing of the answer; of messages what
# clients add to what they were answered, or keep of it. off: by the hint, the values that ask for nothing; of
# tools and items OpenAI's calls by programs, looked up tools, and what stands elsewhere in its other API.
_TABLES: dict[str, Any] = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes())


def _read_table(table: str) -> dict[str, OtherField]:
    return {name: _off(row) for name, row in read_rows(_TABLES[table]).items()}


def _read_dropped(table: str) -> dict[str, OtherField]:
    return dict.fromkeys(_TABLES[table].split(), _SMALL)


_REPEAT = "repetition_penalty, which counts the prompt and all of the answer"
_PENALTIES = {"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0}
_OF_PENALTIES = _SMALL._replace(hint=_REPEAT, unless=_PENALTIES)
_BOOL = "true or false, as chat_template_kwargs.enable_thinking"
REQUEST_FIELDS: dict[str, OtherField] = {
    **{name: _same(ours) for ours, names in _TABLES["same"].items() for name in names.split()},
    "guided_json_object": _same("structured_outputs.json_object", False),
    "enable_thinking": OtherField(
        _BOOL,
        lambda value: value if isinstance(value, bool) else None,
        "chat_template_kwargs.enable_thinking",
    ),
    "thinking": OtherField("reasoning_effort, or chat_template_kwargs", _read_thinking, "reasoning_effort"),
    "reasoning": OtherField("reasoning_effort", _read_reasoning, "reasoning_effort"),
    "usage": OtherField("stream_options.include_usage", _read_usage, "stream_options.include_usage"),
    **dict.fromkeys(("repeat_last_n", "penalize_nl"), _OF_PENALTIES),
    **_read_dropped("dropped"),
    **_read_table("off"),
}
_THOUGHTS = OtherField("reasoning", _join_thoughts, "reasoning", beside=("reasoning", "reasoning_content"))
MESSAGE_FIELDS = {
    **_read_dropped("dropped of messages"),
    **_read_table("off of messages"),
    **dict.fromkeys(("thinking_blocks", "reasoning_details"), _THOUGHTS),
}
PART_FIELDS = {
    **dict.fromkeys(("id", "index", "prompt_cache_breakpoint"), _SMALL),
    **_read_table("off of parts"),
}
TOOL_FIELDS = {"output_schema": _SMALL} | _read_table("off of tools")
ITEM_FIELDS = _read_table("off of items")


def take_other_fields(
    fields: dict[str, Any], known: Collection[str], rows: Mapping[str, OtherField], place: str = ""
) -> None:
    """Take out of `fields` what rows take, and put what becomes a field of ours in its place.

    known: names that the object has. Raises FieldError for another value beside the field that it would
    become; what rows do not take stays.
    """
    for name in [name for name in fields if name not in known and name in rows]:
        row, value = rows[name], fields[name]
        is_used = any(fields.get(other) not in (None, off) for other, off in row.unless.items())
        made = None if value is None or is_used else row.read(value)
        if value is None or made is DROPPED or any(fields.get(other) for other in row.beside):
            del fields[name]
        elif made is not None and row.becomes.partition(".")[0] in known:
            del fields[name]
            for path, part in made.items() if isinstance(made, Several) else ((row.becomes, made),):
                _put(fields, path, part, f"{place}.{name}" if place else name, value)


def _put(fields: dict[str, Any], path: str, made: Any, name: str, value: Any) -> None:
    field, _, key = path.partition(".")
    if field == "stream_options" and not fields.get("stream"):
        return  # a whole answer has its usage
    inner = fields if not key else fields.get(field)
    if inner is None:
        inner = fields[field] = {}
    key = key or field
    if not isinstance(inner, dict):
        return  # which is refused for what it is
    inner = cast(dict[str, Any], inner)
    if inner.get(key, made) not in (None, made):
        raise FieldError(name, value, f"the same as {path}, or nothing beside it", "unsupported_field")
    inner[key] = made
