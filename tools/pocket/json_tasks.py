"""Tasks that are answered as JSON: made-up records, facts taken from a sentence, and lists.

A tenth of all prompts is held out by the hash of its text: training skips them and `evaluate` asks only them.
"""

import json
import re
import zlib
from dataclasses import dataclass
from random import Random

from ..words import LITTLE, a, join_and
from .phrases import ECHO_WORDS, LISTS, Value, draw_slots, draw_value, fill, make_word, read_phrases

HELD_OUT_ONE_IN = 10
_JSON = read_phrases("json")
_COUNTS = {2: "two", 3: "three", 4: "four", 5: "five"}


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


def draw_json_task(rng: Random, is_held_out: bool = False) -> JsonTask:
    """A task whose prompt is held out, or is not."""
    while True:
        task = rng.choices((_draw_record, _draw_extraction, _draw_list), (0.45, 0.45, 0.1))[0](rng)
        if task.is_held_out == is_held_out:
            return task


def draw_copying_task(rng: Random) -> JsonTask:
    """An extraction whose values may be words without a meaning, or of another kind than its keys say.

    Only copying from the prompt gets it right. A prompt that is held out is not drawn.
    """
    text, facts = _state_facts(rng)
    stated: dict[str, Value] = {}
    for key, value in facts.items():
        new = _draw_stranger(rng, value) if rng.random() < 0.6 else value
        text, found = re.subn(rf"\b{value}\b", str(new), text, count=1)
        stated[key] = new if found else value
    task = _ask_for_facts(rng, text, stated)
    return draw_copying_task(rng) if task.is_held_out else task


def _draw_stranger(rng: Random, value: Value) -> Value:
    if isinstance(value, int):
        return rng.randrange(10 ** rng.randint(1, 4))
    word = make_word(rng) if rng.random() < 0.5 else rng.choice(ECHO_WORDS)
    return word.capitalize() if value[0].isupper() else word


def _say_keys(rng: Random, keys: list[str]) -> str:
    word = "key" if len(keys) == 1 else "keys"
    names = ", ".join(keys) if rng.random() < 0.4 else join_and(keys)
    return rng.choice((f"{word} {names}", f"{word} {names}", f"the {word} {names}"))


def _draw_record(rng: Random) -> JsonTask:
    common, kinds, aliases = _JSON["common"], _JSON["kinds"], _JSON["aliases"]
    asked = rng.choice([*kinds, *aliases])
    own = kinds[aliases.get(asked, asked)]
    keys = rng.sample(list(own), rng.randint(1, min(4, len(own))))
    keys += rng.sample(list(common), rng.choice((0, 0, 1, 2)))
    if rng.random() < 0.4:
        rng.shuffle(keys)
    thing = f"{a(rng.choice(LITTLE))} {asked}" if "age" in own and rng.random() < 0.3 else a(asked)
    prompt = rng.choice(_JSON["record_forms"]).format(thing=thing, keys=_say_keys(rng, keys))
    return JsonTask(prompt, {key: draw_value(rng, (common | own)[key]) for key in keys}, is_extraction=False)


def _draw_extraction(rng: Random) -> JsonTask:
    return _ask_for_facts(rng, *_state_facts(rng))


def _state_facts(rng: Random) -> tuple[str, dict[str, Value]]:
    """A sentence, and what it states by key."""
    fact = rng.choice(_JSON["facts"])
    slots = draw_slots(rng, fact["slots"])
    text = fill(str(draw_value(rng, fact["forms"])), slots)
    return text, {key: value for key, value in slots.items() if key != "verb"}


def _ask_for_facts(rng: Random, text: str, facts: dict[str, Value]) -> JsonTask:
    """For all of them, or some."""
    keys = list(facts)
    if rng.random() < 0.4:
        keys = rng.sample(keys, rng.randint(1, len(keys)))
    prompt = rng.choice(_JSON["extract_forms"]).format(text=text, keys=_say_keys(rng, keys))
    return JsonTask(prompt, {key: facts[key] for key in keys}, is_extraction=True)


def _draw_list(rng: Random) -> JsonTask:
    kind = rng.choice(_JSON["lists"])
    count = rng.choice(list(_COUNTS))
    said = _COUNTS[count] if rng.random() < 0.7 else str(count)
    prompt = rng.choice(_JSON["list_forms"]).format(count=said, words=kind)
    return JsonTask(prompt, rng.sample(LISTS[kind], count), is_extraction=False)
