"""Short paragraphs about people, and questions that only one of them answers (episodes.txt).

Who, where and with what is drawn; an eighth of these combinations is in no training text, and neither are the
questions that the file marks with an exclamation mark.
"""

import re
from dataclasses import dataclass
from random import Random
from string import Formatter
from zlib import crc32

from ...words import BOYS, CITIES, COLORS, GIRLS, JOBS, PLACES, TOYS, a
from ..phrases import Kind, draw_slots, read_phrases
from .pairs import Pair, Passage, read_sections, split_cells

_EPISODES = read_phrases("episodes")
_GIRLS, _TOYS = GIRLS + _EPISODES["more_girls"], TOYS + _EPISODES["more_toys"]
_NAMES, _CITIES = _GIRLS + BOYS + _EPISODES["more_boys"], CITIES + _EPISODES["more_cities"]
_KINDS: dict[str, Kind] = _EPISODES["lists"] | {"city": _CITIES}
SLOTS_OF = {  # drawn and kept together
    "name": ("name", "Name", "he", "He", "him", "his", "His"),
    "friend": ("friend", "Friend", "f_his"),
    "thing": ("thing", "a_thing"),
    "job": ("job", "a_job"),
    "number": ("number", "Number"),
}
GROUP_OF = {slot: group for group, slots in SLOTS_OF.items() for slot in slots}
_WHO_WHERE_WHAT = re.compile(
    rf"\b({'|'.join((*_NAMES, *_CITIES, *(place for _, place in PLACES)))})\b"
    rf"|\b(?:{'|'.join(COLORS)}) (?:{'|'.join(_TOYS)})\b"
)


@dataclass(frozen=True, slots=True)
class Frame:
    """What happens: sentences in variants of which one is told, and what can be asked."""

    sentences: list[list[str]]
    questions: list[str]
    held_out_questions: list[str]


FRAMES = [
    Frame([split_cells(line, " / ") for line in each.marked["+"]], each.marked["?"], each.marked["!"])
    for each in read_sections("episodes.txt")
]


def draw_episode(rng: Random, is_held_out: bool = False) -> Pair:
    """A paragraph with a question of it; the wrong one is of the same frame with some of the same words."""
    while True:
        frame = rng.choice(FRAMES)
        told = " ".join(rng.choice(variants) for variants in frame.sentences)
        question = rng.choice(frame.held_out_questions if is_held_out else frame.questions)
        named, slots = _list_groups(question), _draw_slots(rng)
        text = told.format_map(slots)
        if set(named) <= set(_list_groups(told)) and is_combination_held_out(text) == is_held_out:
            break
    while True:
        wrong = told.format_map(_change_slots(rng, slots, named))
        if not is_combination_held_out(wrong):
            return Pair(question.format_map(slots), Passage(text), Passage(wrong))


def is_combination_held_out(text: str) -> bool:
    """Whether no training text has the people, places and things of `text`, these and no others."""
    found = sorted({match.group() for match in _WHO_WHERE_WHAT.finditer(text)})
    return crc32(" ".join(found).encode()) % 8 == 0


def _list_groups(form: str) -> list[str]:
    """What a template names, by the groups of `SLOTS_OF`."""
    return sorted({GROUP_OF.get(slot, slot) for _, slot, _, _ in Formatter().parse(form) if slot})


def _draw_slots(rng: Random) -> dict[str, str]:
    slots = draw_slots(rng, _KINDS) | _draw_people(rng)
    thing, job = f"{rng.choice(COLORS)} {rng.choice(_TOYS)}", rng.choice(JOBS)
    slots |= {"thing": thing, "a_thing": a(thing), "job": job, "a_job": a(job)}
    preposition, place = rng.choice(PLACES)
    return slots | {"at_place": f"{preposition} the {place}", "Number": slots["number"].capitalize()}


def _draw_people(rng: Random) -> dict[str, str]:
    """Two people; of the second only the name and one pronoun are used."""
    name, friend = rng.sample(_NAMES, 2)
    he, him, his = ("she", "her", "her") if name in _GIRLS else ("he", "him", "his")
    slots = {"name": name, "he": he, "him": him, "his": his}
    slots |= {key.capitalize(): word.capitalize() for key, word in slots.items()}
    friends = "her" if friend in _GIRLS else "his"
    return slots | {"friend": friend, "Friend": friend, "f_his": friends}


def _change_slots(rng: Random, slots: dict[str, str], named: list[str]) -> dict[str, str]:
    """`slots` with half of them, or of those `named` in the question, drawn anew; at least one of these."""
    groups = named if rng.random() < 0.5 else sorted({GROUP_OF.get(slot, slot) for slot in slots})
    while True:
        drawn, mixed = _draw_slots(rng), dict(slots)
        for group in groups:
            if rng.random() < 0.5:
                mixed |= {slot: drawn[slot] for slot in SLOTS_OF.get(group, (group,))}
        if any(mixed[group] != slots[group] for group in named):
            return mixed
