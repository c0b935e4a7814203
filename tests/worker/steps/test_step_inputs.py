"""Step inputs against a plain-Python reference over random batches of prefills, chunks and decodes."""

from __future__ import annotations

import ctypes

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.step import GroupBlocks, NewRequestData, SchedulerOutput
from quire.ipc.protocol.token_ids import encode_token_ids
from quire.ipc.protocol.token_lists import TokenLists
from quire.kernels.program.gather_step import StepArrays, launch_gather_step
from quire.kernels.program.native import load_library
from quire.worker.steps.block_tables import BlockTables, TableGroup
from quire.worker.steps.native_steps import make_rows_table
from quire.worker.steps.request_rows import RequestRows
from quire.worker.steps.step_inputs import StepInputs, build_step_inputs

BLOCK_SIZE = 8
MAX_LEN = 64
NUM_ROWS = 8
MAX_TOKENS = 512
WINDOW = 30
GROUPS = (TableGroup(), TableGroup(WINDOW, scale=2, null_block=999))


def _enter(
    rows: RequestRows, tables: BlockTables, row: int, num_prompt: int, num_output: int, computed: int
) -> None:
    generator = np.random.default_rng(row)
    tokens = generator.integers(0, 1000, num_prompt + num_output).tolist()
    packed = encode_token_ids(tokens[:num_prompt]), encode_token_ids(tokens[num_prompt:])
    rows.enter(NewRequestData(row, "r", *packed, SamplingParams(), [], TokenLists(), [], computed))
    first, ids = max(0, computed - WINDOW + 1) // BLOCK_SIZE, generator.permutation(1000).tolist()
    blocks = [GroupBlocks(ids[: MAX_LEN // BLOCK_SIZE])]
    if len(tables.ids) > 1:
        blocks.append(GroupBlocks(ids[-MAX_LEN // BLOCK_SIZE + first :], first))
    tables.assign(row, blocks)


def _reference(step: SchedulerOutput, rows: RequestRows, tables: BlockTables) -> dict[str, list[int]]:
    result: dict[str, list[int]] = {
        "ids": [],
        "positions": [],
        "slots": [],
        "more_slots": [],
        "starts": [0],
        "rope": [],
    }
    for row, count in zip(step.rows, step.num_tokens, strict=True):
        for position in range(int(rows.num_computed[row]), int(rows.num_computed[row]) + count):
            result["ids"].append(int(rows.token_ids[row, position]))
            result["positions"].append(position)
            for name, ids in zip(("slots", "more_slots"), tables.ids, strict=False):
                block = int(ids[row, position // BLOCK_SIZE])
                result[name].append(block * BLOCK_SIZE + position % BLOCK_SIZE)
            result["rope"].append(max(int(rows.num_prompt[row]), position + 1))
        result["starts"].append(len(result["ids"]))
    return result


def _gather_natively(
    library: ctypes.CDLL, step: SchedulerOutput, rows: RequestRows, tables: BlockTables
) -> StepArrays:
    arrays = StepArrays(MAX_TOKENS, *tables.ids.shape)
    row_ids, num_tokens = np.array(step.rows), np.array(step.num_tokens)
    launch_gather_step(library, make_rows_table(rows, tables, MAX_TOKENS), row_ids, num_tokens, arrays.table)
    return arrays


def _check_native_gather(
    library: ctypes.CDLL, step: SchedulerOutput, rows: RequestRows, tables: BlockTables, inputs: StepInputs
) -> None:
    """The native gather of a step gives what numpy gave."""
    arrays = _gather_natively(library, step, rows, tables)
    table, width = arrays.table, inputs.block_tables.shape[2]
    counts = (table.num_tokens, table.num_requests, table.table_width)
    assert counts == (len(inputs.input_ids), len(step.rows), width)
    for name in ("input_ids", "positions", "query_starts", "seq_lens"):
        expected = getattr(inputs, name)
        assert getattr(arrays, name)[: len(expected)].tolist() == expected.tolist()
    assert arrays.slots[: inputs.slot_mapping.size].tolist() == inputs.slot_mapping.ravel().tolist()
    assert arrays.block_tables[: inputs.block_tables.size].tolist() == inputs.block_tables.ravel().tolist()


REQUESTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 20), st.floats(0, 1), st.floats(0, 1)),
    min_size=1,
    max_size=NUM_ROWS,
)


@settings(max_examples=100, deadline=None)
@given(requests=REQUESTS, order=st.permutations(range(NUM_ROWS)))
def test_a_mixed_step_agrees_with_the_reference(
    requests: list[tuple[int, int, float, float]], order: list[int]
) -> None:
    rows, tables = (
        RequestRows(NUM_ROWS, MAX_LEN, 1000),
        BlockTables(NUM_ROWS, MAX_LEN // BLOCK_SIZE, BLOCK_SIZE, GROUPS),
    )
    step, sampled_rows = SchedulerOutput(0, [], []), list[int]()
    for row, (num_prompt, num_output, done, share) in zip(order, requests, strict=False):
        known = num_prompt + num_output
        computed = int(done * (known - 1))
        _enter(rows, tables, row, num_prompt, num_output, computed)
        step.rows.append(row)
        step.num_tokens.append(max(1, round(share * (known - computed))))
        if computed + step.num_tokens[-1] == known:
            sampled_rows.append(row)
    step = msgspec.structs.replace(step, sampled_rows=sampled_rows)
    inputs = build_step_inputs(step, rows, tables, has_dynamic_rope=True)
    expected = _reference(step, rows, tables)
    assert inputs.input_ids.tolist() == expected["ids"]
    assert inputs.positions.tolist() == expected["positions"]
    assert inputs.slot_mapping.tolist() == [expected["slots"], expected["more_slots"]]
    assert inputs.query_starts.tolist() == expected["starts"]
    assert inputs.rope_lengths is not None
    assert inputs.rope_lengths.tolist() == expected["rope"]
    after = [
        int(rows.num_computed[row]) + count for row, count in zip(step.rows, step.num_tokens, strict=True)
    ]
    assert inputs.seq_lens.tolist() == after
    sampling = [i for i, row in enumerate(step.rows) if row in sampled_rows]
    assert inputs.sampling.tolist() == sampling
    assert inputs.last_tokens.tolist() == [expected["starts"][i + 1] - 1 for i in sampling]
    width = -(-max(after) // BLOCK_SIZE)
    assert inputs.block_tables.shape == (2, len(step.rows), width)
    assert (inputs.block_tables[0] == tables.ids[0, step.rows, :width]).all()
    for row, table in zip(step.rows, inputs.block_tables[1], strict=True):
        first = max(0, int(rows.num_computed[row]) - WINDOW + 1) // BLOCK_SIZE
        assert table.tolist() == [999] * first + tables.ids[1, row, first:width].tolist()
    if (library := load_library()) is not None:
        _check_native_gather(library, step, rows, tables, inputs)


@pytest.mark.parametrize("chunk", [1, 3, 8, 13])
def test_chunks_of_a_prompt_join_to_the_inputs_of_the_whole(chunk: int) -> None:
    def build(num_tokens: int, computed: int) -> StepInputs:
        rows, tables = RequestRows(1, MAX_LEN, 1000), BlockTables(1, MAX_LEN // BLOCK_SIZE, BLOCK_SIZE)
        _enter(rows, tables, 0, 37, 0, computed)
        sampled_rows = [0] if computed + num_tokens == 37 else []
        step = SchedulerOutput(0, [0], [num_tokens], sampled_rows=sampled_rows)
        return build_step_inputs(step, rows, tables)

    whole = build(37, 0)
    parts = [build(min(chunk, 37 - start), start) for start in range(0, 37, chunk)]
    for name in ("input_ids", "positions", "slot_mapping"):
        joined = np.concatenate([getattr(part, name) for part in parts], axis=-1)
        assert joined.tolist() == getattr(whole, name).tolist()
    assert [len(part.sampling) for part in parts] == [0] * (len(parts) - 1) + [1]


def test_the_model_is_given_the_types_it_is_promised() -> None:
    rows, tables = RequestRows(2, MAX_LEN, 1000), BlockTables(2, MAX_LEN // BLOCK_SIZE, BLOCK_SIZE)
    _enter(rows, tables, 0, 5, 0, 0)
    _enter(rows, tables, 1, 20, 3, 22)
    inputs = build_step_inputs(SchedulerOutput(0, [1, 0], [1, 5]), rows, tables)
    metadata = inputs.send(torch.device("cpu"), np.arange(0)).metadata
    assert inputs.input_ids.dtype == inputs.positions.dtype == np.int64
    assert (
        metadata.query_starts.dtype == metadata.seq_lens.dtype == metadata.block_tables.dtype == torch.int32
    )
    assert metadata.slot_mapping.dtype == torch.int64
    assert all(t.is_contiguous() for t in (metadata.query_starts, metadata.seq_lens, metadata.block_tables))
    assert (metadata.max_query_len, metadata.max_seq_len, metadata.num_requests) == (5, 23, 2)
    assert metadata.query_starts_list() == [0, 1, 6]
    assert metadata.seq_lens_list() == [23, 5]
    assert inputs.rope_lengths is None


def test_tokens_that_are_not_known_cannot_be_scheduled() -> None:
    rows, tables = RequestRows(1, MAX_LEN, 1000), BlockTables(1, MAX_LEN // BLOCK_SIZE, BLOCK_SIZE)
    _enter(rows, tables, 0, 5, 0, 0)
    with pytest.raises(AssertionError, match="not known"):
        build_step_inputs(SchedulerOutput(0, [0], [6]), rows, tables)
    if (library := load_library()) is not None:
        with pytest.raises(AssertionError, match="not known"):
            _gather_natively(library, SchedulerOutput(0, [0], [6]), rows, tables)


def test_a_step_of_more_tokens_than_its_arrays_hold_is_refused(library: ctypes.CDLL) -> None:
    rows = RequestRows(NUM_ROWS, MAX_TOKENS, 1000)
    tables = BlockTables(NUM_ROWS, MAX_TOKENS // BLOCK_SIZE, BLOCK_SIZE)
    for row in range(NUM_ROWS):
        _enter(rows, tables, row, 60, 0, 0)
    rows.num_known[:] = MAX_TOKENS
    with pytest.raises(AssertionError, match="more tokens"):
        _gather_natively(library, SchedulerOutput(0, [0, 1], [MAX_TOKENS - 1, 2]), rows, tables)
