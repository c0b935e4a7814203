"""Tells stories: fills a plot's sentences with characters, a place and things that stay the same throughout.

A plot (plots.json) is a want, an obstacle, help, a resolution and a moral, with its questions; of each step
one sentence is told. Slots are those of phrases.json, `{hero} {he} {him} {his}`, and the same with `f_` for
`{friend}`; a capital first letter in a slot's name gives the capital form.
A story knows the questions that its own text answers. Everything random comes from the caller's `Random`.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from ..words import ANIMALS, FOODS, PLACES, Character, a, capital, pick_animal, pick_child
from .phrases import draw_slots, read_phrases

_STORIES = read_phrases("stories")
_PLURALS, _PREPOSITIONS = dict(FOODS), {place: preposition for preposition, place in PLACES}


@dataclass(frozen=True, slots=True)
class Plot:
    """`theme` is what a user asks for ("a story about sharing"); `questions` come with their answers."""

    theme: str
    steps: tuple[tuple[str, ...], ...]
    morals: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    has_thing: bool = True


PLOTS = msgspec.json.decode(Path(__file__).with_name("plots.json").read_bytes(), type=list[Plot])


@dataclass(frozen=True, slots=True)
class Story:
    """A told story. `subject` asks for it ("a fox"), and each of `questions` comes with its answer."""

    text: str
    subject: str
    questions: tuple[tuple[str, str], ...]


def tell_story(rng: Random, hero: Character | None = None, says_kind: bool = False) -> Story:
    """One story, about `hero` where given; with `says_kind` its first sentence says what the hero is."""
    plot = rng.choice(PLOTS)
    hero = hero or _pick_hero(rng)
    slots = _draw_slots(rng, hero, _pick_friend(rng, hero))
    forms = [_pick_opening(rng, hero, says_kind)]
    if rng.random() < 0.3:
        forms.append(rng.choice(_STORIES["moods"]))
    forms += [rng.choice(step) for step in plot.steps]
    forms.append(rng.choice(plot.morals))
    if rng.random() < 0.3:
        forms.append(rng.choice(_STORIES["endings"]))
    questions = [*plot.questions, *_STORIES["character_questions"]]
    if hero.is_named and hero.kind in ANIMALS:
        questions.append(_STORIES["name_question"])
    return Story(
        " ".join(form.format_map(slots) for form in forms),
        _pick_subject(rng, hero, plot, slots),
        tuple((asked.format_map(slots), answer.format_map(slots)) for asked, answer in questions),
    )


def _pick_hero(rng: Random) -> Character:
    """A child, or an animal with or without a name."""
    female = rng.random() < 0.5
    if rng.random() < 0.45:
        return pick_child(rng, female)
    return pick_animal(rng, female, named=rng.random() < 0.6)


def _pick_friend(rng: Random, hero: Character) -> Character:
    """Someone other than `hero`, mostly of the other gender, so that most pronouns are unambiguous."""
    female = hero.female if rng.random() < 0.25 else not hero.female
    while True:
        friend = pick_child(rng, female) if rng.random() < 0.4 else pick_animal(rng, female, named=False)
        are_both_named = friend.is_named and hero.is_named
        if friend.ref != hero.ref and (friend.kind != hero.kind or are_both_named):
            return friend


def _draw_slots(rng: Random, hero: Character, friend: Character) -> dict[str, Any]:
    kinds = _STORIES["slots"]
    babies = [kind for kind in kinds["baby"] if kind not in (hero.kind, friend.kind)]
    slots = draw_slots(rng, kinds | {"baby": babies})
    slots |= {"thing": f"{slots['color']} {slots['noun']}", "foods": _PLURALS[slots["food"]]}
    slots |= {"at_place": f"{_PREPOSITIONS[slots['place']]} the {slots['place']}"}
    slots |= {f"a_{key}": a(slots[key]) for key in ("trait", "thing", "plant", "building")}
    slots |= {"hero": hero.ref, "friend": friend.ref, "place": f"the {slots['place']}"}
    slots |= {"Hero": capital(hero.ref), "Friend": capital(friend.ref)}
    slots |= {"himself": "herself" if hero.female else "himself"}
    return slots | hero.slots() | friend.slots("f_")


def _pick_opening(rng: Random, hero: Character, says_kind: bool) -> str:
    arrive = rng.choice(_STORIES["arrivals"])
    openings = _STORIES["named_openings" if hero.is_named else "unnamed_openings"]
    if says_kind and hero.is_named:
        openings = [opening for opening in openings if "{kind}" in opening]
    return rng.choice(openings).replace("{arrive}", arrive)


def _pick_subject(rng: Random, hero: Character, plot: Plot, slots: dict[str, Any]) -> str:
    """What a user would say to get this story: its hero (mostly), its theme or its thing."""
    subjects = [a(hero.kind), a(hero.kind), f"{slots['a_trait']} {hero.kind}", plot.theme]
    if hero.is_named:
        subjects += [hero.ref, f"{a(hero.kind)} named {hero.ref}"]
    if plot.has_thing:
        subjects.append(slots["a_thing"])
    return rng.choice(subjects)
