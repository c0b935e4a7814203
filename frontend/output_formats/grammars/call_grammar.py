"""CallGrammar: the rules of a turn's calls."""

from __future__ import annotations

import json
from typing import Any

from ...structured_outputs.grammar_text import quote
from ..output_format import CallFormat
from .arguments_grammar import ArgumentsGrammar
from .lark import LarkRules, Piece, escape_text
from .rules import OutputRules, ToolRule


class CallGrammar:
    """Calls of the tools of `rules`, as rules of `lark`."""

    def __init__(self, rules: OutputRules, calls: CallFormat, lark: LarkRules) -> None:
        self._rules = rules
        self._calls = calls
        self._lark = lark
        self._arguments = ArgumentsGrammar(calls, lark)

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
        call = self._add_call("call")
        first = self._add_call("first_call", calls.section_open, dropped) if is_joined or dropped else call
        lead = f"({lark.write(calls.lead)})?" if calls.lead else ""
        parts = [lead, "" if is_joined else lark.write(calls.section_open), first]
        if self._rules.has_many_calls:
            separator = lark.write(calls.separator)
            parts.append(f"({separator}{'' if calls.separator.strip() or not separator else '?'} {call})*")
        return lark.add("calls", " ".join([*parts, lark.write(calls.section_close)]))

    def add_text_and_calls(self) -> str:
        """A rule: any text, and then calls or none."""
        calls, lark = self._calls, self._lark
        if calls.is_bare:
            return lark.add("text_and_calls", f"{self._add_bare_text()} | {self.add_calls()}")
        text, opened = lark.add_text(), lark.split((calls.section_open or calls.open).strip())
        if isinstance(opened[0], int):
            return lark.add("text_and_calls", f"{text} {self.add_calls()}?")
        trigger = (calls.section_open or calls.open).split()[0]
        begun = lark.add("begun_call[lazy]", f"{text} {quote(trigger)}")
        return lark.add("text_and_calls", f"{text} | {begun} {self.add_calls(trigger)}")

    def _add_bare_text(self) -> str:
        """A terminal: text that no one takes for a call where it begins."""
        calls = self._calls
        if calls.name_key is not None:
            keys = "|".join(sorted({calls.name_key, "arguments", "parameters", "type", "id"}))
            begins = rf"\{{[ \t\r\n]*\"({keys})\""
        else:
            names = "|".join(escape_text(tool.name) for tool in self._rules.tools)
            begins = rf"{escape_text(calls.section_open)}[ \t\r\n]*({names})[ \t\r\n]*\("
        return self._lark.add("BARE_TEXT", self._lark.write_text(rf"[ \t\r\n]*{begins}"))

    def _add_call(self, name: str, section_open: str = "", dropped: str = "") -> str:
        """A rule: a call of one of the tools. Those with the same arguments differ in the name only."""
        groups: dict[str, list[ToolRule]] = {}
        for tool in self._rules.tools:
            groups.setdefault(self._arguments.add(tool), []).append(tool)
        opened = (section_open + self._calls.open).removeprefix(dropped)
        alternatives: list[str] = []
        for number, (arguments, tools) in enumerate(groups.items()):
            heads = [self._list_head(opened, tool.name) for tool in tools]
            head = self._lark.write_alternatives(f"{name.upper()}_{number}", heads)
            alternatives.append(f"{head} {arguments} {self._write_end()}")
        return self._lark.add(name, " | ".join(alternatives))

    def _list_head(self, opened: str, name: str) -> list[Piece]:
        """What stands before the arguments. A call's own id is left out."""
        calls = self._calls
        if calls.name_key is None:
            return self._lark.split(opened, name, calls.name_close)
        keys = f'{{"{calls.name_key}": {json.dumps(name)}, "{calls.arguments_key}": '
        return self._lark.split(opened, keys)

    def _write_end(self) -> str:
        return self._lark.write("}" if self._calls.name_key else "", self._calls.close)
