"""Violation: what ends a simulated run."""

from __future__ import annotations


class Violation(Exception):
    """Something that must hold does not."""


def require_none(problems: list[str]) -> None:
    """Raise Violation if there are any."""
    if problems:
        raise Violation("; ".join(problems))
