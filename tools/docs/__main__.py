"""`python -m quire.tools.docs [URL URL]`: writes every generated part of docs/.

With the URLs of a server that generates and of one that embeds it asks them for the examples' answers first.
"""

from __future__ import annotations

import sys

from .examples import record_answers
from .pages import PAGES, update_page


def main(urls: list[str]) -> int:
    """Write the pages."""
    if urls:
        record_answers(urls)
    for path in PAGES:
        path.write_text(update_page(path), encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
