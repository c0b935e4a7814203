"""Steps of requests with states, for the tests of recurrent operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from quire.kernels.recurrent.states import RequestStates
from torch import Tensor

# Advances states by rows [T, ...]: one result a token.
Compute = Callable[[RequestStates, Tensor], Tensor]
NUM_SLOTS = 9
OTHERS = 16  # numbers of other layers before and behind a state in its slot


@dataclass(frozen=True)
class Piece:
    """Tokens of a request from `first` of its sequence on; a save is (after how many of all tokens, slot)."""

    slot: int
    first: int
    rows: Tensor
    saves: tuple[tuple[int, int], ...] = ()


def make_slots(state_size: int, device: torch.device) -> Tensor:
    """Where nothing was written they hold what would be seen in a result."""
    return torch.full((NUM_SLOTS, state_size + 2 * OTHERS), 7.0, device=device)


def find_state(slots: Tensor, slot: int) -> Tensor:
    """A state among the numbers of its slot; those of others must be as they were."""
    own = slots[slot]
    assert (own[:OTHERS] == 7).all()
    assert (own[len(own) - OTHERS :] == 7).all()
    return own[OTHERS : len(own) - OTHERS]


def run_step(compute: Compute, slots: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """What each piece's tokens give, all of them in one step."""
    counts = [len(piece.rows) for piece in pieces]
    starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    saves = [
        [(start + after - piece.first - 1, slot) for after, slot in piece.saves]
        for start, piece in zip(starts, pieces, strict=False)
    ]
    each = [sum(map(len, saves[:index])) for index in range(len(saves) + 1)]

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=slots.device)

    requests = RequestStates(
        slots,
        integers([piece.slot for piece in pieces]),
        integers(starts),
        integers([piece.first + count for piece, count in zip(pieces, counts, strict=True)]),
        integers(each),
        integers([token for part in saves for token, _ in part]),
        integers([slot for part in saves for _, slot in part]),
    )
    return list(compute(requests, torch.cat([piece.rows for piece in pieces])).split(counts))


def check_steps(
    compute: Compute,
    state_size: int,
    rows: Tensor,
    tolerance: float = 0.0,
    chunks: Sequence[int] = (1, 7, 33),
) -> None:
    """A request of 70 tokens or more has the same results and states alone, in chunks of any size beside
    others, and from a state that was saved inside a chunk.
    """
    check = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    count, other = len(rows), rows.flip(0)
    slots = make_slots(state_size, rows.device)
    [alone] = run_step(compute, slots, [Piece(2, 0, rows)])
    state = find_state(slots, 2).clone()
    for chunk in chunks:
        slots = make_slots(state_size, rows.device)
        parts = list[Tensor]()
        for first in range(0, count, chunk):
            end = min(count, first + chunk)
            saves = tuple(
                (after, slot) for after, slot in ((40, 5), (41, 6), (41, 7)) if first < after <= end
            )
            pieces = [Piece(3, 0, other[: 1 + first % 5]), Piece(0, first, rows[first:end], saves)]
            parts.append(run_step(compute, slots, [*pieces, Piece(8, 0, other[:2])])[1])
        check(torch.cat(parts), alone)
        check(find_state(slots, 0), state)
        assert torch.equal(find_state(slots, 6), find_state(slots, 7))
        for slot, first in ((5, 40), (7, 41)):  # as after a hit
            [rest] = run_step(compute, slots, [Piece(slot, first, rows[first:])])
            check(rest, alone[first:])
            check(find_state(slots, slot), state)
        assert (slots[1] == 7).all()
        assert (slots[4] == 7).all()
