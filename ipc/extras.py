"""What to type for a part of Quire that is installed only by who wants it."""

from __future__ import annotations

import shlex
import sys


def describe_install(extra: str) -> str:
    """The command that adds an extra of pyproject.toml to the Python that runs this."""
    return f"{shlex.quote(sys.executable)} -m pip install 'quire[{extra}]'"
