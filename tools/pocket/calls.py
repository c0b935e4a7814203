"""Exchanges in which tools are offered: what is asked, the calls it takes, their results and the answer.

An `Asked` is one question that one tool answers. Two tools matter most: `calculator`, which takes an
expression, and `lookup`, which takes a key such as "age of Mia". The others keep the model reading the offer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

from .phrases import Kind, draw_slots, draw_value, fill, make_word, read_phrases
from .sums import HELD_OUT, draw_sum

Message: TypeAlias = dict[str, Any]
_CALLS = read_phrases("calls")
_SIGNS: dict[str, str] = _CALLS["signs"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, the values of the call that it takes, what the tool returns, and the answer."""

    question: str
    values: tuple[str | int | bool, ...]
    result: str
    answer: str


@dataclass(frozen=True, slots=True)
class ToolKind:
    """A kind of tool: the names, descriptions and parameter names that it may be offered with.

    The first of each is the usual one. `keys` has the names for each parameter, in their order. What is asked
    of it are templates; `values` are the slots that its parameters take.
    """

    names: Sequence[str]
    descriptions: Sequence[str]
    keys: Sequence[Sequence[str]]
    types: Sequence[str]
    slots: dict[str, Kind] = field(default_factory=dict[str, Kind])
    values: Sequence[str] = ()
    result: str = ""
    answer: str = ""

    def draw(self, rng: Random) -> Asked:
        """Something that this tool answers."""
        if self is CALCULATOR:
            return _draw_calculation(rng)
        if self is LOOKUP:
            return _draw_lookup(rng)
        slots = draw_slots(rng, self.slots)
        values = zip((slots[name] for name in self.values), self.types, strict=True)
        return Asked(
            fill(slots["form"], slots),
            tuple(value == "on" if kind == "boolean" else value for value, kind in values),
            fill(self.result, slots),
            fill(self.answer, slots),
        )


CALCULATOR, LOOKUP, *OTHERS = (ToolKind(**words) for words in read_phrases("tools").values())


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool as one conversation offers it. `tool` has the form of OpenAI's API."""

    kind: ToolKind
    tool: dict[str, Any]
    keys: tuple[str, ...]

    @property
    def name(self) -> str:
        """What a call of the tool says."""
        return self.tool["function"]["name"]

    def call(self, asked: Asked) -> dict[str, Any]:
        """The call that answers `asked`, in the form of OpenAI's API with arguments as an object."""
        arguments = dict(zip(self.keys, asked.values, strict=True))
        return {"type": "function", "function": {"name": self.name, "arguments": arguments}}


def make_offer(kind: ToolKind, rng: Random, is_usual: float = 0.7) -> Offer:
    """`kind` as a tool, in each part with its usual words at a chance of `is_usual`."""

    def pick(words: Sequence[str]) -> str:
        return words[0] if rng.random() < is_usual else rng.choice(words)

    keys = tuple(pick(names) for names in kind.keys)
    return Offer(kind, make_tool(pick(kind.names), pick(kind.descriptions), keys, kind.types), keys)


