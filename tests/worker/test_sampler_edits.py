"""Logit edits against a plain-Python reference, and what each of them promises."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.step import NewRequestData
from quire.ipc.protocol.token_lists import is_token_mask, pack_token_lists
from quire.worker.sampling import logit_edits
from quire.worker.sampling.logit_edit import EditedRow, LogitEdit, RowStart
from quire.worker.sampling.logit_edits import apply_logit_edits, make_logit_edits
from quire.worker.sampling.logprobs import compute_logprobs
from quire.worker.sampling.sampler import LogprobGroup, SamplingBatch, make_sampling_columns, sample

VOCAB_SIZE = 12
INF = float("inf")


def _request(params: SamplingParams, eos: list[int], bad_words: list[list[int]]) -> NewRequestData:
    return NewRequestData(
        0, "r", b"", b"", params, eos, pack_token_lists(params, bad_words, VOCAB_SIZE), [], 0
    )


def _make(
    prompt: list[int],
    output: list[int],
    params: SamplingParams,
    eos: list[int] | None = None,
    bad_words: list[list[int]] | None = None,
) -> list[LogitEdit[Any]]:
    history = np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32)
    return make_logit_edits(RowStart(_request(params, eos or [], bad_words or []), *history, VOCAB_SIZE))


def _row(index: int, edits: list[LogitEdit[Any]], prompt: list[int], output: list[int]) -> EditedRow:
    tokens = np.array(prompt + output, dtype=np.int32)
    return EditedRow(index, edits, tokens, len(tokens), len(output))


def _reference(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    params: SamplingParams,
    eos: list[int],
    bad_words: list[list[int]],
) -> list[float]:
    logits = list(logits)
    history = prompt + output
    for token in range(VOCAB_SIZE):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            logits[token] = -INF
    for word in bad_words:
        if word[:-1] == history[len(history) - len(word) + 1 :] and len(word) - 1 <= len(history):
            logits[word[-1]] = -INF
    if len(output) < params.min_tokens:
        for token in [*eos, *(params.stop_token_ids or [])]:
            logits[token] = -INF
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    counts = Counter(output)
    for token in range(VOCAB_SIZE):
        if token in history:
            penalty = params.repetition_penalty
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        logits[token] -= params.frequency_penalty * counts[token]
        logits[token] -= params.presence_penalty * (counts[token] > 0)
    return logits


TOKENS = st.integers(0, VOCAB_SIZE - 1)
CASES = st.fixed_dictionaries(
    {
        "logits": st.lists(st.floats(-8, 8, width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE),
        "prompt": st.lists(TOKENS, min_size=1, max_size=8),
        "output": st.lists(TOKENS, max_size=8),
        "eos": st.lists(TOKENS, max_size=2),
        "bad_words": st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=4),
        "params": st.builds(
            SamplingParams,
            max_tokens=st.none(),
            min_tokens=st.integers(0, 8),
            stop_token_ids=st.one_of(st.none(), st.lists(TOKENS, max_size=2)),
            allowed_token_ids=st.one_of(st.none(), st.lists(TOKENS, min_size=1, max_size=6)),
            logit_bias=st.one_of(st.none(), st.dictionaries(TOKENS, st.floats(-9, 9, width=32), max_size=3)),
            repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
            frequency_penalty=st.sampled_from([0.0, -1.0, 0.7]),
            presence_penalty=st.sampled_from([0.0, 1.5]),
        ),
    }
)


@settings(max_examples=150, deadline=None)
@given(cases=st.lists(CASES, min_size=1, max_size=4))
def test_edits_of_a_batch_agree_with_the_reference(cases: list[dict[str, Any]]) -> None:
    logits = torch.tensor([case["logits"] for case in cases])
    rows: list[EditedRow] = []
    for index, case in enumerate(cases):
        edits = _make(case["prompt"], case["output"], case["params"], case["eos"], case["bad_words"])
        if edits:
            rows.append(_row(index, edits, case["prompt"], case["output"]))
    apply_logit_edits(logits, rows)
    expected = torch.tensor([_reference(**case) for case in cases])
    # Five float32 operations on numbers of at most 8 + 9 + 8 penalties, each within half an ulp of 32.
    torch.testing.assert_close(logits, expected, rtol=0, atol=5 * 2**-19)


def test_a_request_without_edits_has_none() -> None:
    params = SamplingParams(temperature=0.3, top_k=4, seed=1, stop_token_ids=[3])
    assert _make([1], [], params, eos=[2]) == []
    # A resumed request that is past its min_tokens needs no edits either.
    assert _make([1], [4, 5], SamplingParams(min_tokens=2), eos=[2]) == []


def test_penalties_grow_token_by_token_as_if_made_at_once() -> None:
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1)
    output = np.random.default_rng(0).integers(0, VOCAB_SIZE, 200).tolist()
    grown, whole = _make([1, 2, 1], [], params), _make([1, 2, 1], output, params)
    for token in output:
        grown[0].append(token)
    logits = torch.randn(2, VOCAB_SIZE).tolist()[0]
    edited = torch.tensor([logits, logits])
    apply_logit_edits(edited, [_row(0, grown, [1, 2, 1], output), _row(1, whole, [1, 2, 1], output)])
    assert torch.equal(edited[0], edited[1])
    assert not torch.equal(edited[0], torch.tensor(logits))


def test_a_bad_word_of_several_tokens_is_banned_only_after_its_beginning() -> None:
    edits = _make([1], [], SamplingParams(), bad_words=[[4, 5, 6], [7], [5, 3], [2, 4, 5, 0]])

    def banned(prompt: list[int], output: list[int]) -> list[int]:
        logits = torch.zeros(1, VOCAB_SIZE)
        apply_logit_edits(logits, [_row(0, edits, prompt, output)])
        return torch.nonzero(logits[0].isinf())[:, 0].tolist()

    assert banned([1], [4, 5]) == [3, 6, 7]
    assert banned([1, 4], [5]) == [3, 6, 7]  # it may begin in the prompt
    assert banned([2], [4, 5]) == [0, 3, 6, 7]
    assert banned([1], [5, 4]) == [7]
    assert banned([5], []) == [3, 7]


@pytest.mark.parametrize("chosen", ["native", "torch"])
def test_a_bias_is_added_to_the_same_bit_natively_and_without(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    biases = torch.linspace(-100, 100, VOCAB_SIZE).tolist()
    edits = _make([1], [], SamplingParams(logit_bias=dict(enumerate(biases))))
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    logits[1, :2] = -INF  # as an edit before it may have left
    expected = logits + torch.tensor(biases)
    rows = [_row(index, edits, [1], []) for index in range(2)]
    monkeypatch.setattr(logit_edits, "choose_kernel", lambda *_: chosen)
    apply_logit_edits(logits, rows)
    assert torch.equal(logits, expected)


def test_many_allowed_ids_are_kept_by_a_bit_a_token_and_few_by_their_ids() -> None:
    vocab_size = 203
    for allowed in ([5, 202], list(range(1, 203, 2))):
        lists = pack_token_lists(SamplingParams(allowed_token_ids=allowed), (), vocab_size)
        assert is_token_mask(lists.allowed, vocab_size) == (len(allowed) > 2)
        request = NewRequestData(0, "r", b"", b"", SamplingParams(), [], lists, [], 0)
        nothing = np.zeros(0, dtype=np.int32)
        edits = make_logit_edits(RowStart(request, nothing, nothing, vocab_size))
        logits = torch.zeros(2, vocab_size)
        apply_logit_edits(logits, [_row(1, edits, [1], [])])
        assert torch.nonzero(logits[1] == 0)[:, 0].tolist() == allowed
        assert not logits[0].any()


@pytest.mark.parametrize(
    ("params", "eos", "bad_words"),
    [
        (SamplingParams(logit_bias={VOCAB_SIZE: 5.0}), [], []),
        (SamplingParams(min_tokens=3, stop_token_ids=[VOCAB_SIZE + 5]), [VOCAB_SIZE], []),
        (SamplingParams(), [], [[VOCAB_SIZE], [0, VOCAB_SIZE]]),
    ],
)
def test_ids_outside_the_vocabulary_do_not_reach_the_next_row(
    params: SamplingParams, eos: list[int], bad_words: list[list[int]]
) -> None:
    edits = _make([1, 0], [], params, eos, bad_words)
    logits = torch.zeros(2, VOCAB_SIZE)
    apply_logit_edits(logits, [_row(0, edits, [1, 0], [])])
    assert not logits.any()


def test_logprobs_are_those_of_the_model_whatever_edits_choose_the_token() -> None:
    params = SamplingParams(temperature=0, logit_bias={3: 50.0})
    columns = make_sampling_columns(1)
    columns.enter(0, params, VOCAB_SIZE)
    row = np.zeros(1, dtype=np.int64)
    batch = SamplingBatch(
        **columns.take(row),
        output_positions=row,
        edited=[_row(0, _make([1], [], params), [1], [])],
        logprob_groups=[LogprobGroup(2, [0])],
    )
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    sampled = sample(logits.clone(), batch)
    assert sampled.token_ids.tolist() == [3]
    ((rows, logprobs),) = sampled.logprobs
    assert rows == [0]
    assert torch.equal(logprobs.logprobs, compute_logprobs(logits, torch.tensor([3]), 2).logprobs)
