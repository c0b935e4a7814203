"""Sampling in Triton gives the tokens of the torch operations, which are held to a float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_checks import TRITON_DEVICE as DEVICE
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.step import NewRequestData
from quire.ipc.protocol.token_lists import pack_token_lists
from quire.kernels.triton import triton_runtime
from quire.worker.sampling.logit_edit import EditedRow, RowStart
from quire.worker.sampling.logit_edits import make_logit_edits
from quire.worker.sampling.sampler import LogprobGroup, SampledTokens, SamplingBatch, sample
from torch import Tensor

pytest.importorskip("triton")

from quire.kernels.sampling import sample_triton

FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.0, "top_k": 1},
    {},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.7, "min_p": 0.01},
]


def make_logits(num_rows: int, size: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed)) * spread


def make_batch(num_rows: int, size: int, **columns: Any) -> SamplingBatch:
    def column(name: str, default: Any, dtype: Any) -> Any:
        return np.broadcast_to(np.array(columns.get(name, default), dtype=dtype), (num_rows,)).copy()

    return SamplingBatch(
        temperature=column("temperature", 1.0, np.float32),
        top_k=np.minimum(column("top_k", size, np.int64), size),
        top_p=column("top_p", 1.0, np.float64),
        min_p=column("min_p", 0.0, np.float32),
        seeds=column("seeds", np.arange(num_rows), np.uint64),
        output_positions=column("positions", np.arange(num_rows) + 3, np.int64),
    )


def sample_with_triton(
    logits: Tensor, batch: SamplingBatch, monkeypatch: pytest.MonkeyPatch
) -> SampledTokens:
    with monkeypatch.context() as patch:
        patch.setattr(triton_runtime, "DEVICE_TYPES", {"cpu", "cuda"})
        return sample(logits.to(DEVICE, copy=True), batch)


def assert_same_tokens(logits: Tensor, batch: SamplingBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = sample_with_triton(logits, batch, monkeypatch)
    expected = sample(logits.clone(), batch)
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert actual.is_bad.tolist() == expected.is_bad.tolist()


# Parts of a block, of a step and of a chunk; two chunks.
@pytest.mark.parametrize(
    ("size", "filters"),
    [
        *((1, filters) for filters in FILTERS[::4]),
        *((127, filters) for filters in FILTERS[1::2]),
        *((600, filters) for filters in FILTERS),
        *((4300, filters) for filters in (FILTERS[0], FILTERS[4], FILTERS[8])),
    ],
    ids=str,
)
def test_tokens_are_those_of_the_torch_operations(
    size: int, filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same_tokens(make_logits(1, size), make_batch(1, size, **filters), monkeypatch)


@pytest.mark.parametrize(
    ("spread", "filters"),
    [
        (6.0, {"top_p": 0.9}),  # the first blocks hold enough
        (0.1, {"top_p": 0.9}),  # they do not: the whole row is searched
        (2.0, {"top_p": 0.9, "min_p": 0.01}),  # min-p lists the blocks
        (2.0, {"top_p": 0.9, "top_k": 3}),
        (2.0, {"top_k": 3, "min_p": 0.9}),
    ],
    ids=str,
)
def test_rows_are_looked_into_where_the_largest_weights_are(
    spread: float, filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_triton, "_TOP_P_BLOCKS", 2)
    assert_same_tokens(make_logits(1, 900, spread), make_batch(1, 900, **filters), monkeypatch)


@pytest.mark.parametrize("filters", [{"top_k": 7}, {"top_p": 0.5}, {"top_k": 9, "top_p": 0.8}], ids=str)
def test_equal_weights_at_the_edge_stay_together(
    filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = make_logits(1, 120, spread=1.0).round()
    assert_same_tokens(logits, make_batch(1, 120, **filters), monkeypatch)


def test_a_token_is_the_same_alone_and_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = make_logits(5, 300)
    columns: dict[str, list[Any]] = {
        "temperature": [0.0, 1.0, 0.5, 1.0, 3.0],
        "top_k": [300, 300, 4, 300, 300],
        "top_p": [1.0, 1.0, 1.0, 0.6, 0.9],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.1],
        "positions": [9, 8, 7, 6, 5],
        "seeds": [1, 2, 3, 4, 5],
    }
    together = sample_with_triton(logits, make_batch(5, 300, **columns), monkeypatch)
    for row in range(5):
        own = {name: values[row] for name, values in columns.items()}
        alone = sample_with_triton(logits[row : row + 1], make_batch(1, 300, **own), monkeypatch)
        assert alone.token_ids[0] == together.token_ids[row]


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")  # inf - inf, in a row that is bad
def test_rows_without_a_finite_maximum_are_bad_and_leave_the_others_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = make_logits(4, 200)
    logits[0, 150] = torch.nan
    logits[1, 60] = torch.inf
    logits[2] = -torch.inf
    sampled = sample_with_triton(logits, make_batch(4, 200, top_k=[20, 200, 20, 20]), monkeypatch)
    assert sampled.is_bad.tolist() == [True, True, True, False]
    assert all(0 <= token < 200 for token in sampled.token_ids.tolist())
    expected = sample(logits[3:].clone(), make_batch(1, 200, top_k=20, seeds=3, positions=6))
    assert sampled.token_ids[3] == expected.token_ids[0]


@pytest.mark.parametrize("filters", [{}, {"min_p": 0.5}], ids=str)
def test_forbidden_tokens_are_never_drawn(filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((3, 400), -torch.inf)
    allowed = [3, 129, 131, 399]
    logits[:, allowed] = 0.0
    sampled = sample_with_triton(logits, make_batch(3, 400, **filters), monkeypatch)
    assert set(sampled.token_ids.tolist()) <= set(allowed)
    assert len(set(sampled.token_ids.tolist())) > 1


def test_penalties_and_logprobs_are_those_of_the_torch_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, output = np.array([5, 6, 7], dtype=np.int32), np.array([9, 9, 11], dtype=np.int32)
    params = SamplingParams(
        logit_bias={8: 2.0}, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.2
    )
    lists = pack_token_lists(params, [[3]], 200)
    request = NewRequestData(0, "r", b"", b"", params, [], lists, [], 0)
    edits = make_logit_edits(RowStart(request, prompt, output, 200))
    batch = make_batch(3, 200, temperature=0.5)
    batch.edited = [EditedRow(1, edits, np.concatenate((prompt, output)), len(prompt) + len(output), 3)]
    batch.logprob_groups = [LogprobGroup(0, [0]), LogprobGroup(4, [1, 2])]
    logits = make_logits(3, 200)
    ours, theirs = logits.to(DEVICE, copy=True), logits.clone()
    expected = sample(theirs, batch)
    monkeypatch.setattr(triton_runtime, "DEVICE_TYPES", {"cpu", "cuda"})
    actual = sample(ours, batch)
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-6, atol=0)
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    for (_, mine), (_, reference) in zip(actual.logprobs, expected.logprobs, strict=True):
        assert torch.equal(mine.token_ids.cpu(), reference.token_ids)
        assert torch.equal(mine.ranks.cpu(), reference.ranks)
        torch.testing.assert_close(mine.logprobs.cpu(), reference.logprobs, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_narrow_logits_give_the_tokens_of_the_same_numbers_in_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 4500  # more than a chunk; rounded to 8 bits, many are equal
    filters = [FILTERS[number] for number in (0, 1, 2, 7)]
    logits = make_logits(len(filters), size).to(dtype)
    logits[1, 7] = torch.nan
    columns = {
        name: [params.get(name, default) for params in filters]
        for name, default in (("temperature", 1.0), ("top_k", size), ("top_p", 1.0), ("min_p", 0.0))
    }
    batch = make_batch(len(filters), size, **columns)
    batch.logprob_groups.append(LogprobGroup(2, [0, 2]))
    narrow = sample_with_triton(logits, batch, monkeypatch)
    wide = sample_with_triton(logits.float(), batch, monkeypatch)
    assert narrow.token_ids.tolist() == wide.token_ids.tolist()
    assert narrow.is_bad.tolist() == wide.is_bad.tolist() == [False, True, False, False]
    [(_, narrow_logprobs)], [(_, wide_logprobs)] = narrow.logprobs, wide.logprobs
    for one, other in zip(narrow_logprobs, wide_logprobs, strict=True):
        assert torch.equal(one, other)
