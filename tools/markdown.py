"""Tables in Markdown, and the generated parts of a page, which stand between two comments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a cell may hold anything."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(_escape, line))} |\n" for line in lines)


def _escape(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")


def replace_parts(page: str, parts: Mapping[str, str]) -> str:
    """The page with these texts between `<!-- begin NAME... -->` and `<!-- end NAME -->`, and nothing else.

    ValueError if it does not have exactly these parts.
    """
    names = re.findall(r"^<!-- begin (\w+).*-->$", page, re.M)
    if names != list(parts):
        raise ValueError(f"a page with the parts {', '.join(parts)}, not {', '.join(names)}")
    for name, text in parts.items():
        match = re.search(rf"<!-- begin {name}\b.*?-->\n(.*?)<!-- end {name} -->", page, re.S)
        if match is None:
            raise ValueError(f"a page with a part {name} that ends")
        page = f"{page[: match.start(1)]}\n{text}\n{page[match.end(1) :]}"
    return page
