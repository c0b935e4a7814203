"""Logprobs against log_softmax in float64: values, order, ranks and the wire form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quire.worker.sampling.logprobs import compute_logprobs, pack_logprobs


@pytest.mark.parametrize("size", [7, 128, 2048, 40_001])
@pytest.mark.parametrize("count", [0, 1, 5, 40_001])
def test_logprobs_are_those_of_log_softmax(size: int, count: int) -> None:
    count = min(count, size)
    logits = torch.randn(9, size, generator=torch.Generator().manual_seed(size)) * 5
    tokens = torch.arange(9) * (size // 9 + 1) % size
    exact = torch.log_softmax(logits.double(), 1)
    result = compute_logprobs(logits, tokens, count)
    assert result.token_ids.shape == (9, 1 + count)
    assert result.token_ids[:, 0].tolist() == tokens.tolist()
    chosen = exact.gather(1, result.token_ids.long())
    # The sum's relative error is 128 float32 roundings at most; the value itself is below 64 in size.
    torch.testing.assert_close(result.logprobs.double(), chosen, rtol=0, atol=128 * 2**-24 + 64 * 2**-24)
    assert result.ranks.tolist() == [
        1 + int((row > row[token]).sum()) for row, token in zip(exact, tokens, strict=True)
    ]
    for row in range(9):
        order = np.lexsort((np.arange(size), -logits[row].numpy()))
        assert result.token_ids[row, 1:].tolist() == order[:count].tolist()


def test_a_rows_logprobs_have_the_same_bits_in_any_batch() -> None:
    logits = torch.randn(300, 1500, generator=torch.Generator().manual_seed(0)) * 3
    tokens = torch.arange(300)
    together = compute_logprobs(logits, tokens, 4)
    for row in (0, 1, 150, 299):
        alone = compute_logprobs(logits[row : row + 1], tokens[row : row + 1], 4)
        assert torch.equal(alone.logprobs[0], together.logprobs[row])
        assert torch.equal(alone.token_ids[0], together.token_ids[row])


def test_logprobs_of_chosen_ids_are_those_of_the_whole_vocabulary_in_the_order_asked_for() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(1)) * 3
    tokens, asked = torch.tensor([5, 6, 299]), torch.tensor([[7, 0], [6, 5], [299, 1]])
    whole, some = compute_logprobs(logits, tokens, 300), compute_logprobs(logits, tokens, asked)
    assert some.token_ids.tolist() == [[5, 7, 0], [6, 6, 5], [299, 299, 1]]
    assert torch.equal(some.ranks, whole.ranks)
    for row in range(3):
        values = dict(zip(whole.token_ids[row].tolist(), whole.logprobs[row].tolist(), strict=True))
        assert some.logprobs[row].tolist() == [values[token] for token in some.token_ids[row].tolist()]


def test_a_tie_has_the_rank_of_the_first_and_comes_in_the_order_of_ids() -> None:
    result = compute_logprobs(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), torch.tensor([2]), 3)
    assert result.ranks.tolist() == [1]
    assert result.token_ids.tolist() == [[2, 1, 2, 0]]


def test_the_wire_form_holds_the_arrays_row_by_row() -> None:
    result = compute_logprobs(torch.randn(3, 20), torch.tensor([4, 5, 6]), 2)
    block = pack_logprobs(*(tensor.numpy() for tensor in result))
    assert (block.num_positions, block.width) == (3, 3)
    assert np.frombuffer(block.token_ids, np.int32).reshape(3, 3).tolist() == result.token_ids.tolist()
    assert np.frombuffer(block.logprobs, np.float32).reshape(3, 3).tolist() == result.logprobs.tolist()
    assert np.frombuffer(block.ranks, np.int32).tolist() == result.ranks.tolist()
