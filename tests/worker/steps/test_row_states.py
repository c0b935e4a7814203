"""Where a step's requests have their recurrent states, and what is copied and saved of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.step import GroupBlocks, NewRequestData, SchedulerOutput
from quire.ipc.protocol.token_lists import TokenLists
from quire.worker.attention.metadata import StepStates
from quire.worker.steps.row_states import RowStates


def _enter(row: int, state_slot: int | None) -> NewRequestData:
    lists = TokenLists()
    blocks = [GroupBlocks([])]
    params = SamplingParams()
    return NewRequestData(row, f"{row}", b"", b"", params, [], lists, blocks, 0, state_slot=state_slot)


def _step(**changes: Any) -> SchedulerOutput:
    return SchedulerOutput(0, [], [], **changes)


def _ints(*numbers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def _assert_is(made: StepStates, **expected: list[int]) -> None:
    for name, numbers in expected.items():
        assert getattr(made, name).tolist() == numbers, name
        assert getattr(made, f"{name}_host").tolist() == numbers, name
        assert getattr(made, name).dtype == torch.int32


def test_a_step_has_the_slots_of_its_rows_in_the_order_of_its_requests() -> None:
    states = torch.zeros(8, 16)
    rows = RowStates(states, max_num_seqs=4)
    rows.apply(_step(new_requests=[_enter(0, 5), _enter(3, 7), _enter(1, 2)]))
    made = rows.make(_ints(3, 0), _ints(1, 4), _ints(9, 0))
    assert made.states is states
    _assert_is(made, slots=[7, 5], save_starts=[0, 0, 0], save_tokens=[], save_slots=[])
    rows.apply(_step(new_requests=[_enter(3, 0)]))
    _assert_is(rows.make(_ints(1, 3), _ints(1, 1), _ints(1, 1)), slots=[2, 0])


def test_a_save_after_so_many_tokens_of_a_sequence_is_after_that_token_of_the_step() -> None:
    rows = RowStates(torch.zeros(8, 16), max_num_seqs=4)
    # Row 2 computes its tokens 30 to 69, row 0 its token 15, row 1 its tokens 0 to 15.
    rows.apply(_step(state_saves=[(1, 16, 7), (2, 64, 5), (2, 32, 4), (0, 16, 6)]))
    made = rows.make(_ints(2, 3, 0, 1), _ints(40, 1, 1, 16), _ints(30, 8, 15, 0))
    _assert_is(made, save_starts=[0, 2, 2, 3, 4], save_tokens=[1, 33, 41, 57], save_slots=[4, 5, 6, 7])
    rows.apply(_step())
    _assert_is(rows.make(_ints(2), _ints(1), _ints(70)), save_starts=[0, 0], save_tokens=[])


def test_copies_are_made_one_after_the_other() -> None:
    states = torch.arange(4.0)[:, None].expand(4, 16).contiguous()
    RowStates(states, max_num_seqs=4).apply(_step(state_copies=[(1, 0), (2, 1), (1, 3)]))
    assert states[:, 0].tolist() == [1.0, 2.0, 2.0, 2.0]


def test_a_request_without_a_slot_is_an_error_of_the_core() -> None:
    with pytest.raises(AssertionError, match="without a state slot"):
        RowStates(torch.zeros(1, 16), max_num_seqs=1).apply(_step(new_requests=[_enter(0, None)]))
