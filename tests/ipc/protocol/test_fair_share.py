"""The rule by which many share a bound."""

from __future__ import annotations

import pytest
from quire.ipc.protocol.fair_share import has_room


@pytest.mark.parametrize(
    ("asked", "taken", "own", "share", "expected"),
    [
        (3, 7, 7, 1.0, True),  # what is free is anybody's
        (4, 7, 7, 1.0, False),
        (5, 10, 0, 0.5, True),  # others have filled everything
        (6, 10, 0, 0.5, False),
        (2, 10, 4, 0.5, False),
        (5, 15, 0, 0.5, True),
        (5, 16, 0, 0.5, False),  # twice the bound
        (1, 10, 0, 0.0, False),  # nothing is shared
        (99, 0, 0, 0.0, True),  # larger than all: alone
        (0, 99, 0, 0.0, True),
    ],
)
def test_room_of_ten(asked: int, taken: int, own: int, share: float, expected: bool) -> None:
    assert has_room(asked, taken, own, 10, share) is expected
