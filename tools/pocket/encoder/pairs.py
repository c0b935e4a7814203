"""What the encoder learns from: a query, the text that answers it, and one that only looks as if it did.

Also reads the corpus' files, in which a line's first character says what the line is.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Passage:
    """A text to be found. Passages of one `topic` answer the same queries; without one it stands alone."""

    text: str
    topic: str | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """`answer` is nearer to `query` than `wrong` is, and than the passages of other topics."""

    query: str
    answer: Passage
    wrong: Passage


@dataclass(frozen=True, slots=True)
class Section:
    """What stands between two lines that begin with #. `marked[mark]`: the lines with a mark, without it."""

    title: str
    marked: dict[str, list[str]]
    rows: list[list[str]]


def read_sections(name: str) -> list[Section]:
    """The sections of a file in this folder. Lines without a mark are rows of a table, cells between `|`."""
    sections: list[Section] = []
    for line in (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines():
        mark, _, rest = line.partition(" ")
        if mark == "#":
            sections.append(Section(rest, defaultdict(list), []))
        elif len(mark) == 1:
            sections[-1].marked[mark].append(rest)
        else:
            sections[-1].rows.append(split_cells(line))
    return sections


def split_cells(line: str, separator: str = "|") -> list[str]:
    """The parts of a line without the space around them."""
    return [cell.strip() for cell in line.split(separator)]
