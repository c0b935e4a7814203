"""OutputRules -> a grammar of which every turn can be read: thoughts, an answer, calls of offered tools.

Where a marker is a token of its own, all that is between markers is `any token but these`: neither a mask
nor what a row remembers of it depends on what is written. Loads no llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ....ipc.params.structured_outputs import StructuredOutputsParams
from ..output_format import CallFormat, ThinkingFormat
from ..schemas.grammar_text import GrammarText, check_length, make_grammar_text, quote, to_json
from .arguments_grammar import ArgumentsGrammar
from .lark import LarkRules, Piece, escape_text
from .rules import OutputRules, ToolRule

# After thoughts, and before a call that has to come: models write a line's end or two there.
_GAP = r"/[ \n]{1,4}/"
_SPACE = r"[ \t\r\n]*"
_MAX_UNMARKED = 64  # kinds of arguments; more take too long to compile, and such calls need their marker


def make_output_grammar(
    rules: OutputRules,
    answer: StructuredOutputsParams | None = None,
    place: str | None = None,
    is_strict: bool = False,
) -> GrammarText | None:
    """The grammar of a turn, None if nothing has to be enforced.

    answer: what the answer looks like, with `place` and `is_strict` as in make_grammar_text; a turn is then
    that or calls. Raises SamplingParamsError with the place in a schema.
    """
    made = None if answer is None else make_grammar_text(answer, place, is_strict)
    if not rules.binds(made is not None):
        return made
    turn = _Turn(rules, made is not None)
    grammars: list[dict[str, Any]] = [{"lark_grammar": turn.write()}]
    where, value, schemas = *_name_source(rules), turn.list_schemas()
    if made is not None:
        grammars.append({"name": "answer", **json.loads(made.text)["grammars"][0]})
        where, value, schemas = made.place, made.value, schemas | made.schemas
    text = to_json({"grammars": grammars})
    check_length(where, "a grammar", text)
    return GrammarText(text, where, value, schemas)


def _name_source(rules: OutputRules) -> tuple[str, Any]:
    """The field that a grammar is made of, and what it holds."""
    if rules.tools or rules.forbids_calls:
        return rules.tools_place, f"{len(rules.tools)} tools"
    return "thinking_token_budget", rules.thinking_token_budget


class _Turn:
    """The rules of one turn. has_answer: there is a grammar `answer` of what is no call."""

    def __init__(self, rules: OutputRules, has_answer: bool) -> None:
        self._rules = rules
        self._has_answer = has_answer
        self._lark = LarkRules(rules.format, rules.eos_token_ids)
        calls = rules.format.calls
        self._calls = CallGrammar(rules, calls, self._lark) if rules.tools and calls else None

    def list_schemas(self) -> dict[str, dict[str, Any]]:
        """The schemas of arguments that are followed, by their places."""
        return self._calls.schemas if self._calls is not None else {}

    def write(self) -> str:
        """The grammar in Lark."""
        is_message = self._rules.format.channels is not None
        self._lark.add("start", self._write_messages() if is_message else self._write_turn())
        return self._lark.join()

    def _write_turn(self) -> str:
        rules, thinking = self._rules, self._rules.format.thinking
        if thinking is None:
            return self._write_rest()
        gap = f"{self._lark.add('GAP', _GAP)}?" if self._has_answer or rules.has_call else ""
        rest = self._lark.add("rest", self._write_rest())
        thoughts = f"{self._write_thoughts(thinking)} {gap} {rest}"
        if self._calls and self._are_tokens(thinking):
            # Some models leave the end of thoughts out before calls.
            opened = "" if rules.is_reasoning_open else self._lark.write(thinking.open.strip())
            text = self._lark.write_tokens(rules.thinking_token_budget)
            thoughts = f"{thoughts} | {opened} {text} {self._calls.add_calls()}"
        return thoughts if rules.is_reasoning_open else f"{thoughts} | {rest}"

    def _write_thoughts(self, thinking: ThinkingFormat) -> str:
        rules, lark = self._rules, self._lark
        opened = "" if rules.is_reasoning_open else lark.write(thinking.open.strip())
        return f"{opened} {lark.add_text_until('thoughts', thinking.close, rules.thinking_token_budget)}"

    def _are_tokens(self, thinking: ThinkingFormat) -> bool:
        """Whether what ends thoughts and what begins calls are tokens."""
        calls = self._rules.format.calls
        opener = "" if calls is None else (calls.section_open or calls.open).strip()
        return bool(opener) and all(
            isinstance(self._lark.split(marker)[0], int) for marker in (thinking.close.strip(), opener)
        )

    def _write_rest(self) -> str:
        calls, lark = self._calls, self._lark
        if calls is None:
            return "@answer" if self._has_answer else lark.add_text()
        if self._rules.has_call:
            return calls.add_calls()
        if self._has_answer:
            return f"(@answer | {calls.add_calls()})"
        return calls.add_text_and_calls()

    def _write_messages(self) -> str:
        """Thoughts, messages that may come before a call, and the last one: an answer or a call."""
        channels, lark, thinking = self._rules.format.channels, self._lark, self._rules.format.thinking
        assert channels is not None
        start, text = lark.write(channels.start), lark.any_token + "*"
        head = lark.write(channels.channel, channels.final, channels.body)
        answer = lark.add("final", f"{head} {'@answer' if self._has_answer else text}")
        thoughts = f"({self._write_thoughts(thinking)} {start})?" if thinking else ""
        if self._calls is None:
            return f"{thoughts} {answer}"
        if self._rules.has_call:
            return f"{thoughts} {self._calls.add_calls()}"
        head = lark.write(channels.channel, "commentary", channels.body)
        message = lark.add("said", f"{head} {text} {lark.write(channels.ends[0])}")
        return f"{thoughts} ({message} {start})* ({answer} | {self._calls.add_calls()})"


class CallGrammar:
    """Calls of the tools of `rules`, as rules of `lark`."""

    def __init__(self, rules: OutputRules, calls: CallFormat, lark: LarkRules) -> None:
        self._rules = rules
        self._calls = calls
        self._lark = lark
        self._arguments = ArgumentsGrammar(calls, lark)
        # The tools by what follows their names.
        self._groups: dict[str, list[ToolRule]] = {}
        for tool in rules.tools:
            self._groups.setdefault(self._arguments.add(tool), []).append(tool)

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The schemas that are followed, by their places."""
        return self._arguments.schemas

    def add_calls(self, dropped: str = "") -> str:
        """A rule: one call, or several, with what stands around them.

        dropped: text that they begin with and that is written elsewhere.
        """
        calls, lark = self._calls, self._lark
        opened = lark.split(calls.section_open)
        is_joined = bool(opened) and isinstance(opened[-1], str)  # one terminal with the call's own text
        first = self._call
        if is_joined or dropped:
            first = self._add_call("first_call", calls.section_open, dropped)
        lead = f"({lark.write(calls.lead)})?" if calls.lead else ""
        section = "" if is_joined else lark.write(calls.section_open)
        if section and calls.open and isinstance(lark.split(calls.open)[0], int):
            section = f"({section})?"  # some models leave it out
        parts = [lead, section, first, self._add_more(self._call)]
        return lark.add("calls", " ".join(parts))

    def add_text_and_calls(self) -> str:
        """A rule: any text, and then calls or none, whose marker a model may leave out."""
        calls, lark = self._calls, self._lark
        text = lark.add("TEXT", lark.write_text(*self._list_refused()))
        choices = [text, *self._list_unmarked(text)]
        marker = (calls.lead if calls.is_bare else calls.section_open or calls.open).strip()
        if calls.is_bare:
            choices.append(self.add_calls())
        if marker and isinstance(lark.split(marker)[0], int):
            choices.append(f"{text} {self.add_calls()}")
        elif marker and not calls.is_bare:
            trigger = marker.split()[0]
            begun = lark.add("begun_call[lazy]", f"{text} {quote(trigger)}")
            choices.append(f"{begun} {self.add_calls(trigger)}")
        return lark.add("text_and_calls", " | ".join(choices))

    def _list_refused(self) -> list[str]:
        """Regular expressions of what text does not begin with, so that no one takes it for a call."""
        calls = self._calls
        names, (begin, closed) = self._join_names(self._rules.tools), self._write_unmarked()
        refused = [f"(.|\\n)*{begin}({names}){closed}"] if begin else []
        if calls.is_bare and calls.name_key is not None:
            keys = "|".join(sorted({calls.name_key, "arguments", "parameters", "type", "id"}))
            refused.append(rf"{_SPACE}\{{{_SPACE}\"({keys})\"")
        elif calls.is_bare:
            refused.append(rf"{_SPACE}{escape_text(calls.section_open)}{_SPACE}({names}){_SPACE}\(")
            refused.append(rf"(.|\n)*{_begin_object('name')}({names})\"")
        return refused

    def _join_names(self, tools: Sequence[ToolRule]) -> str:
        return "|".join(escape_text(tool.name) for tool in tools)

    @cached_property
    def _call(self) -> str:
        return self._add_call("call")

    def _write_unmarked(self) -> tuple[str, str]:
        """Regular expressions: how calls without their marker begin, around a name; '' if none is read."""
        calls, opened = self._calls, escape_text(self._rules.format.bare_open)
        if calls.name_key is not None:
            return _begin_object(calls.name_key), r"\""
        closed = calls.name_close.strip() or "{"
        return (opened + _SPACE, _SPACE + escape_text(closed)) if opened else ("", "")

    def _list_unmarked(self, text: str) -> list[str]:
        """What text and calls without their marker consist of, one for each kind of arguments."""
        calls, lark, (begin, closed) = self._calls, self._lark, self._write_unmarked()
        if calls.form == "braces" or not begin or len(self._groups) > _MAX_UNMARKED:
            return []
        after = f', "{calls.arguments_key}": ' if calls.name_key else ""
        space = quote(after or calls.name_close[len(calls.name_close.rstrip()) :])
        more, begin = self._add_more(self._call), lark.add("UNMARKED", f"{text} /{begin}/")
        choices: list[str] = []
        for number, (arguments, tools) in enumerate(self._groups.items()):
            head = f"{begin} /({self._join_names(tools)}){closed}/"
            choices.append(f"{lark.add(f'unmarked_{number}[lazy]', head)} {space} {arguments} {more}")
        return choices

    def _add_more(self, call: str) -> str:
        """A rule: more calls, and what closes them."""
        calls, lark = self._calls, self._lark
        separator = lark.write(calls.separator)
        more = f"({separator}{'' if calls.separator.strip() or not separator else '?'} {call})*"
        closed = lark.write(calls.section_close)
        return lark.add("more", f"{more if self._rules.has_many_calls else ''} {closed}")

    def _add_call(self, name: str, section_open: str = "", dropped: str = "") -> str:
        """A rule: a call of one of the tools. Those with the same arguments differ in the name only."""
        opened = (section_open + self._calls.open).removeprefix(dropped)
        alternatives: list[str] = []
        for number, (arguments, tools) in enumerate(self._groups.items()):
            heads = [self._list_head(opened, tool.name) for tool in tools]
            head = self._lark.write_alternatives(f"{name.upper()}_{number}", heads)
            if self._calls.is_numbered:
                head = f"{head} {self._add_number()} {self._lark.write(self._calls.name_close)}"
            elif self._calls.number_key:
                begin = self._lark.write(opened, f'{{"{self._calls.number_key}": "')
                head = f"{begin} {self._add_number()} {head}"
            alternatives.append(f"{head} {arguments}")
        return self._lark.add(name, " | ".join(alternatives))

    def _add_number(self) -> str:
        return self._lark.add("CALL_NUMBER", "/[0-9]{1,4}/")

    def _list_head(self, opened: str, name: str) -> list[Piece]:
        """What stands before the arguments. A call's own id is left out."""
        calls = self._calls
        if calls.is_numbered:
            return self._lark.split(opened, f"functions.{name}:")
        if calls.name_key is None:
            return self._lark.split(opened, name, calls.name_close)
        keys = f'"{calls.name_key}": {json.dumps(name)}, "{calls.arguments_key}": '
        return self._lark.split(*(['", '] if calls.number_key else [opened, "{"]), keys)


def _begin_object(name_key: str) -> str:
    """A regular expression: what stands before the name in a call that is an object."""
    key_type, key = (rf"\"{key}\"{_SPACE}:{_SPACE}" for key in ("type", name_key))
    return rf"\{{{_SPACE}({key_type}\"function\"{_SPACE},{_SPACE})?{key}\""
