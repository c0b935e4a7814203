"""OutputRules -> a grammar of which every turn can be read: thoughts, an answer, calls of offered tools.

Where a marker is a token of its own, all that is between markers is `any token but these`: neither a mask
nor what a row remembers of it depends on what is written. Loads no llguidance.
"""

from __future__ import annotations

import json
from typing import Any

from ....ipc.structured_outputs import StructuredOutputsParams
from ...structured_outputs.grammar_text import GrammarText, check_length, make_grammar_text, to_json
from ..output_format import ThinkingFormat
from .call_grammar import CallGrammar
from .lark import LarkRules
from .rules import OutputRules

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
        said = lark.add("said", f"{head} {text} {lark.write(channels.ends[0])}")
        return f"{thoughts} ({said} {start})* ({answer} | {self._calls.add_calls()})"
