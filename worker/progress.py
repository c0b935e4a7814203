"""A progress bar for who starts an engine at a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO, TypeVar

Item = TypeVar("Item")

_DELAY_S = 1.0  # what is over by then shows none


def show_progress(
    items: Sequence[Item], text: str, stream: TextIO | None, delay_s: float = _DELAY_S
) -> Iterable[Item]:
    """The items, with a bar on `stream` while they are taken; where that is no terminal, the items alone.

    The bar appears after `delay_s` and is gone at the end.
    """
    if stream is None or not stream.isatty():
        return items
    from tqdm import tqdm

    return tqdm(items, text, file=stream, leave=False, delay=delay_s, dynamic_ncols=True, unit="layer")
