"""Chat templates: a conversation -> the text that the model was trained on, by Jinja in a sandbox.

The environment offers what transformers' does, so hub templates render alike. A template comes with a model
and is not trusted: it sees plain JSON types only, cannot change them, and its result has a size limit.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...ipc.errors import ModelError, PromptError, did_you_mean
from ..tools import Tool
from .messages import ROLES, as_plain, as_template_tools, check_messages, fill_in

MAX_TEMPLATE_LENGTH = 1_000_000
MAX_RENDERED_LENGTH = 64_000_000  # characters; far past any context, far below a machine's memory
_MAX_SAID = 300  # characters of what a template says itself, which may be what it was given
_CONTINUE_TAG = "<quire-final-message-ends-here>"
# What is rendered to see whether a template shows tools.
_PROBE: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True}
_PROBE_TOOL = Tool("tool_that_is_tried", "What it does.", {"type": "object", "properties": {}})
# And past calls and their results.
_PROBE_ARGUMENT, _PROBE_RESULT = "argument that is tried", "result that is tried"
_PROBE_FUNCTION = {"name": _PROBE_TOOL.name, "arguments": {"what": _PROBE_ARGUMENT}}
_PROBE_CALL = {"id": "call12345", "type": "function", "function": _PROBE_FUNCTION}
_PROBE_CALLS: dict[str, Any] = {
    "messages": [
        *_PROBE["messages"],
        {"role": "assistant", "content": None, "tool_calls": [_PROBE_CALL]},
        {"role": "tool", "content": _PROBE_RESULT, "tool_call_id": "call12345", "name": _PROBE_TOOL.name},
    ],
    "add_generation_prompt": True,
}


class ChatTemplate:
    """A compiled template. `special_tokens` (name -> text) are visible to it as variables.

    tool_use: the model's template for conversations with tools, if that is another one.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_use: ChatTemplate | None = None
    ) -> None:
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE_LENGTH:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PromptError("chat_template", source, f"a text of at most {MAX_TEMPLATE_LENGTH} characters")
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._tool_use = tool_use
        self._unshown: dict[bool, frozenset[str]] = {}  # by whether tools are offered

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
        param: str = "messages",
    ) -> str:
        """Text of a conversation.

        add_generation_prompt: end with the header of an assistant's turn. continue_final_message: end inside
        the last message, so that the model goes on with it. tools: what the model may call. param: what
        the messages are called. Raises PromptError, also for tools, calls and results that the template
        would not show; ModelError if it does not compile.
        """
        if add_generation_prompt and continue_final_message:
            raise PromptError("continue_final_message", True, "False with add_generation_prompt=True")
        chat = check_messages(messages, lambda: self._takes_parts, param)
        has_calls = any("tool_calls" in message for message in chat)
        if self._tool_use is not None and (tools or (has_calls and self._find_unshown(False))):
            return self._tool_use.render(
                messages, add_generation_prompt, continue_final_message, variables, tools, param
            )
        self._check_roles(chat, param)
        if tools and not self.takes_tools:
            raise PromptError("tools", f"{len(tools)} tools", "none: this model's chat template shows none")
        if has_calls:
            self._check_calls(chat, bool(tools), param)
        if continue_final_message:
            _tag_final_message(chat)
        text = self._render(
            {
                **self._special_tokens,
                **{name: as_plain(value) for name, value in (variables or {}).items()},
                "messages": chat,
                "add_generation_prompt": add_generation_prompt,
                **({"tools": as_template_tools(tools)} if tools else {}),
            }
        )
        return _cut_at_tag(text) if continue_final_message else text

    def check_syntax(self) -> None:
        """Raise ModelError if it does not compile."""
        _ = self._compiled

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _compile(self.source)

    @cached_property
    def takes_tools(self) -> bool:
        """True if the model is shown the tools that it may call: their names are in what is rendered.

        Also if that cannot be told, because the template refuses the conversation that is tried.
        """
        try:
            plain, shown = (
                self._render({**self._special_tokens, **_PROBE, "tools": tools})
                for tools in (None, as_template_tools([_PROBE_TOOL]))
            )
        except PromptError:
            return True
        return _PROBE_TOOL.name in shown and _PROBE_TOOL.name not in plain

    def _check_roles(self, chat: list[dict[str, Any]], param: str) -> None:
        """Raise PromptError for a role that nobody knows: many templates would show it as it is."""
        for place, message in enumerate(chat):
            role = message["role"]
            if role not in ROLES and role not in self._named_roles:
                hint = did_you_mean(role, ROLES)
                allowed = f"one of {', '.join(ROLES)}, or one that the model's chat template names{hint}"
                raise PromptError(f"{param}[{place}].role", role, allowed)

    @cached_property
    def _named_roles(self) -> frozenset[str]:
        """Texts that the template compares something with."""
        _ = self._compiled  # what does not compile is told as that
        compares = list(_environment().parse(self.source).find_all(jinja2.nodes.Compare))
        keys = {id(item.arg) for compare in compares for item in compare.find_all(jinja2.nodes.Getitem)}
        texts = (text for compare in compares for text in compare.find_all(jinja2.nodes.Const))
        return frozenset(text.value for text in texts if isinstance(text.value, str) and id(text) not in keys)

    def _check_calls(self, chat: list[dict[str, Any]], has_tools: bool, param: str) -> None:
        """Raise PromptError for the first call, or result, that would silently be left out."""
        unshown = self._find_unshown(has_tools)
        for place, message in enumerate(chat):
            if "calls" in unshown and message.get("tool_calls"):
                allowed = "none: this model's chat template shows no calls"
                raise PromptError(
                    f"{param}[{place}].tool_calls", f"{len(message['tool_calls'])} calls", allowed
                )
            if "results" in unshown and message["role"] == "tool":
                allowed = "another role: this model's chat template shows no results of calls"
                raise PromptError(f"{param}[{place}].role", "tool", allowed)

    def _find_unshown(self, has_tools: bool) -> frozenset[str]:
        """Which of "calls" and "results" the template leaves out; neither if it refuses what is tried."""
        if has_tools not in self._unshown:
            tools = as_template_tools([_PROBE_TOOL]) if has_tools else None
            try:
                text = self._render({**self._special_tokens, **_PROBE_CALLS, "tools": tools})
            except PromptError:
                text = _PROBE_ARGUMENT + _PROBE_RESULT
            signs = {"calls": _PROBE_ARGUMENT, "results": _PROBE_RESULT}
            self._unshown[has_tools] = frozenset(name for name, sign in signs.items() if sign not in text)
        return self._unshown[has_tools]

    @cached_property
    def _takes_parts(self) -> bool:
        """True if the template walks over a message's content, so that lists of parts can stay lists."""
        _ = self._compiled  # what does not compile is told as that
        loops = _environment().parse(self.source).find_all(jinja2.nodes.For)
        return any("content" in _names_in(loop.iter) for loop in loops)

    def _render(self, variables: dict[str, Any]) -> str:
        """As the variables are, or filled in where the template fails with them."""
        texts = variables["messages"], variables.pop("tools", None)
        try:
            return self._render_once(variables, *texts)
        except PromptError:
            filled = fill_in(*texts)
            if filled != texts:
                with contextlib.suppress(PromptError):
                    return self._render_once(variables, *filled)
            raise

    def _render_once(self, variables: dict[str, Any], messages: list[dict[str, Any]], tools: Any) -> str:
        pieces: list[str] = []
        length = 0
        template = self._compiled
        try:
            for piece in template.generate(**{**variables, "messages": messages, "tools": tools}):
                length += len(piece)
                if length > MAX_RENDERED_LENGTH:
                    raise PromptError("messages", f"{length} characters", f"at most {MAX_RENDERED_LENGTH}")
                pieces.append(piece)
        except PromptError:
            raise
        except jinja2.TemplateError as error:
            raise PromptError(
                "messages", messages, f"the chat template says: {str(error)[:_MAX_SAID]}"
            ) from error
        except Exception as error:  # a template is code: it can raise anything, and it is the input's failure
            reason = f"the chat template failed: {type(error).__name__}: {str(error)[:_MAX_SAID]}"
            raise PromptError("messages", messages, reason) from error
        return "".join(pieces)


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` of a template, without underscore names, which reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        values: dict[str, Any] = dict(*rest, **kwargs)
        for name in values:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's class attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(lineno)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    offered: dict[str, Any] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
        "dict": _make_dict,
    }
    environment.globals |= offered
    return environment


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ModelError("chat_template", source, f"a Jinja template ({str(error)[:_MAX_SAID]})") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt does not want."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _check_attribute(name: str) -> None:
    if isinstance(name, str) and name.startswith("_"):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _names_in(node: jinja2.nodes.Node) -> set[str]:
    """Variables, attributes and keys that an expression mentions."""
    kinds = (jinja2.nodes.Getattr, jinja2.nodes.Const, jinja2.nodes.Name)
    nodes = [node, *node.find_all(kinds)]
    return {
        str(getattr(item, key)) for item in nodes for key in ("attr", "value", "name") if key in item.fields
    }


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict()` of a template, without the class' own attributes."""
    return dict(*args, **kwargs)


def _tag_final_message(chat: list[dict[str, Any]]) -> None:
    content = chat[-1].get("content")
    if isinstance(content, list) and content:
        part = cast(dict[str, Any], content[-1])
        part["text"] += _CONTINUE_TAG
    elif isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_TAG
    else:
        raise PromptError("continue_final_message", True, "a final message with a content to continue")


def _cut_at_tag(text: str) -> str:
    end = text.rfind(_CONTINUE_TAG)
    if end < 0:
        raise PromptError(
            "continue_final_message", True, "a template that shows the final message; this one drops it"
        )
    return text[:end]
