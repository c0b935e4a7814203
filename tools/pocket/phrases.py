"""What the pocket corpora say, by topic (phrases.json): templates, and kinds of values for their slots.

A kind of value is a list of which one is drawn, a range ("3..90"), or a name in LISTS or DRAWS; "other names"
are those that no other slot has.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import msgspec

from ..words import ANIMALS, BOYS, CITIES, COLORS, FOODS, FRUITS, GIRLS, LITTLE, PLACES, TOYS, WORDS, a

Value: TypeAlias = str | int | bool
Kind: TypeAlias = str | list[Any]

_PHRASES: dict[str, dict[str, Any]] = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes())


def read_phrases(topic: str) -> dict[str, Any]:
    """A topic's lists by their names."""
    return _PHRASES[topic]


_PREPOSITIONS = {place: preposition for preposition, place in PLACES}
_FOODS = [many for _, many in FOODS]
LISTS: dict[str, list[str]] = WORDS | {
    "names": GIRLS + BOYS,
    "places": list(_PREPOSITIONS),
    "fruits": FRUITS,
    "food": [name for name, _ in FOODS],
    "foods": _FOODS,
    "items": _FOODS + [f"{toy}s" for toy in TOYS if not toy.endswith("x")],
    "devices": [*TOYS, "light", "heater", "radio", "oven"],
    "attributes": _PHRASES["calls"]["attributes"],
}
_ECHOED = "names pet_names animals little colors toys cities jobs hobbies days"
ECHO_WORDS = [word for name in _ECHOED.split() for word in LISTS[name]]
_MAKE_WORD = _PHRASES["words"]


def make_word(rng: Random) -> str:
    """A word of one to four syllables that means nothing."""
    syllables = rng.randint(1, 4)
    parts = [rng.choice(_MAKE_WORD[part]) for _ in range(syllables) for part in ("onsets", "vowels", "codas")]
    word = "".join(parts)
    return word if rng.random() < 0.7 else word.capitalize()


def draw_thing(rng: Random) -> str:
    """A name, a word or two that mean nothing, or a topic."""
    pick = rng.random()
    if pick < 0.45:
        return " ".join(make_word(rng) for _ in range(rng.choice((1, 1, 2))))
    topics: list[str] = _PHRASES["talk"]["topics"]
    return rng.choice(topics if pick < 0.6 else LISTS["names"] + LISTS["pet_names"] + CITIES + ECHO_WORDS)


def _draw_fact(rng: Random) -> str:
    pick = rng.random()
    if pick < 0.35:
        return str(rng.randrange(10 ** rng.randint(1, 4)))
    return rng.choice(COLORS + CITIES) if pick < 0.55 else draw_thing(rng)


def _draw_known(words: list[str]) -> Callable[[Random], str]:
    return lambda rng: rng.choice(words) if rng.random() < 0.5 else make_word(rng).capitalize()


DRAWS: dict[str, Callable[[Random], Value]] = {
    "yes or no": lambda rng: rng.random() < 0.5,
    "on or off": lambda rng: "on" if rng.random() < 0.5 else "off",
    "title": lambda rng: f"The {rng.choice(LITTLE).title()} {rng.choice(ANIMALS).title()}",
    "degrees": lambda rng: rng.choice(("", f", {rng.randrange(40)} degrees")),
    "words": lambda rng: " ".join(rng.choice(ECHO_WORDS) for _ in range(rng.randint(1, 3))),
    "city": _draw_known(CITIES),
    "name": _draw_known(LISTS["names"]),
    "thing": draw_thing,
    "things": lambda rng: " ".join(draw_thing(rng) for _ in range(rng.randint(1, 2))),
    "fact": _draw_fact,
}


def draw_value(rng: Random, kind: Kind) -> Value:
    """A value of this kind; where there is one only, nothing is drawn."""
    if isinstance(kind, str) and kind in DRAWS:
        return DRAWS[kind](rng)
    if isinstance(kind, str) and ".." in kind:
        low, high = kind.split("..")
        return rng.randint(int(low), int(high))
    values = LISTS[kind] if isinstance(kind, str) else kind
    return values[0] if len(values) == 1 else rng.choice(values)


def draw_slots(rng: Random, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """A value for each slot, drawn in their order."""
    slots: dict[str, Any] = {}
    for slot, kind in kinds.items():
        is_other = isinstance(kind, str) and kind.startswith("other ")
        kind = kind[6:] if is_other else kind
        value = draw_value(rng, kind)
        while is_other and value in slots.values():
            value = draw_value(rng, kind)
        slots[slot] = value
    return slots


def fill(form: str, slots: Mapping[str, Any]) -> str:
    """A template with its slots; `{a_thing}` has its article, `{at_place}` is at or in a place."""
    articles = {f"a_{slot}": a(value) for slot, value in slots.items() if isinstance(value, str) and value}
    place = slots.get("place", "")
    return form.format_map({**articles, "at_place": f"{_PREPOSITIONS.get(place)} the {place}", **slots})
