"""The sampler against a slow float64 reference, its distribution, and its independence of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from quire.kernels.choice import choose_kernel
from quire.kernels.program.native import set_num_threads
from quire.worker.sampling import sampler
from quire.worker.sampling.noise import uniform_noise
from quire.worker.sampling.sampler import SampledTokens, SamplingBatch, sample

# Upper 1e-4 points of chi-square with 7 and with 3 degrees of freedom.
CHI_SQUARE = {7: 29.9, 3: 21.1}
# float32 weights of a row may move the sum of any part of it by this much of the total.
EDGE = 1e-5


@pytest.fixture(autouse=True, params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs with the compiled sampler and without it."""
    if request.param == "torch":
        monkeypatch.setattr(sampler, "choose_kernel", lambda *_arguments: "torch")
    else:
        request.getfixturevalue("library")
    return request.param


def _batch(num_rows: int, vocab_size: int, **columns: Any) -> SamplingBatch:
    def column(name: str, default: Any, dtype: Any) -> Any:
        return np.broadcast_to(np.array(columns.get(name, default), dtype=dtype), (num_rows,)).copy()

    return SamplingBatch(
        temperature=column("temperature", 1.0, np.float32),
        top_k=column("top_k", vocab_size, np.int64),
        top_p=column("top_p", 1.0, np.float64),
        min_p=column("min_p", 0.0, np.float32),
        seeds=column("seeds", 0, np.uint64),
        output_positions=column("positions", 0, np.int64),
    )


def _sample(logits: torch.Tensor, **columns: Any) -> SampledTokens:
    batch = _batch(len(logits), logits.shape[1], **columns)
    with torch.inference_mode():
        return sample(logits.clone(), batch)


def _reference_weights(
    logits: NDArray[np.float64], temperature: float, top_k: int, top_p: float, min_p: float
) -> NDArray[np.float64]:
    """Weights after the filters; rejects examples in which rounding could move a filter's edge."""
    weights = np.exp((logits - logits.max()) / temperature)
    assume(np.abs(weights - min_p).min() > EDGE or min_p == 0.0 or min_p == 1.0)
    keep = weights >= min_p * (1 - 1e-12)
    if top_k < len(weights):
        keep &= logits >= np.sort(logits)[-top_k]
    weights = np.where(keep, weights, 0.0)
    if top_p < 1.0:
        falling = np.sort(weights)[::-1]
        cumulative = falling.cumsum() / falling.sum()
        assume(np.abs(cumulative - top_p).min() > EDGE)
        weights = np.where(weights >= falling[np.argmax(cumulative >= top_p)], weights, 0.0)
    return weights


def _assert_is_quantile(weights: NDArray[np.float64], token: int, noise: float) -> None:
    cumulative = np.concatenate(([0.0], weights.cumsum())) / weights.sum()
    assert weights[token] > 0
    assert cumulative[token] - EDGE <= noise <= cumulative[token + 1] + EDGE


LOGITS = st.lists(st.integers(-24, 24).map(lambda quarters: quarters / 4), min_size=1, max_size=40)


@settings(max_examples=300, deadline=None)
@given(
    logits=LOGITS,
    temperature=st.sampled_from([0.01, 0.3, 1.0, 2.0]),
    top_k=st.integers(1, 45),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_token_is_the_noises_quantile_of_the_filtered_weights(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    top_k = min(top_k, len(logits))
    scaled_temperature = float(np.float32(temperature))
    weights = _reference_weights(np.array(logits), scaled_temperature, top_k, top_p, float(np.float32(min_p)))
    sampled = _sample(
        torch.tensor([logits]), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=seed
    )
    noise = uniform_noise(np.array([seed], dtype=np.uint64), np.zeros(1, dtype=np.int64))[0]
    _assert_is_quantile(weights, int(sampled.token_ids[0]), noise)
    assert not sampled.is_bad[0]


@pytest.mark.parametrize("scale", [0.2, 2.0, 12.0])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 50},
        {"top_k": 3000},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 40, "top_p": 0.7, "min_p": 0.01},
    ],
)
def test_large_vocabularies_agree_with_the_reference(scale: float, filters: dict[str, Any]) -> None:
    """Flat logits make top-p look past its first prefix, steep ones do not; 40,000 tokens are 313 blocks."""
    size = 40_000
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(3)) * scale
    sampled = _sample(logits, seeds=np.arange(6), **filters)
    noise = uniform_noise(np.arange(6, dtype=np.uint64), np.zeros(6, dtype=np.int64))
    for row in range(6):
        exact = np.exp(logits[row].double().numpy() - float(logits[row].max()))
        keep = exact >= filters.get("min_p", 0.0)
        keep &= exact >= np.sort(exact)[-min(size, filters.get("top_k", size))]
        exact = np.where(keep, exact, 0.0)
        falling = np.sort(exact)[::-1]
        edge = np.argmax(falling.cumsum() >= filters.get("top_p", 1.0) * falling.sum() * (1 - 1e-12))
        # A handful of tokens at top-p's edge may fall either side of it in float32.
        loosest = falling[min(size - 1, edge + 3)]
        token = int(sampled.token_ids[row])
        assert exact[token] >= loosest
        _assert_is_quantile(
            np.where(exact >= falling[edge], exact, 0.0) + (exact == exact[token]) * 1e-30, token, noise[row]
        )


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [7.0, 7.0, 7.0]])
    assert _sample(logits, temperature=0.0).token_ids.tolist() == [1, 0]


