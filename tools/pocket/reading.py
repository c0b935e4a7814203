"""Reading: a story or a few plain sentences in the question, and questions that their text answers."""

from random import Random
from typing import Any, TypeAlias

from ..words import BOYS, GIRLS, pick_animal, pick_child
from .phrases import draw_slots, fill, read_phrases
from .stories import tell_story

Turn: TypeAlias = tuple[str, str]
Fact: TypeAlias = tuple[str, list[Turn]]  # a sentence and the questions that it answers

_READING = read_phrases("reading")


def read_story(rng: Random) -> list[Turn]:
    """A story in the question; sometimes a second question about it."""
    story = tell_story(rng)
    first, second = rng.sample(story.questions, 2)
    turns = [(_ask_about(rng, story.text, first[0]), first[1])]
    return [*turns, second] if rng.random() < 0.35 else turns


def read_sentences(rng: Random) -> list[Turn]:
    """Two to four plain sentences about one or two people, then a question about one of them."""
    people = rng.sample(GIRLS + BOYS, 2)
    drawn = [fact for name in people[: rng.randint(1, 2)] for fact in _draw_facts(rng, name)]
    text = " ".join(sentence for sentence, _ in drawn)
    questions = [turn for _, turns in drawn for turn in turns]
    picked = rng.sample(questions, min(len(questions), 2 if rng.random() < 0.35 else 1))
    return [(_ask_about(rng, text, picked[0][0]), picked[0][1]), *picked[1:]]


def read_sentence(rng: Random) -> tuple[str, str, str]:
    """Plain sentences with a question, the sentence that answers it, and the answer."""
    drawn = _draw_facts(rng, rng.choice(GIRLS + BOYS))
    sentence, turns = rng.choice(drawn)
    question, answer = rng.choice(turns)
    return _ask_about(rng, " ".join(each for each, _ in drawn), question), sentence, answer


def _ask_about(rng: Random, text: str, question: str) -> str:
    return rng.choice(_READING["read_forms"]).format(text=text, question=question)


def _draw_facts(rng: Random, name: str) -> list[Fact]:
    """One to four sentences about `name`, of which the first names them."""
    he, is_girl = ("She", True) if name in GIRLS else ("He", False)
    slots: dict[str, Any] = {"name": name, "He": he, "he": he.lower(), **draw_slots(rng, _READING["slots"])}
    slots["gift"] = f"{slots['gift_color']} {slots['gift']}"
    friend = pick_child(rng, not is_girl) if rng.random() < 0.4 else pick_animal(rng, True, named=False)
    go = rng.choice(_READING["go"])
    slots |= {"friend": friend.ref} | dict(zip(("find", "found"), rng.choice(_READING["verbs"]), strict=True))
    find = _READING["find_at_spot" if rng.random() < 0.6 else "find"]
    forms = [go, find, *_READING["others"]]
    if slots["gift"].endswith(slots["noun"]):
        del forms[3]
    kept = sorted(rng.sample(range(len(forms)), rng.randint(1, 3)))
    chosen = [_fill_fact(forms[index], slots) for index in ([] if kept[0] < 2 else [0]) + kept]
    sentence, questions = chosen[0]
    return [(sentence.replace(f"{he} ", f"{name} ", 1), questions), *chosen[1:]]


def _fill_fact(form: list[Any], slots: dict[str, Any]) -> Fact:
    sentence, questions = form
    return fill(sentence, slots), [(fill(asked, slots), fill(answer, slots)) for asked, answer in questions]
