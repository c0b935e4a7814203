"""Tasks that are answered as JSON: made-up records, facts taken from a sentence, and lists.

A tenth of all prompts is held out by the hash of its text: training skips them and `evaluate` asks only them.
"""

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from ..words import (
    ANIMALS,
    BOYS,
    CITIES,
    COLORS,
    DAYS,
    FOODS,
    FRUITS,
    GIRLS,
    HOBBIES,
    JOBS,
    LITTLE,
    PET_NAMES,
    PLACES,
    TOYS,
    a,
    join_and,
)
from .phrases import read_phrases
from .talk import ECHO_WORDS, make_word

Value: TypeAlias = str | int | bool | list[str]
Draw: TypeAlias = Callable[[Random], Value]

HELD_OUT_ONE_IN = 10


@dataclass(frozen=True, slots=True)
class JsonTask:
    """A prompt, the object or list that answers it, and whether the prompt states every value of it."""

    prompt: str
    value: dict[str, Value] | list[str]
    is_extraction: bool

    @property
    def answer(self) -> str:
        """`value` as the model is to write it."""
        return json.dumps(self.value)

    @property
    def is_held_out(self) -> bool:
        """Whether it is left out of the training text."""
        return zlib.crc32(self.prompt.encode()) % HELD_OUT_ONE_IN == 0


def _one_of(words: list[str]) -> Draw:
    return lambda rng: rng.choice(words)


def _between(low: int, high: int) -> Draw:
    return lambda rng: rng.randint(low, high)


def _yes_or_no(rng: Random) -> bool:
    return rng.random() < 0.5


PEOPLE = GIRLS + BOYS
PLACE_NAMES = [place for _, place in PLACES]
# Keys that mean the same for every kind of thing, then for each kind of thing those that mean it alone.
COMMON: dict[str, Draw] = {
    "color": _one_of(COLORS),
    "count": _between(1, 20),
    "size": _one_of(["small", "big", "tiny", "huge"]),
    "price": _between(1, 50),
    "place": _one_of(PLACE_NAMES),
    "day": _one_of(DAYS),
    "happy": _yes_or_no,
    "friend": _one_of(PEOPLE),
    "id": _between(1, 99),
    "mood": _one_of(["happy", "sad", "calm", "proud", "tired"]),
}
KINDS: dict[str, dict[str, Draw]] = {
    "person": {
        "name": _one_of(PEOPLE),
        "age": _between(3, 90),
        "city": _one_of(CITIES),
        "job": _one_of(JOBS),
        "hobby": _one_of(HOBBIES),
        "pet": _one_of(ANIMALS),
    },
    "child": {
        "name": _one_of(PEOPLE),
        "age": _between(3, 12),
        "toy": _one_of(TOYS),
        "hobby": _one_of(HOBBIES),
        "trait": _one_of(LITTLE),
    },
    "animal": {
        "name": _one_of(PET_NAMES),
        "kind": _one_of(ANIMALS),
        "species": _one_of(ANIMALS),
        "age": _between(1, 20),
        "food": _one_of([many for _, many in FOODS]),
        "legs": lambda rng: rng.choice((2, 4)),
    },
    "fruit": {"name": _one_of(FRUITS), "sweet": _yes_or_no, "weight": _between(1, 30)},
    "toy": {"name": _one_of(TOYS), "owner": _one_of(PEOPLE), "new": _yes_or_no},
    "book": {
        "title": lambda rng: f"The {rng.choice(LITTLE).title()} {rng.choice(ANIMALS).title()}",
        "author": _one_of(PEOPLE),
        "pages": _between(10, 300),
        "year": _between(1950, 2024),
    },
    "city": {
        "name": _one_of(CITIES),
        "country": _one_of(["France", "Italy", "England", "Norway", "Japan", "Egypt", "Peru", "India"]),
        "people": _between(100, 900),
    },
}
_JSON = read_phrases("json")
ALIASES: dict[str, str] = _JSON["aliases"]
RECORD_FORMS: list[str] = _JSON["record_forms"]
EXTRACT_FORMS: list[str] = _JSON["extract_forms"]
LISTS: dict[str, list[str]] = {
    "animals": ANIMALS, "colors": COLORS, "fruits": FRUITS, "toys": TOYS, "names": PEOPLE, "cities": CITIES,
    "places": PLACE_NAMES, "jobs": JOBS, "hobbies": HOBBIES, "days": DAYS,
}  # fmt: skip
LIST_FORMS: list[str] = _JSON["list_forms"]
COUNTS = {2: "two", 3: "three", 4: "four", 5: "five"}


def draw_json_task(rng: Random) -> JsonTask:
    """A task whose prompt is not held out."""
    return _draw_until(rng, is_held_out=False)


def draw_held_out_json_task(rng: Random) -> JsonTask:
    """A task whose prompt is held out."""
    return _draw_until(rng, is_held_out=True)


def draw_copying_task(rng: Random) -> JsonTask:
    """An extraction whose values may be words without a meaning, or of another kind than its keys say.

    Only copying from the prompt gets it right. A prompt that is held out is not drawn.
    """
    text, facts = rng.choice(_FACTS)(rng)
    stated: dict[str, Value] = {}
    for key, value in facts.items():
        new = _draw_stranger(rng, value) if rng.random() < 0.6 else value
        text, found = re.subn(rf"\b{value}\b", str(new), text, count=1)
        stated[key] = new if found else value
    keys = list(stated)
    if rng.random() < 0.4:
        keys = rng.sample(keys, rng.randint(1, len(keys)))
    prompt = rng.choice(EXTRACT_FORMS).format(text=text, keys=_say_keys(rng, keys))
    task = JsonTask(prompt, {key: stated[key] for key in keys}, is_extraction=True)
    return draw_copying_task(rng) if task.is_held_out else task