def test_greedy_and_random_rows_share_a_batch() -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    temperature = np.where(np.arange(40) % 2, 1.0, 0.0)
    sampled = _sample(logits, temperature=temperature, seeds=np.arange(40)).token_ids
    assert sampled[::2].tolist() == logits[::2].argmax(1).tolist()
    assert sampled[1::2].tolist() != logits[1::2].argmax(1).tolist()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    set_num_threads(request.param)
    yield request.param
    set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [61, 2048, 40_001])
def test_a_row_has_the_same_token_whatever_rows_are_beside_it(size: int) -> None:
    generator = np.random.default_rng(size)
    num_rows = 16
    logits = torch.from_numpy(generator.normal(0, 3, (num_rows, size)).astype(np.float32))
    columns = {
        "temperature": generator.choice([0.0, 0.5, 1.0, 1.7], num_rows),
        "top_k": generator.choice([1, 7, size // 2, size], num_rows),
        "top_p": generator.choice([0.3, 0.95, 0.9999, 1.0], num_rows),
        "min_p": generator.choice([0.0, 0.2], num_rows),
        "seeds": generator.integers(0, 2**62, num_rows),
        "positions": generator.integers(0, 100, num_rows),
    }
    together = _sample(logits, **columns).token_ids.tolist()
    for rows in (np.arange(0, 16, 2), np.arange(16)[::-1], *(np.array([row]) for row in range(num_rows))):
        some = _sample(
            logits[torch.from_numpy(rows.copy())], **{name: values[rows] for name, values in columns.items()}
        )
        assert some.token_ids.tolist() == [together[row] for row in rows]


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_tokens_are_distributed_as_the_softmax(along: str) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.2])
    num_rows = 20_000
    expected = torch.softmax(logits.double() / 0.8, 0).numpy() * num_rows
    tokens = _sample(logits.repeat(num_rows, 1), temperature=0.8, **{along: np.arange(num_rows)}).token_ids
    observed = np.bincount(tokens.numpy(), minlength=8)
    assert ((observed - expected) ** 2 / expected).sum() < CHI_SQUARE[7]


def test_filtered_tokens_are_distributed_as_the_renormalized_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.2])
    num_rows = 20_000
    kept = [1, 3, 4, 6]  # the four largest; top-p of 0.99 keeps all four of them
    expected = torch.softmax(logits[kept].double(), 0).numpy() * num_rows
    tokens = _sample(logits.repeat(num_rows, 1), top_k=4, top_p=0.99, seeds=np.arange(num_rows)).token_ids
    observed = np.bincount(tokens.numpy(), minlength=8)
    assert observed.sum() == observed[kept].sum()
    assert ((observed[kept] - expected) ** 2 / expected).sum() < CHI_SQUARE[3]


def test_equal_logits_at_the_edge_of_top_k_stay_together() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, 3.0]]).repeat(2000, 1)
    tokens = _sample(logits, top_k=2, temperature=2.0, seeds=np.arange(2000)).token_ids
    assert set(tokens.tolist()) == {1, 2, 3, 4}


@pytest.mark.parametrize("size", [5, 300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_usable_logits_are_bad_and_their_neighbours_are_not(
    size: int, temperature: float
) -> None:
    logits = torch.randn(5, size, generator=torch.Generator().manual_seed(1))
    clean = logits[[0, 4]].clone()
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 0] = torch.inf
    columns = {"temperature": temperature, "top_k": min(size, 4), "top_p": 0.9}
    sampled = _sample(logits, seeds=np.arange(5), **columns)
    assert sampled.is_bad.tolist() == [False, True, True, True, False]
    assert ((sampled.token_ids >= 0) & (sampled.token_ids < size)).all()
    alone = _sample(clean, seeds=np.array([0, 4]), **columns)
    assert sampled.token_ids[[0, 4]].tolist() == alone.token_ids.tolist()


def test_tokens_that_are_ruled_out_are_never_sampled() -> None:
    logits = torch.full((500, 200), -torch.inf)
    logits[:, [7, 190]] = 0.0
    tokens = _sample(logits, seeds=np.arange(500), temperature=2.0).token_ids
    assert set(tokens.tolist()) == {7, 190}


@pytest.mark.usefixtures("library")
def test_the_compiled_sampler_draws_the_tokens_of_the_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(5)
    num_rows, size = 400, 3001
    logits = torch.from_numpy(generator.normal(0, 3, (num_rows, size)).astype(np.float32))
    columns = {
        "temperature": generator.choice([0.0, 0.5, 1.0, 1.7], num_rows),
        "top_k": generator.choice([1, 7, 200, 1500, size], num_rows),
        "top_p": generator.choice([0.3, 0.95, 0.9999, 1.0], num_rows),
        "min_p": generator.choice([0.0, 0.2], num_rows),
        "seeds": generator.integers(0, 2**62, num_rows),
    }
    monkeypatch.setattr(sampler, "choose_kernel", choose_kernel)
    compiled = _sample(logits, **columns).token_ids
    monkeypatch.setattr(sampler, "choose_kernel", lambda *_arguments: "torch")
    # Weights differ by a few float32 roundings: less than one draw in a hundred thousand falls between.
    assert (compiled != _sample(logits, **columns).token_ids).sum() <= 1
