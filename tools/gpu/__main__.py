"""A part in this process: `python -m quire.tools.gpu NAME` writes what it finds to stdout, a row a line."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from ..gpu_check import PARTS
from .rows import Row


def main(name: str) -> None:
    """Run a part, which loads only what it needs. What libraries print goes to stderr."""
    rows = os.dup(1)
    os.dup2(2, 1)

    def say(row: Row) -> None:
        os.write(rows, row.to_line().encode())

    getattr(import_module(f".{PARTS[name].module}", __package__), PARTS[name].function)(say)


if __name__ == "__main__":
    main(sys.argv[1])