def _draw_stranger(rng: Random, value: Value) -> Value:
    if isinstance(value, int):
        return rng.randrange(10 ** rng.randint(1, 4))
    word = make_word(rng) if rng.random() < 0.5 else rng.choice(ECHO_WORDS)
    return word.capitalize() if str(value)[0].isupper() else word


def _draw_until(rng: Random, is_held_out: bool) -> JsonTask:
    while True:
        task = rng.choices(_DRAWS, _SHARES)[0](rng)
        if task.is_held_out == is_held_out:
            return task


def _say_keys(rng: Random, keys: list[str]) -> str:
    word = "key" if len(keys) == 1 else "keys"
    names = ", ".join(keys) if rng.random() < 0.4 else join_and(keys)
    return rng.choice((f"{word} {names}", f"{word} {names}", f"the {word} {names}"))


def _draw_record(rng: Random) -> JsonTask:
    asked = rng.choice([*KINDS, *ALIASES])
    own = KINDS[ALIASES.get(asked, asked)]
    draws = COMMON | own
    keys = rng.sample(list(own), rng.randint(1, min(4, len(own))))
    keys += rng.sample(list(COMMON), rng.choice((0, 0, 1, 2)))
    if rng.random() < 0.4:
        rng.shuffle(keys)
    is_alive = "age" in own
    thing = f"{a(rng.choice(LITTLE))} {asked}" if is_alive and rng.random() < 0.3 else a(asked)
    prompt = rng.choice(RECORD_FORMS).format(thing=thing, keys=_say_keys(rng, keys))
    return JsonTask(prompt, {key: draws[key](rng) for key in keys}, is_extraction=False)


def _draw_extraction(rng: Random) -> JsonTask:
    text, facts = rng.choice(_FACTS)(rng)
    keys = list(facts)
    if rng.random() < 0.4:
        keys = rng.sample(keys, rng.randint(1, len(keys)))
    prompt = rng.choice(EXTRACT_FORMS).format(text=text, keys=_say_keys(rng, keys))
    return JsonTask(prompt, {key: facts[key] for key in keys}, is_extraction=True)


def _draw_list(rng: Random) -> JsonTask:
    kind = rng.choice(list(LISTS))
    count = rng.choice(list(COUNTS))
    said = COUNTS[count] if rng.random() < 0.7 else str(count)
    prompt = rng.choice(LIST_FORMS).format(count=said, words=kind)
    return JsonTask(prompt, rng.sample(LISTS[kind], count), is_extraction=False)


def _owns(rng: Random) -> tuple[str, dict[str, Value]]:
    name, count, color = rng.choice(PEOPLE), rng.randint(2, 20), rng.choice(COLORS)
    item = rng.choice([many for _, many in FOODS] + [f"{toy}s" for toy in TOYS if not toy.endswith("x")])
    verb = rng.choice(("has", "has", "sees", "wants", "buys", "finds"))
    return f"{name} {verb} {count} {color} {item}.", {
        "name": name,
        "count": count,
        "color": color,
        "item": item,
    }


def _introduces(rng: Random) -> tuple[str, dict[str, Value]]:
    name, age, city = rng.choice(PEOPLE), rng.randint(3, 90), rng.choice(CITIES)
    text = rng.choice(
        (f"{name} is {age} years old and lives in {city}.", f"{name} lives in {city} and is {age} years old.")
    )
    return text, {"name": name, "age": age, "city": city}


def _works(rng: Random) -> tuple[str, dict[str, Value]]:
    name, job, hobby = rng.choice(PEOPLE), rng.choice(JOBS), rng.choice(HOBBIES)
    text = rng.choice(
        (f"{name} is {a(job)} and likes {hobby}.", f"{name} likes {hobby} and works as {a(job)}.")
    )
    return text, {"name": name, "job": job, "hobby": hobby}


def _pet(rng: Random) -> tuple[str, dict[str, Value]]:
    owner, color = rng.choice(PEOPLE), rng.choice(COLORS)
    kind, name = rng.choice(ANIMALS), rng.choice(PET_NAMES)
    text = rng.choice(
        (f"{owner} has a {color} {kind} named {name}.", f"{name} is the {color} {kind} of {owner}.")
    )
    return text, {"owner": owner, "color": color, "kind": kind, "name": name}


def _finds(rng: Random) -> tuple[str, dict[str, Value]]:
    name, color, item = rng.choice(PEOPLE), rng.choice(COLORS), rng.choice(TOYS)
    preposition, place = rng.choice(PLACES)
    text = f"{name} {rng.choice(('found', 'lost', 'saw'))} {a(color)} {item} {preposition} the {place}."
    return text, {"name": name, "color": color, "item": item, "place": place}


def _costs(rng: Random) -> tuple[str, dict[str, Value]]:
    item, color, price = rng.choice(TOYS), rng.choice(COLORS), rng.randint(1, 50)
    return f"The {color} {item} costs {price} coins.", {"item": item, "color": color, "price": price}


def _goes(rng: Random) -> tuple[str, dict[str, Value]]:
    name, friend = rng.sample(PEOPLE, 2)
    place, day = rng.choice(PLACE_NAMES), rng.choice(DAYS)
    text = rng.choice(
        (
            f"On {day}, {name} goes to the {place} with {friend}.",
            f"{name} and {friend} go to the {place} on {day}.",
        )
    )
    return text, {"name": name, "friend": friend, "place": place, "day": day}


_FACTS = (_owns, _owns, _introduces, _works, _pet, _finds, _costs, _goes)
_DRAWS = (_draw_record, _draw_extraction, _draw_list)
_SHARES = (0.45, 0.45, 0.1)
