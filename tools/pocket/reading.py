"""Reading: a story or a few plain sentences in the question, and questions that their text answers."""

from random import Random
from typing import TypeAlias

from ..words import BOYS, COLORS, FOODS, GIRLS, PLACES, SPOTS, TOYS, a
from ..words import pick_animal as animal
from ..words import pick_child as child
from .phrases import read_phrases
from .stories import tell_story

Turn: TypeAlias = tuple[str, str]
Fact: TypeAlias = tuple[str, list[Turn]]  # a sentence and the questions that it answers

_READING = read_phrases("reading")
READ_FORMS: list[str] = _READING["read_forms"]


def draw_reading(rng: Random) -> list[Turn]:
    """One or two turns; the first question holds the text that both are about."""
    return read_sentences(rng) if rng.random() < 0.6 else read_story(rng)


def read_story(rng: Random) -> list[Turn]:
    """A story in the question; sometimes a second question about it."""
    story = tell_story(rng)
    first, second = rng.sample(story.questions, 2)
    turns = [(rng.choice(READ_FORMS).format(text=story.text, question=first[0]), first[1])]
    return [*turns, second] if rng.random() < 0.35 else turns


def read_sentences(rng: Random) -> list[Turn]:
    """Two to four plain sentences about one or two people, then a question about one of them."""
    people = rng.sample(GIRLS + BOYS, 2)
    drawn = [fact for name in people[: rng.randint(1, 2)] for fact in _draw_facts(rng, name)]
    text = " ".join(sentence for sentence, _ in drawn)
    questions = [turn for _, turns in drawn for turn in turns]
    picked = rng.sample(questions, min(len(questions), 2 if rng.random() < 0.35 else 1))
    first = rng.choice(READ_FORMS).format(text=text, question=picked[0][0])
    return [(first, picked[0][1]), *picked[1:]]


def read_sentence(rng: Random) -> tuple[str, str, str]:
    """Plain sentences with a question, the sentence that answers it, and the answer."""
    name = rng.choice(GIRLS + BOYS)
    drawn = _draw_facts(rng, name)
    sentence, turns = rng.choice(drawn)
    question, answer = rng.choice(turns)
    text = " ".join(each for each, _ in drawn)
    return rng.choice(READ_FORMS).format(text=text, question=question), sentence, answer


def _draw_facts(rng: Random, name: str) -> list[Fact]:
    """One to four sentences about `name`, of which the first names them."""
    he = "She" if name in GIRLS else "He"
    preposition, place = rng.choice(PLACES)
    color, noun = rng.choice(COLORS), rng.choice(TOYS)
    gift = f"{rng.choice(COLORS)} {rng.choice(TOYS)}"
    spot, (_, foods) = rng.choice(SPOTS), rng.choice(FOODS)
    friend = child(rng, name not in GIRLS) if rng.random() < 0.4 else animal(rng, True, named=False)
    facts = [
        _go(rng, name, preposition, place),
        _find(rng, name, he, (color, noun), spot),
        (f"Then {he.lower()} met {friend.ref}.", [(f"Who did {name} meet?", f"{name} met {friend.ref}.")]),
        (
            f"{he} gave {a(gift)} to {friend.ref}.",
            [(f"What did {name} give away?", f"{name} gave {a(gift)} away.")],
        ),
        (f"{he} ate some {foods}.", [(f"What did {name} eat?", f"{name} ate some {foods}.")]),
    ]
    if gift.endswith(noun):
        del facts[3]
    kept = sorted(rng.sample(range(len(facts)), rng.randint(1, 3)))
    chosen = [facts[index] for index in ([] if kept[0] < 2 else [0]) + kept]
    sentence, questions = chosen[0]
    return [(sentence.replace(f"{he} ", f"{name} ", 1), questions), *chosen[1:]]


def _go(rng: Random, name: str, preposition: str, place: str) -> Fact:
    if rng.choice((True, False)):
        return f"{name} went to the {place}.", [(f"Where did {name} go?", f"{name} went to the {place}.")]
    answer = f"{name} was {preposition} the {place}."
    return answer, [(f"Where was {name}?", answer)]


def _find(rng: Random, name: str, he: str, thing: tuple[str, str], spot: str) -> Fact:
    color, noun = thing
    verb, past = rng.choice((("find", "found"), ("see", "saw"), ("lose", "lost"), ("hide", "hid")))
    questions = [(f"What did {name} {verb}?", f"{name} {past} {a(color)} {noun}.")]
    has_spot = rng.random() < 0.6
    if has_spot:
        where = f"Where did {name} {verb} the {color} {noun}?"
        questions.append((where, f"{name} {past} the {color} {noun} {spot}."))
    questions.append((f"What color was the {noun}?", f"The {noun} was {color}."))
    return f"{he} {past} {a(color)} {noun}{' ' + spot if has_spot else ''}.", questions
