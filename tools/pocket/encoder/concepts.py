"""Words and what they mean to each other: synonyms share a concept, concepts share a topic (concepts.txt).

A line of the file is a topic: its name, nouns, verbs and adjectives; synonyms stand between slashes.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeAlias

from ..phrases import read_phrases
from .pairs import Pair, Passage, split_cells

Concept: TypeAlias = tuple[str, ...]  # words of one meaning


@dataclass(frozen=True, slots=True)
class Topic:
    """Words that go together, by meaning, as concepts.txt lists them."""

    name: str
    nouns: list[Concept]
    verbs: list[Concept]
    adjectives: list[Concept]

    @property
    def slots(self) -> dict[str, list[Concept]]:
        """What may fill the slots of a sentence."""
        return {"n": self.nouns, "m": self.nouns, "v": self.verbs, "a": self.adjectives}


def read_topics() -> list[Topic]:
    """The topics of concepts.txt."""
    topics: list[Topic] = []
    for line in (Path(__file__).parent / "concepts.txt").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        nouns, verbs, adjectives = (
            [tuple(split_cells(concept, "/")) for concept in split_cells(part, ",")]
            for part in split_cells(rest)
        )
        topics.append(Topic(name, nouns, verbs, adjectives))
    return topics


TOPICS = read_topics()
CONCEPTS = [concept for topic in TOPICS for concept in topic.nouns + topic.verbs + topic.adjectives]
WORDS = sorted({word for concept in CONCEPTS for word in concept})
_SENSES = {word: [concept for concept in CONCEPTS if word in concept] for word in WORDS}
# Where a word has one meaning only, another of that meaning can take its place.
SYNONYMS = {word: senses[0] for word, senses in _SENSES.items() if len(senses) == 1 and len(senses[0]) > 1}

# {n} and {m} are nouns, {v} a verb, {a} an adjective; what two sentences share is only what fills them.
_FORMS: dict[str, list[str]] = read_phrases("concepts")
# A synonym's sentences, by the slots that they have; what is named twice is drawn twice as often.
_SLOTS_OF = (
    ("noun_forms", "n"),
    ("verb_forms", "v"),
    ("adjective_forms", "a"),
    ("both_forms", "nv"),
    ("both_forms", "nv"),
    ("look_forms", "na"),
    ("two_noun_forms", "nm"),
)


def draw_synonyms(rng: Random) -> Pair:
    """Two sentences of one meaning; the wrong one shares a word's topic, or all words but one."""
    topic = rng.choice(TOPICS)
    name, slots = rng.choice(_SLOTS_OF)
    meant = {slot: rng.choice(topic.slots[slot]) for slot in slots}
    changed = rng.choice(slots)
    others = [concept for concept in topic.slots[changed] if concept != meant[changed]]
    wrong = meant | {changed: rng.choice(others or CONCEPTS)}
    first, second = rng.sample(_FORMS[name], 2)
    key = " ".join(sorted("/".join(concept) for concept in meant.values()))
    return Pair(
        _fill(rng, first, meant), Passage(_fill(rng, second, meant), key), Passage(_fill(rng, second, wrong))
    )


def draw_related(rng: Random) -> Pair:
    """Two texts of one topic with different words, and one of another topic."""
    topic, other = rng.sample(TOPICS, 2)
    query = topic.name if rng.random() < 0.25 else _say_something(rng, topic)
    return Pair(query, Passage(_say_more(rng, topic), topic.name), Passage(_say_more(rng, other), other.name))


def replace_words(rng: Random, text: str, share: float) -> str:
    """`text` with `share` of the words that have synonyms replaced by one."""

    def replace(match: re.Match[str]) -> str:
        words = SYNONYMS.get(match.group().lower())
        return rng.choice(words) if words and rng.random() < share else match.group()

    return re.sub(r"[A-Za-z]+", replace, text)


def make_plural(word: str) -> str:
    """The regular plural; of a verb, the third person."""
    if word.endswith(("s", "x", "ch", "sh", "z")):
        return f"{word}es"
    if word.endswith("y") and word[-2:-1] not in "aeiou":
        return f"{word[:-1]}ies"
    return f"{word}s"


def make_participle(verb: str) -> str:
    """The form in -ing, as regular verbs have it."""
    if verb.endswith("e") and not verb.endswith("ee"):
        return f"{verb[:-1]}ing"
    if re.fullmatch(r"[^aeiou]*[aeiou][bdgklmnprt]", verb):
        return f"{verb}{verb[-1]}ing"
    return f"{verb}ing"


def _say_something(rng: Random, topic: Topic) -> str:
    name = rng.choice(("noun_forms", "verb_forms", "both_forms", "look_forms", "two_noun_forms"))
    form = rng.choice(_FORMS[name])
    return _fill(rng, form, {slot: rng.choice(concepts) for slot, concepts in topic.slots.items()})


def _say_more(rng: Random, topic: Topic) -> str:
    return " ".join(_say_something(rng, topic) for _ in range(rng.randint(1, 3)))


def _fill(rng: Random, form: str, meant: dict[str, Concept]) -> str:
    words = {slot: rng.choice(concept) for slot, concept in meant.items()}
    plurals = {f"{slot}s": make_plural(word) for slot, word in words.items()}
    return form.format_map(words | plurals | {"ving": make_participle(words.get("v", ""))})
