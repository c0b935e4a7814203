"""The invariants of a stress run: whether every request got exactly what it is owed. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .chats import is_beginning
from .record import Golden, Record

_WITHOUT_IDS = ("http", "background")  # clients who see only text
_NUM_SHOWN = 5  # tokens, or characters, from where a request goes wrong


def check_records(sent: Sequence[int], records: Sequence[Record], golden: Sequence[Golden]) -> list[str]:
    """What is broken, a line each; empty when each of a client's requests ended once, with its tokens."""
    counts = Counter(record.number for record in records)
    broken = [
        f"request {number} ended {counts[number]} times, not once" for number in sent if counts[number] != 1
    ]
    for record in records:
        wrong = _find_wrong(record, golden[record.ask])
        if wrong is not None:
            whose = f"{record.client}, {record.behaviour}, ask {record.ask}"
            broken.append(f"request {record.number} ({whose}): {wrong}")
    return broken


def count_failed(records: Sequence[Record]) -> int:
    """Requests that their client has to call failed."""
    return sum(record.end == "failed" for record in records)


def _find_wrong(record: Record, golden: Golden) -> str | None:
    if record.end == "failed":
        return f"failed: {record.error}"
    if record.end == "left":
        return _find_wrong_beginning(record, golden)
    if record.num_ends != 1:
        return f"{record.num_ends} final outputs, not one"
    if record.num_tokens != len(golden.token_ids):
        return f"{record.num_tokens} tokens, not {len(golden.token_ids)}"
    has_ids = record.client not in _WITHOUT_IDS
    if record.text != golden.text or (has_ids and record.token_ids != golden.token_ids):
        return _describe_difference(record, golden)
    return None


def _find_wrong_beginning(record: Record, golden: Golden) -> str | None:
    has_its_ids = golden.token_ids[: len(record.token_ids)] == record.token_ids
    if has_its_ids and is_beginning(record.text, golden.text):
        return None
    return f"{_describe_difference(record, golden)}, before it was left"


def _describe_difference(record: Record, golden: Golden) -> str:
    """Where they part and what stands there: ids, or characters where there are no ids."""
    got, owed = (
        (record.text, golden.text) if record.client in _WITHOUT_IDS else (record.token_ids, golden.token_ids)
    )
    pairs = enumerate(zip(got, owed, strict=False))
    place = next((place for place, (one, other) in pairs if one != other), min(len(got), len(owed)))
    seen = slice(place, place + _NUM_SHOWN)
    return f"other tokens from position {place} on: {got[seen]!r}, not {owed[seen]!r}"
