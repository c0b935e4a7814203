"""Whether what came is what a page shows: the same fields and kinds of values, whatever the values are."""

from __future__ import annotations

import json
from typing import Any, cast

_CUT = "..."  # stands for what a page leaves out, at the end of a list or a text


def compare(shown: str, came: str) -> str | None:
    """What is different, as a path and what stands there; None if nothing is."""
    try:
        answer = json.loads(came)
    except json.JSONDecodeError:
        return f"no JSON: {came[:200]!r}"
    return _compare(json.loads(shown), answer, "answer")


def _compare(shown: Any, came: Any, path: str) -> str | None:
    if shown == _CUT or None in (shown, came):  # a field that may be null is one of either kind
        return None
    if isinstance(shown, dict):
        return _compare_objects(cast(dict[str, Any], shown), came, path)
    if isinstance(shown, list):
        return _compare_lists(cast(list[Any], shown), came, path)
    if isinstance(shown, bool) or isinstance(came, bool) or not isinstance(shown, int | float):
        return None if type(shown) is type(came) else f"{path}: {came!r}, and the page shows {shown!r}"
    return None if isinstance(came, int | float) else f"{path}: {came!r}, and the page shows {shown!r}"


def _compare_objects(shown: dict[str, Any], came: Any, path: str) -> str | None:
    if not isinstance(came, dict):
        return f"{path}: {came!r}, and the page shows an object"
    known = cast(dict[str, Any], came)
    if shown.keys() != known.keys():
        return f"{path}: fields {sorted(known)}, and the page shows {sorted(shown)}"
    return next(filter(None, (_compare(shown[name], known[name], f"{path}.{name}") for name in shown)), None)


def _compare_lists(shown: list[Any], came: Any, path: str) -> str | None:
    if not isinstance(came, list):
        return f"{path}: {came!r}, and the page shows a list"
    known = cast(list[Any], came)
    if bool(shown) != bool(known):
        return f"{path}: {len(known)} items, and the page shows {len(shown)}"
    pairs = enumerate(zip(shown, known, strict=False))
    return next(filter(None, (_compare(one, other, f"{path}[{n}]") for n, (one, other) in pairs)), None)
