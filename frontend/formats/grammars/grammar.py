"""OutputRules -> a grammar of which every turn can be read: thoughts, an answer, calls of offered tools.

Where a marker is a token of its own, all that is between markers is `any token but these`: neither a mask
nor what a row remembers of it depends on what is written. Loads no llguidance.
"""

from __future__ import annotations

import json
from typing import Any

from ....ipc.params.structured_outputs import StructuredOutputsParams
from ..output_format import CallFormat, ThinkingFormat
from ..schemas.grammar_text import GrammarText, check_length, make_grammar_text, quote, to_json
from .arguments_grammar import ArgumentsGrammar
from .lark import LarkRules, Piece, escape_text
from .rules import OutputRules, ToolRule

# After thoughts, and before a call that has to come: models write a line's end or two there.
_GAP = r"/[ \n]{1,4}/"


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
        rules = self._rules
        if rules.format.thinking is None:
            return self._write_rest()
        gap = f"{self._lark.add('GAP', _GAP)}?" if self._has_answer or rules.has_call else ""
        thoughts = f"{self._write_thoughts(rules.format.thinking)} {gap}"
        return f"{thoughts if rules.is_reasoning_open else f'({thoughts})?'} {self._write_rest()}"

    def _write_thoughts(self, thinking: ThinkingFormat) -> str:
        rules, lark = self._rules, self._lark
        opened = "" if rules.is_reasoning_open else lark.write(thinking.open.strip())
        return f"{opened} {lark.add_text_until('thoughts', thinking.close, rules.thinking_token_budget)}"

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
