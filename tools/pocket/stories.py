"""Tells stories: fills a plot's sentences with characters, a place and things that stay the same throughout.

A story knows the questions that its own text answers. Everything random comes from the caller's `Random`.
"""

from dataclasses import dataclass
from random import Random

from ..words import ANIMALS, COLORS, FOODS, LITTLE, PLACES, SPOTS, TOYS, Character, a, capital
from ..words import pick_animal as animal
from ..words import pick_child as child
from .phrases import read_phrases
from .plots import FILLINGS, PLOTS, Plot

_STORIES = read_phrases("stories")
COUNT_WORDS: list[str] = _STORIES["count_words"]
NAMED_OPENINGS: list[str] = _STORIES["named_openings"]
UNNAMED_OPENINGS: list[str] = _STORIES["unnamed_openings"]
ARRIVALS: list[str] = _STORIES["arrivals"]
MOODS: list[str] = _STORIES["moods"]
ENDINGS: list[str] = _STORIES["endings"]
CHARACTER_QUESTIONS: list[tuple[str, str]] = _STORIES["character_questions"]


@dataclass(frozen=True, slots=True)
class Story:
    """A told story. `subject` asks for it ("a fox"), and each of `questions` comes with its answer."""

    text: str
    subject: str
    questions: tuple[tuple[str, str], ...]


def tell_story(rng: Random, hero: Character | None = None, says_kind: bool = False) -> Story:
    """One story, about `hero` where given; with `says_kind` its first sentence says what the hero is."""
    plot = rng.choice(PLOTS)
    hero = hero or pick_hero(rng)
    slots = _draw_slots(rng, hero, pick_friend(rng, hero))
    sentences = [_open(rng, hero, slots, says_kind)]
    if rng.random() < 0.3:
        sentences.append(rng.choice(MOODS).format_map(slots))
    sentences += [rng.choice(step).format_map(slots) for step in plot.steps]
    sentences.append(rng.choice(plot.morals).format_map(slots))
    if rng.random() < 0.3:
        sentences.append(rng.choice(ENDINGS))
    questions = [(q.format_map(slots), reply.format_map(slots)) for q, reply in _questions(hero, plot)]
    return Story(" ".join(sentences), _pick_subject(rng, hero, plot, slots), tuple(questions))


def pick_hero(rng: Random) -> Character:
    """A child, or an animal with or without a name."""
    female = rng.random() < 0.5
    if rng.random() < 0.45:
        return child(rng, female)
    return animal(rng, female, named=rng.random() < 0.6)


def pick_friend(rng: Random, hero: Character) -> Character:
    """Someone other than `hero`, mostly of the other gender, so that most pronouns are unambiguous."""
    female = hero.female if rng.random() < 0.25 else not hero.female
    while True:
        friend = child(rng, female) if rng.random() < 0.4 else animal(rng, female, named=False)
        if friend.ref != hero.ref and friend.kind != hero.kind:
            return friend
        if friend.is_named and hero.is_named and friend.ref != hero.ref:
            return friend


def _draw_slots(rng: Random, hero: Character, friend: Character) -> dict[str, str]:
    preposition, place = rng.choice(PLACES)
    food, foods = rng.choice(FOODS)
    trait, color, noun = rng.choice(LITTLE), rng.choice(COLORS), rng.choice(TOYS)
    slots = {
        "hero": hero.ref,
        "friend": friend.ref,
        "himself": "herself" if hero.female else "himself",
        "trait": trait,
        "a_trait": a(trait),
        "place": f"the {place}",
        "at_place": f"{preposition} the {place}",
        "spot": rng.choice(SPOTS),
        "noun": noun,
        "thing": f"{color} {noun}",
        "food": food,
        "foods": foods,
        "fruits": rng.choice(("apples", "pears", "plums", "berries", "nuts", "peaches", "cherries")),
        "count": rng.choice(COUNT_WORDS),
        "fear": rng.choice(FILLINGS.fears),
        "plant": rng.choice(FILLINGS.plants),
        "skill": rng.choice(FILLINGS.skills),
        "shelter": rng.choice(FILLINGS.shelters),
        "baby": rng.choice([kind for kind in FILLINGS.babies if kind not in (hero.kind, friend.kind)]),
        "building": rng.choice(FILLINGS.buildings),
        "time": rng.choice(("morning", "afternoon", "evening", "summer day", "spring morning")),
    }
    slots |= {f"a_{key}": a(slots[key]) for key in ("thing", "plant", "building")}
    slots |= {"Hero": capital(hero.ref), "Friend": capital(friend.ref)}
    return slots | hero.slots() | friend.slots("f_")


def _open(rng: Random, hero: Character, slots: dict[str, str], says_kind: bool) -> str:
    arrive = rng.choice(ARRIVALS).format_map(slots)
    openings = NAMED_OPENINGS if hero.is_named else UNNAMED_OPENINGS
    if says_kind and hero.is_named:
        openings = [opening for opening in openings if "{kind}" in opening]
    return rng.choice(openings).format_map(slots | {"arrive": arrive})


def _questions(hero: Character, plot: Plot) -> list[tuple[str, str]]:
    questions = [*plot.questions, *CHARACTER_QUESTIONS]
    if hero.is_named and hero.kind in ANIMALS:
        questions.append(("What is the name of the {kind}?", "The name of the {kind} is {hero}."))
    return questions


def _pick_subject(rng: Random, hero: Character, plot: Plot, slots: dict[str, str]) -> str:
    """What a user would say to get this story: its hero (mostly), its theme or its thing."""
    subjects = [a(hero.kind), a(hero.kind), f"{a(slots['trait'])} {hero.kind}", plot.theme]
    if hero.is_named:
        subjects += [hero.ref, f"{a(hero.kind)} named {hero.ref}"]
    if plot.has_thing:
        subjects.append(slots["a_thing"])
    return rng.choice(subjects)
