"""What people ask a help desk, a doctor, a cook or a search engine, and what answers it (everyday.txt).

The last question of each section is in no training text.
"""

from dataclasses import dataclass
from random import Random

from .concepts import replace_words
from .pairs import Pair, Passage, Section, read_sections, split_cells

NEIGHBOURS = 4  # sections this near to each other are often about the same things
SYNONYM_SHARE, DROPPED_SHARE = 0.25, 0.15


@dataclass(frozen=True, slots=True)
class Matter:
    """Something that people ask about, and what answers it."""

    title: str
    questions: list[str]
    held_out_question: str
    answers: list[str]


def _make_matter(section: Section) -> Matter:
    questions = [question for line in section.marked["?"] for question in split_cells(line, " / ")]
    return Matter(section.title, questions[:-1], questions[-1], section.marked["-"])


MATTERS = [_make_matter(section) for section in read_sections("everyday.txt")]


def draw_everyday(rng: Random) -> Pair:
    """A question with an answer or another wording; the wrong text is of another matter, often a near one."""
    index = rng.randrange(len(MATTERS))
    matter = MATTERS[index]
    if rng.random() < 0.5:
        other = MATTERS[(index + rng.choice((-1, 1)) * rng.randint(1, NEIGHBOURS)) % len(MATTERS)]
    else:
        other = MATTERS[(index + rng.randrange(1, len(MATTERS))) % len(MATTERS)]
    if rng.random() < 0.7:
        query, text = rng.choice(matter.questions), rng.choice(matter.answers)
        wrong = rng.choice(other.answers)
    else:
        query, text = rng.sample(matter.questions, 2)
        wrong = rng.choice(other.questions)
    query = matter.title if rng.random() < 0.1 else _drop_words(rng, query)
    query, text, wrong = (replace_words(rng, each, SYNONYM_SHARE) for each in (query, text, wrong))
    return Pair(query, Passage(text, matter.title), Passage(wrong, other.title))


def _drop_words(rng: Random, text: str) -> str:
    """`text` without some of its words, so that no single word is all that is learned of it."""
    words = text.split(" ")
    kept = [word for word in words if rng.random() > DROPPED_SHARE]
    return " ".join(kept or words)
