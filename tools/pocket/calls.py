"""Exchanges in which tools are offered: what is asked, the calls it takes, their results and the answer.

An `Asked` is one question that one tool answers. Two tools matter most: `calculator`, which takes an
expression, and `lookup`, which takes a key such as "age of Mia". The others keep the model reading the offer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

from ..words import BOYS, CITIES, COLORS, GIRLS, PET_NAMES, TOYS, listed
from .phrases import read_phrases
from .sums import HELD_OUT, draw_sum
from .talk import ECHO_WORDS, TOPICS, make_word

Message: TypeAlias = dict[str, Any]
TYPES = {str: "string", int: "integer", bool: "boolean"}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of tool: the names, descriptions and parameter names that it may be offered with.

    The first of each is the usual one. `keys` has the names for each parameter, in their order.
    """

    names: Sequence[str]
    descriptions: Sequence[str]
    keys: Sequence[Sequence[str]]
    types: Sequence[str]
    draw: Callable[[Random], "Asked"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, the values of the call that it takes, what the tool returns, and the answer."""

    question: str
    values: tuple[str | int | bool, ...]
    result: str
    answer: str


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool as one conversation offers it. `tool` has the form of OpenAI's API."""

    kind: Kind
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


def make_offer(kind: Kind, rng: Random, is_usual: float = 0.7) -> Offer:
    """`kind` as a tool, in each part with its usual words at a chance of `is_usual`."""

    def pick(words: Sequence[str]) -> str:
        return words[0] if rng.random() < is_usual else rng.choice(words)

    keys = tuple(pick(names) for names in kind.keys)
    return Offer(kind, make_tool(pick(kind.names), pick(kind.descriptions), keys, kind.types), keys)


def make_tool(name: str, description: str, keys: Sequence[str], types: Sequence[str]) -> dict[str, Any]:
    """A function as OpenAI's API describes it: all of `keys`, of these JSON types, are required."""
    properties = {key: {"type": type_} for key, type_ in zip(keys, types, strict=True)}
    parameters = {"type": "object", "properties": properties, "required": list(keys)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


_CALLS = read_phrases("calls")
SIGNS: dict[str, str] = _CALLS["signs"]
CALCULATE_FORMS: list[str] = _CALLS["calculate_forms"]


def _draw_calculation(rng: Random) -> Asked:
    """Two numbers and a sign; sums below 100 that are held out are not among them."""
    sign = rng.choices(tuple(SIGNS), (0.4, 0.2, 0.3, 0.1))[0]
    if sign in "+-" and rng.random() < 0.5:
        small = draw_sum(rng, is_minus=sign == "-")
        return ask_calculation(small.a, sign, small.b, rng)
    while True:
        a, b = _draw_number(rng), _draw_number(rng)
        pair = (b, a - b) if sign == "-" else (a, b)
        if (min(pair), max(pair)) not in HELD_OUT:
            return ask_calculation(a * b if sign == "/" else a, sign, b, rng)


def _draw_number(rng: Random) -> int:
    return rng.randrange(2, 10 ** rng.randint(1, 4))


def ask_calculation(a: int, sign: str, b: int, rng: Random) -> Asked:
    """Any calculation, with its true result."""
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[sign]
    question = rng.choice(CALCULATE_FORMS).format(a=a, b=b, sign=sign, word=SIGNS[sign])
    return Asked(question, (f"{a} {sign} {b}",), str(result), f"{a} {SIGNS[sign]} {b} is {result}.")


ATTRIBUTES: list[str] = _CALLS["attributes"]
LOOKUP_FORMS: list[tuple[str, str | None]] = _CALLS["lookup_forms"]


def draw_thing(rng: Random) -> str:
    """A name, a word or two that mean nothing, or a topic."""
    pick = rng.random()
    if pick < 0.45:
        return " ".join(make_word(rng) for _ in range(rng.choice((1, 1, 2))))
    return rng.choice(TOPICS if pick < 0.6 else GIRLS + BOYS + PET_NAMES + CITIES + ECHO_WORDS)


def _draw_value(rng: Random) -> str:
    pick = rng.random()
    if pick < 0.35:
        return str(rng.randrange(10 ** rng.randint(1, 4)))
    return rng.choice(COLORS + CITIES) if pick < 0.55 else draw_thing(rng)


def _draw_lookup(rng: Random) -> Asked:
    form, attribute = rng.choice(LOOKUP_FORMS)
    attribute = attribute or (rng.choice(ATTRIBUTES) if rng.random() < 0.85 else make_word(rng).lower())
    return ask_lookup(form, attribute, draw_thing(rng), _draw_value(rng))


def ask_lookup(form: str, attribute: str, thing: str, value: str) -> Asked:
    """A question for an attribute of a thing, and the answer when the call has found `value`."""
    key = f"{attribute} of {thing}"
    return Asked(form.format(x=attribute, y=thing), (key,), value, f"The {key} is {value}.")


def _draw_weather(rng: Random) -> Asked:
    city = rng.choice(CITIES) if rng.random() < 0.5 else make_word(rng).capitalize()
    weather = rng.choice(listed("sunny rainy cloudy windy cold warm hot foggy snowy")) + rng.choice(
        ("", f", {rng.randrange(40)} degrees")
    )
    form = rng.choice(("What is the weather in {}?", "How is the weather in {}?", "Weather in {}?"))
    return Asked(form.format(city), (city,), weather, f"The weather in {city} is {weather}.")


def _draw_time(rng: Random) -> Asked:
    city = rng.choice(CITIES) if rng.random() < 0.5 else make_word(rng).capitalize()
    time = f"{rng.randrange(24)}:{rng.randrange(60):02}"
    form = rng.choice(("What time is it in {}?", "Tell me the time in {}."))
    return Asked(form.format(city), (city,), time, f"It is {time} in {city}.")


def _draw_message(rng: Random) -> Asked:
    name = rng.choice(GIRLS + BOYS) if rng.random() < 0.5 else make_word(rng).capitalize()
    text = " ".join(rng.choice(ECHO_WORDS) for _ in range(rng.randint(1, 3)))
    form = rng.choice(
        ('Send "{text}" to {name}.', 'Send {name} the message "{text}".', 'Tell {name} "{text}".')
    )
    result = rng.choice(("sent", "ok", "done"))
    return Asked(form.format(text=text, name=name), (name, text), result, f"I told {name}: {text}.")


def _draw_timer(rng: Random) -> Asked:
    minutes = rng.randrange(2, 100)
    form = rng.choice(
        ("Set a timer for {} minutes.", "Wake me in {} minutes.", "Start a timer of {} minutes.")
    )
    result = rng.choice(("ok", "started", "done"))
    return Asked(form.format(minutes), (minutes,), result, f"The timer is set for {minutes} minutes.")


def _draw_switch(rng: Random) -> Asked:
    thing, is_on = rng.choice([*TOYS, "light", "heater", "radio", "oven"]), rng.random() < 0.5
    word = "on" if is_on else "off"
    result = rng.choice(("ok", "done"))
    return Asked(f"Turn {word} the {thing}.", (thing, is_on), result, f"The {thing} is {word}.")


def _draw_search(rng: Random) -> Asked:
    query, found = (" ".join(draw_thing(rng) for _ in range(rng.randint(1, 2))) for _ in range(2))
    form = rng.choice(("Search for {}.", "Search the web for {}.", "Find pages about {}."))
    return Asked(form.format(query), (query,), found, f"I found: {found}.")


_DRAWS: dict[str, Callable[[Random], Asked]] = {
    "calculation": _draw_calculation,
    "lookup": _draw_lookup,
    "weather": _draw_weather,
    "time": _draw_time,
    "message": _draw_message,
    "timer": _draw_timer,
    "switch": _draw_switch,
    "search": _draw_search,
}
CALCULATOR, LOOKUP, *OTHERS = (
    Kind(**words, draw=_DRAWS[name]) for name, words in read_phrases("tools").items()
)


def draw_nonsense_kind(rng: Random) -> Kind:
    """A tool with a name that means nothing: only the question and the offer say when it is called."""
    word, key = make_word(rng).lower(), make_word(rng).lower()
    name = word if rng.random() < 0.5 else f"{word}_{make_word(rng).lower()}"
    description = rng.choice((f"Does {word}.", f"The {word} of something.", f"Makes a {word}."))

    def draw(rng: Random) -> Asked:
        value, result = draw_thing(rng), _draw_value(rng)
        form = rng.choice(("Use {name} with {value}.", "Call {name} with {value}.", "{name} {value}"))
        return Asked(form.format(name=name, value=value), (value,), result, f"{name} says {result}.")

    return Kind((name,), (description,), ((key, "input", "text"),), ("string",), draw)


def draw_offers(rng: Random) -> list[Offer]:
    """One to three tools of different kinds."""
    kinds = [CALCULATOR, LOOKUP, *rng.sample(OTHERS, 2), draw_nonsense_kind(rng)]
    weights = [0.4, 0.4, 0.07, 0.07, 0.06]
    chosen: list[Kind] = []
    for _ in range(rng.choices((1, 2, 3), (0.35, 0.5, 0.15))[0]):
        [kind] = rng.choices(
            kinds, [0 if kind in chosen else w for kind, w in zip(kinds, weights, strict=True)]
        )
        chosen.append(kind)
    return [make_offer(kind, rng) for kind in chosen]


def draw_calls(rng: Random, offers: list[Offer]) -> list[tuple[Offer, Asked]]:
    """One question, or two that are asked at once; two may go to the same tool."""
    num_calls = 2 if rng.random() < 0.3 else 1
    picked = rng.sample(offers, 2) if num_calls == 2 <= len(offers) and rng.random() < 0.7 else None
    return [(each, each.kind.draw(rng)) for each in picked or rng.choices(offers, k=num_calls)]


def ask_all(rng: Random, calls: list[tuple[Offer, Asked]]) -> str:
    """One question, or both in one message."""
    first, *rest = [asked.question for _, asked in calls]
    if not rest:
        return first
    second = rest[0]
    if first[-1] in "?." and second[0].isupper() and rng.random() < 0.6:
        return f"{first[:-1]}{rng.choice((' and ', ', and '))}{second[0].lower()}{second[1:]}"
    return f"{first}{'' if first[-1] in '?.' else '.'} {rng.choice(('', 'And '))}{second}".replace(
        "And W", "And w"
    )


def exchange_calls(rng: Random, calls: list[tuple[Offer, Asked]]) -> list[Message]:
    """The question, the turn that calls, the results and the answer that uses them."""
    return [
        {"role": "user", "content": ask_all(rng, calls)},
        {"role": "assistant", "content": "", "tool_calls": [each.call(asked) for each, asked in calls]},
        *[{"role": "tool", "content": wrap_result(rng, asked.result)} for _, asked in calls],
        {"role": "assistant", "content": " ".join(asked.answer for _, asked in calls)},
    ]


def wrap_result(rng: Random, result: str) -> str:
    """A result as tools write it: bare, mostly, or as JSON."""
    if rng.random() < 0.75:
        return result
    value = result if result.isdigit() else f'"{result}"'
    return f'{{"{rng.choice(("result", "value", "answer"))}": {value}}}'
