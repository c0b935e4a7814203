"""`python -m quire.tools.docs [URL URL]`: writes every generated part of docs/.

With the URLs of a server that generates and of one that embeds it asks them for the examples' answers first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from ..markdown import replace_parts
from . import http_api, options, tables
from .examples import record_answers

_DOCS = Path(__file__).parents[2] / "docs"
# Page -> its generated parts, in the order in which they stand there.
PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    _DOCS / "options.md": {"engine": options.render_engine_options, "commands": options.render_commands},
    _DOCS / "features.md": {"models": tables.render_models},
    _DOCS / "http.md": {
        "open": http_api.render_open_routes,
        "routes": http_api.render_routes,
        "sampling": http_api.render_sampling_fields,
        "types": http_api.render_types,
        "silent": http_api.render_silent_fields,
        "limits": http_api.render_limits,
    },
    _DOCS / "metrics.md": {"engine": tables.render_engine_metrics, "http": tables.render_http_metrics},
}


def update_page(path: Path) -> str:
    """The text that a page of PAGES ought to have: its own, with each generated part as it is today."""
    parts = {name: render() for name, render in PAGES[path].items()}
    return replace_parts(path.read_text(encoding="utf-8"), parts)


if __name__ == "__main__":
    if sys.argv[1:]:
        record_answers(sys.argv[1:])
    for page in PAGES:
        page.write_text(update_page(page), encoding="utf-8")
        print(page)