def make_tool(name: str, description: str, keys: Sequence[str], types: Sequence[str]) -> dict[str, Any]:
    """A function as OpenAI's API describes it: all of `keys`, of these JSON types, are required."""
    properties = {key: {"type": type_} for key, type_ in zip(keys, types, strict=True)}
    parameters = {"type": "object", "properties": properties, "required": list(keys)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _draw_calculation(rng: Random) -> Asked:
    """Two numbers and a sign; sums below 100 that are held out are not among them."""
    sign = rng.choices(tuple(_SIGNS), (0.4, 0.2, 0.3, 0.1))[0]
    if sign in "+-" and rng.random() < 0.5:
        small = draw_sum(rng, is_minus=sign == "-")
        return ask_calculation(small.a, sign, small.b, rng)
    while True:
        a, b = (rng.randrange(2, 10 ** rng.randint(1, 4)) for _ in range(2))
        pair = (b, a - b) if sign == "-" else (a, b)
        if (min(pair), max(pair)) not in HELD_OUT:
            return ask_calculation(a * b if sign == "/" else a, sign, b, rng)


def ask_calculation(a: int, sign: str, b: int, rng: Random) -> Asked:
    """Any calculation, with its true result."""
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[sign]
    question = rng.choice(_CALLS["calculate_forms"]).format(a=a, b=b, sign=sign, word=_SIGNS[sign])
    return Asked(question, (f"{a} {sign} {b}",), str(result), f"{a} {_SIGNS[sign]} {b} is {result}.")


def _draw_lookup(rng: Random) -> Asked:
    """An attribute of a thing, and what is found."""
    form, attribute = rng.choice(_CALLS["lookup_forms"])
    attribute = attribute or (
        draw_value(rng, "attributes") if rng.random() < 0.85 else make_word(rng).lower()
    )
    thing, value = (str(draw_value(rng, kind)) for kind in ("thing", "fact"))
    key = f"{attribute} of {thing}"
    return Asked(form.format(x=attribute, y=thing), (key,), value, f"The {key} is {value}.")


def _draw_nonsense_kind(rng: Random) -> ToolKind:
    """A tool with a name that means nothing: only the question and the offer say when it is called."""
    word, key = make_word(rng).lower(), make_word(rng).lower()
    name = word if rng.random() < 0.5 else f"{word}_{make_word(rng).lower()}"
    description = rng.choice((f"Does {word}.", f"The {word} of something.", f"Makes a {word}."))
    return ToolKind(
        (name,),
        (description,),
        ((key, "input", "text"),),
        ("string",),
        {"value": "thing", "found": "fact", "name": [name], "form": _CALLS["nonsense_forms"]},
        ("value",),
        "{found}",
        "{name} says {found}.",
    )


def draw_offers(rng: Random) -> list[Offer]:
    """One to three tools of different kinds."""
    kinds = [CALCULATOR, LOOKUP, *rng.sample(OTHERS, 2), _draw_nonsense_kind(rng)]
    weights = [0.4, 0.4, 0.07, 0.07, 0.06]
    chosen: list[int] = []
    for _ in range(rng.choices((1, 2, 3), (0.35, 0.5, 0.15))[0]):
        left = [0 if index in chosen else weight for index, weight in enumerate(weights)]
        chosen += rng.choices(range(len(kinds)), left)
    return [make_offer(kinds[index], rng) for index in chosen]


def draw_calls(rng: Random, offers: list[Offer]) -> list[tuple[Offer, Asked]]:
    """One question, or two that are asked at once; two may go to the same tool."""
    num_calls = 2 if rng.random() < 0.3 else 1
    picked = rng.sample(offers, 2) if num_calls == 2 <= len(offers) and rng.random() < 0.7 else None
    return [(each, each.kind.draw(rng)) for each in picked or rng.choices(offers, k=num_calls)]


def _ask_all(rng: Random, calls: list[tuple[Offer, Asked]]) -> str:
    """One question, or both in one message."""
    first, *rest = [asked.question for _, asked in calls]
    if not rest:
        return first
    second = rest[0]
    if first[-1] in "?." and second[0].isupper() and rng.random() < 0.6:
        return f"{first[:-1]}{rng.choice((' and ', ', and '))}{second[0].lower()}{second[1:]}"
    end = "" if first[-1] in "?." else "."
    return f"{first}{end} {rng.choice(('', 'And '))}{second}".replace("And W", "And w")


def exchange_calls(rng: Random, calls: list[tuple[Offer, Asked]]) -> list[Message]:
    """The question, the turn that calls, the results and the answer that uses them."""
    return [
        {"role": "user", "content": _ask_all(rng, calls)},
        {"role": "assistant", "content": "", "tool_calls": [each.call(asked) for each, asked in calls]},
        *[{"role": "tool", "content": _wrap_result(rng, asked.result)} for _, asked in calls],
        {"role": "assistant", "content": " ".join(asked.answer for _, asked in calls)},
    ]


def _wrap_result(rng: Random, result: str) -> str:
    """A result as tools write it: bare, mostly, or as JSON."""
    if rng.random() < 0.75:
        return result
    value = result if result.isdigit() else f'"{result}"'
    return f'{{"{rng.choice(("result", "value", "answer"))}": {value}}}'
