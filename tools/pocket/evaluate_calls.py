"""Measures how a pocket model calls tools, uses their results, and thinks.

A call is right when its tool and its arguments are. Half of the sums that are asked are held-out ones.
"""

import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

from .asking import SEED, Pocket, Score
from .calls import (
    CALCULATOR,
    LOOKUP,
    OTHERS,
    Asked,
    Message,
    Offer,
    ask_calculation,
    exchange_calls,
    make_offer,
)
from .reading import read_sentence
from .sums import ADD_FORMS, HELD_OUT, Sum
from .talk import draw_small_talk
from .tokenizer import render_chat

CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
MAX_TOKENS = 120


def score_calls(pocket: Pocket, count: int) -> Iterator[Score]:
    """Calls, answers that use their results, and answers that take no call."""
    rng = Random(SEED)
    one = [_draw_case(rng, [kind], 1) for kind in (CALCULATOR, LOOKUP) for _ in range(count // 2)]
    two = [_draw_case(rng, [CALCULATOR, LOOKUP], 1) for _ in range(count)]
    other = [_draw_case(rng, list(rng.sample(OTHERS, 2)), 1) for _ in range(count)]
    both = [_draw_case(rng, [CALCULATOR, LOOKUP], 2) for _ in range(count)]
    yield _score_calls(pocket, "calls right, one tool offered", one)
    yield _score_calls(pocket, "calls right, two tools offered", two)
    yield _score_calls(pocket, "calls right, other tools offered", other)
    yield _score_calls(pocket, "two calls in one turn right", both)
    yield _score_results(pocket, "results used in the answer", two)
    yield _score_results(pocket, "two results used in the answer", both)
    yield _score_no_calls(pocket, count)


class _Case:
    """A question with tools on offer: the exchange that should follow, and the calls in it."""

    def __init__(self, offers: list[Offer], exchange: list[Message]) -> None:
        self.tools = [offer.tool for offer in offers]
        self.exchange = exchange

    @property
    def calls(self) -> list[Any]:
        return [call["function"] for call in self.exchange[1]["tool_calls"]]


def _draw_case(rng: Random, kinds: list[Any], num_calls: int) -> _Case:
    offers = [make_offer(kind, rng, is_usual=1.0) for kind in rng.sample(kinds, len(kinds))]
    called = rng.sample(offers, num_calls)
    return _Case(offers, exchange_calls(rng, [(offer, _ask(rng, offer)) for offer in called]))


def _ask(rng: Random, offer: Offer) -> Asked:
    if offer.kind is CALCULATOR and rng.random() < 0.5:
        a, b = rng.choice(sorted(HELD_OUT))
        return ask_calculation(a, "+", b, rng)
    return offer.kind.draw(rng)


def _score_calls(pocket: Pocket, name: str, cases: list[_Case]) -> Score:
    prompts = [render_chat(case.exchange[:1], True, case.tools) for case in cases]
    said = [text for text, _ in pocket.complete(prompts, MAX_TOKENS)]
    failures = [
        f"{case.exchange[0]['content']!r} -> {text!r}"
        for case, text in zip(cases, said, strict=True)
        if read_calls(text) != case.calls
    ]
    return Score(name, len(cases), failures)


def read_calls(text: str) -> list[Any]:
    """The calls that `text` makes; what cannot be read as JSON is None."""

    def read(call: str) -> Any:
        try:
            return json.loads(call)
        except json.JSONDecodeError:
            return None

    return [read(call) for call in CALL.findall(text)]


def _score_results(pocket: Pocket, name: str, cases: list[_Case]) -> Score:
    """The answer after the results, which must be word for word what training would say."""
    prompts = [render_chat(case.exchange[:-1], True, case.tools) for case in cases]
    said = [text for text, _ in pocket.complete(prompts, MAX_TOKENS)]
    failures = [
        f"{case.exchange[-2]['content']!r} -> {text!r}"
        for case, text in zip(cases, said, strict=True)
        if text != case.exchange[-1]["content"]
    ]
    return Score(name, len(cases), failures)


def _score_no_calls(pocket: Pocket, count: int) -> Score:
    """Small talk and questions about a given text, with both tools offered."""
    rng = Random(SEED)
    tools = [make_offer(kind, rng, is_usual=1.0).tool for kind in (CALCULATOR, LOOKUP)]
    asked = [draw_small_talk(rng) for _ in range(count // 2)]
    asked += [(question, answer) for question, _, answer in (read_sentence(rng) for _ in range(count // 2))]
    prompts = [render_chat([{"role": "user", "content": question}], True, tools) for question, _ in asked]
    said = [text for text, _ in pocket.complete(prompts, MAX_TOKENS)]
    failures = [
        f"{question!r} -> {text!r}"
        for (question, _), text in zip(asked, said, strict=True)
        if "<tool_call>" in text
    ]
    return Score("no call where none is needed", len(asked), failures)


def score_thoughts(pocket: Pocket, count: int) -> Iterator[Score]:
    """Held-out sums and questions about a text, asked for with thinking."""
    rng = Random(SEED)
    sums = [Sum(a, b) for a, b in rng.sample(sorted(HELD_OUT), count)]
    forms = [rng.choice(ADD_FORMS) for _ in sums]
    cases = [
        (each.fill(question), each.fill(reply)) for each, (question, reply) in zip(sums, forms, strict=True)
    ]
    read = [(question, answer) for question, _, answer in (read_sentence(rng) for _ in range(count))]
    yield from _score_thinking(pocket, "held-out additions", cases)
    yield from _score_thinking(pocket, "questions about a text", read)


def _score_thinking(pocket: Pocket, name: str, cases: list[tuple[str, str]]) -> Iterator[Score]:
    """How many answers come after a closed thought, and how many of all are right."""
    messages = [[{"role": "user", "content": question}] for question, _ in cases]
    prompts = [render_chat(each, True, is_thinking=True) for each in messages]
    said = [text for text, _ in pocket.complete(prompts, MAX_TOKENS)]
    silent, wrong = [], []
    for (question, answer), text in zip(cases, said, strict=True):
        thought, closed, answered = text.partition("\n</think>\n\n")
        shown = f"{question!r} -> {text!r}"
        silent += [] if closed and thought else [shown]
        wrong += [] if answered == answer else [shown]
    yield Score(f"{name}: thinks when asked to", len(cases), silent)
    yield Score(f"{name}: right after thinking", len(cases), wrong)
