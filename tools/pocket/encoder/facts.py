"""Facts as an encyclopaedia states them, and questions about each (facts.txt).

A section's title names the columns of its table, which are the slots of its sentences and questions.
"""

from dataclasses import dataclass
from random import Random
from string import Formatter

from .concepts import make_plural
from .pairs import Pair, Passage, Section, read_sections, split_cells

Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Kind:
    """Things of one kind. Each of `sentences` has variants; held-out questions are in no training text."""

    rows: list[Row]
    sentences: list[list[str]]
    questions: list[str]
    held_out_questions: list[str]


def _make_kind(section: Section) -> Kind:
    columns = split_cells(section.title.partition(":")[2])
    rows = [dict(zip(columns, cells, strict=True)) for cells in section.rows]
    for row in rows:
        row |= {"Name": row["name"][:1].upper() + row["name"][1:], "names": make_plural(row["name"])}
    sentences = [split_cells(line, " / ") for line in section.marked["+"]]
    return Kind(rows, sentences, section.marked["?"], section.marked["!"])


KINDS = [_make_kind(section) for section in read_sections("facts.txt")]


def draw_fact(rng: Random, is_held_out: bool = False) -> Pair:
    """A question about one thing, and what is said of it; the wrong text is about another of its kind."""
    kind = rng.choice(KINDS)
    row, other = rng.sample(kind.rows, 2)
    question = rng.choice(kind.held_out_questions if is_held_out else kind.questions)
    asked = {slot for _, slot, _, _ in Formatter().parse(question) if slot}
    while any(other[slot] == row[slot] for slot in asked):
        other = rng.choice(kind.rows)
    wrong = Passage(tell_fact(rng, kind, other), other["name"])
    return Pair(question.format_map(row), Passage(tell_fact(rng, kind, row), row["name"]), wrong)


def tell_fact(rng: Random, kind: Kind, row: Row) -> str:
    """All that is known of `row`: first what it is, the rest in any order."""
    first, *rest = (rng.choice(variants).format_map(row) for variants in kind.sentences)
    return " ".join([first, *rng.sample(rest, len(rest))])
