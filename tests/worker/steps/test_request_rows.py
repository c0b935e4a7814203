"""Request rows: what enters is what stands there, rows are reused safely, and untouched pages are free."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
import torch
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.step import GroupBlocks, NewRequestData
from quire.ipc.protocol.token_ids import encode_token_ids
from quire.ipc.protocol.token_lists import TokenLists
from quire.worker.sampling.logit_edit import EditedRow
from quire.worker.sampling.logit_edits import apply_logit_edits
from quire.worker.steps.block_tables import BlockTables
from quire.worker.steps.request_rows import RequestRows


def _request(
    row: int, prompt: list[int], output: list[int] | None = None, params: SamplingParams | None = None
) -> NewRequestData:
    packed = encode_token_ids(prompt), encode_token_ids(output or [])
    return NewRequestData(row, "r", *packed, params or SamplingParams(), [], TokenLists(), [], 3)


def _append(rows: RequestRows, row: int, token: int, generation: int | None = None) -> None:
    position = int(rows.num_known[row])
    rows.num_known[row] += 1
    owner = int(rows.generation[row]) if generation is None else generation
    rows.fill_pending(np.array([row]), np.array([position]), np.array([token]), np.array([owner]), launch=1)


def test_a_resumed_request_stands_with_prompt_and_output() -> None:
    rows = RequestRows(4, 32, 100)
    params = SamplingParams(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=-5, logprobs=-1, prompt_logprobs=2
    )
    rows.enter(_request(2, [5, 6, 7, 8], [9, 10], params))
    assert rows.history(2).tolist() == [5, 6, 7, 8, 9, 10]
    assert (rows.num_prompt[2], rows.num_known[2], rows.num_computed[2]) == (4, 6, 3)
    assert (rows.sampling.temperature[2], rows.sampling.top_k[2], rows.sampling.top_p[2]) == (0.5, 7, 0.9)
    assert rows.sampling.min_p[2] == np.float32(0.1)
    assert rows.sampling.seeds[2] == 2**64 - 5
    assert rows.num_logprobs[2] == 100
    assert rows.num_prompt_logprobs[2] is None  # they were delivered before its first token


def test_a_row_keeps_nothing_of_the_request_before() -> None:
    rows = RequestRows(2, 32, 100)
    demanding = SamplingParams(logprobs=3, prompt_logprobs=1, bad_words=None, repetition_penalty=1.5, top_k=3)
    rows.enter(_request(1, [1, 2, 3], [4], demanding))
    rows.free(1)
    rows.enter(_request(1, [7]))
    assert rows.history(1).tolist() == [7]
    assert rows.edits[1] == []
    assert not rows.has_edits[1]
    assert not rows.needs_history[1]
    assert not rows.has_logprobs[1]
    assert not rows.has_prompt_logprobs[1]
    assert rows.sampling.top_k[1] == 100


def test_tokens_that_come_late_are_not_given_to_the_rows_next_request() -> None:
    rows = RequestRows(2, 32, 100)
    rows.enter(_request(0, [1, 2], params=SamplingParams(frequency_penalty=1.0)))
    old = int(rows.generation[0])
    _append(rows, 0, 50)
    assert rows.history(0).tolist() == [1, 2, 50]
    rows.free(0)
    rows.enter(_request(0, [3, 4], params=SamplingParams(frequency_penalty=1.0)))
    _append(rows, 0, 60, generation=old)
    assert rows.token_ids[0, :3].tolist() == [3, 4, 50]  # the place still holds what was there before
    logits = torch.ones(1, 100)
    apply_logit_edits(logits, [EditedRow(0, rows.edits[0], rows.token_ids[0], int(rows.num_known[0]), 0)])
    assert torch.equal(logits, torch.ones(1, 100))


def test_a_row_takes_tokens_past_max_model_len() -> None:
    rows = RequestRows(1, 4, 100)
    rows.enter(_request(0, [1, 2, 3, 4]))
    _append(rows, 0, 5)
    _append(rows, 0, 6)
    assert rows.history(0).tolist() == [1, 2, 3, 4, 5, 6]


def test_rows_cost_no_memory_until_tokens_reach_them() -> None:
    before = psutil.Process().memory_info().rss
    rows = RequestRows(4096, 131_072, 100)
    rows.enter(_request(4095, [1, 2, 3]))
    assert rows.token_ids.nbytes > 2 << 30
    assert psutil.Process().memory_info().rss - before < 32 << 20


def test_block_tables_grow_restart_and_give_slots() -> None:
    tables = BlockTables(3, 5, block_size=8)
    tables.assign(1, [GroupBlocks([9, 4])])
    tables.append(1, 0, [7])
    none = np.zeros(2, dtype=np.int64)
    assert tables.gather(np.array([1]), none[:1], 24).tolist() == [[[9, 4, 7]]]
    assert tables.gather(np.array([1, 0]), none, 9).shape == (1, 2, 2)
    assert tables.slots(np.array([1, 1, 1]), np.array([0, 8, 23])).tolist() == [[72, 32, 63]]
    tables.assign(1, [GroupBlocks([2])])
    assert tables.gather(np.array([1]), none[:1], 8).tolist() == [[[2]]]
    with pytest.raises(AssertionError, match="row 1"):
        tables.append(1, 0, [0] * 5)
