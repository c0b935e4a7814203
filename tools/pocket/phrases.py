"""What the pocket corpora say, by topic (phrases.json): forms of which one is drawn, and what fills them."""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec


@cache
def _read_file() -> dict[str, dict[str, Any]]:
    return msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes())


def read_phrases(topic: str) -> dict[str, Any]:
    """A topic's lists by their names."""
    return _read_file()[topic]
