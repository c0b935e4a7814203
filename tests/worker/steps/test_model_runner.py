"""The runner on a toy model: chunks, batches, resumption, run-ahead, logprobs and bad rows, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.messages import LogprobsBlock
from quire.ipc.spec.model_spec import RopeConfig
from quire.worker.sampling.noise import uniform_noise
from row_driver import Driver, ToyModel, make_prompt, prefix_hashes, toy_config

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 11},
    "filtered": {"temperature": 0.8, "seed": 12, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "penalized": {
        "temperature": 0.9,
        "seed": 13,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
    },
    "min_tokens": {
        "temperature": 1.3,
        "seed": 14,
        "min_tokens": 9,
        "max_tokens": 20,
        "stop_token_ids": [1, 2, 3, 4],
    },
    "biased": {
        "temperature": 1.0,
        "seed": 15,
        "logit_bias": {5: 3.0, 9: -2.0},
        "allowed_token_ids": [5, 9, 30, 31],
    },
}
EOS = list(range(10, 50))
BAD_WORDS = [[50], [41, 42], [6, 7, 8]]


def _enter_all(driver: Driver, names: list[str] | None = None) -> None:
    for row, (name, fields) in enumerate(PARAMS.items()):
        if names is None or name in names:
            driver.enter(
                name,
                (row * 5) % 8,
                make_prompt(7 + 3 * row, seed=row),
                SamplingParams(**fields),
                eos=EOS,
                bad_words=BAD_WORDS if name in ("penalized", "seeded") else [],
            )


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[int]]:
    """Sixteen tokens of each request, each computed alone and unchunked."""
    tokens: dict[str, list[int]] = {}
    for name in PARAMS:
        driver = Driver()
        _enter_all(driver, [name])
        tokens |= driver.run(16)
    return {name: values[:16] for name, values in tokens.items()}


def test_sampling_parameters_change_the_tokens(undisturbed: dict[str, list[int]]) -> None:
    assert len({tuple(tokens) for tokens in undisturbed.values()}) == len(PARAMS)
    assert set(undisturbed["biased"]) <= {5, 9, 30, 31}
    assert not set(undisturbed["min_tokens"][:9]) & {*EOS, 1, 2, 3, 4}
    assert set(undisturbed["min_tokens"][9:]) & {*EOS, 1, 2, 3, 4}


@pytest.mark.parametrize("chunk", [1, 3, 8, 1000])
def test_chunks_and_neighbours_do_not_change_a_token(chunk: int, undisturbed: dict[str, list[int]]) -> None:
    driver = Driver()
    _enter_all(driver)
    tokens = driver.run(16, chunk)
    assert {name: values[:16] for name, values in tokens.items()} == undisturbed


@pytest.mark.parametrize("num_before", [1, 5, 9, 12])
def test_a_resumed_request_continues_as_if_undisturbed(
    num_before: int, undisturbed: dict[str, list[int]]
) -> None:
    driver = Driver()
    for row, (name, fields) in enumerate(PARAMS.items()):
        driver.enter(
            name,
            row,
            make_prompt(7 + 3 * row, seed=row),
            SamplingParams(**fields),
            output=undisturbed[name][:num_before],
            eos=EOS,
            bad_words=BAD_WORDS if name in ("penalized", "seeded") else [],
        )
    tokens = driver.run(16 - num_before, chunk=6)
    assert {name: values[: 16 - num_before] for name, values in tokens.items()} == {
        name: values[num_before:] for name, values in undisturbed.items()
    }


# With a row that needs its history each step's tokens are read before the next is sampled, without one after.
@pytest.mark.parametrize("names", [list(PARAMS), ["greedy", "filtered", "min_tokens"]])
@pytest.mark.parametrize("is_async", [False, True])
def test_steps_launched_ahead_of_the_tokens_give_the_same_tokens(
    is_async: bool, names: list[str], undisturbed: dict[str, list[int]]
) -> None:
    driver = Driver(is_async=is_async)
    _enter_all(driver, names)
    in_flight = [driver.launch({n: r.num_known for n, r in driver.requests.items()})]
    for _ in range(15):
        in_flight.append(driver.launch(dict.fromkeys(driver.requests, 1)))
        driver.collect(in_flight.pop(0))
    driver.collect(in_flight.pop())
    assert {name: request.tokens for name, request in driver.requests.items()} == {
        name: undisturbed[name] for name in names
    }


def test_noise_is_asked_for_by_seed_and_number_of_output_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[int], list[int]]] = []

    def record(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
        asked.append((seeds.tolist(), positions.tolist()))
        return uniform_noise(seeds, positions)

    monkeypatch.setattr("quire.worker.sampling.sampler.uniform_noise", record)
    driver = Driver()
    driver.enter("new", 0, make_prompt(9), SamplingParams(seed=5))
    driver.enter("resumed", 1, make_prompt(3), SamplingParams(seed=-1 - 5), output=[4, 4, 4])
    driver.run(3)
    assert asked == [([5, 2**64 - 6], [count, count + 3]) for count in range(3)]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_row_that_changes_hands_while_its_token_is_in_flight_is_clean(
    is_async: bool, undisturbed: dict[str, list[int]]
) -> None:
    driver = Driver(is_async=is_async)
    driver.enter("old", 3, make_prompt(9, seed=77), SamplingParams(temperature=0.0, frequency_penalty=1.0))
    first = driver.launch({"old": 9})
    second = driver.launch({"old": 1})
    driver.free("old")
    fields = PARAMS["penalized"]
    prompt = make_prompt(7 + 3 * 3, seed=3)
    driver.enter("penalized", 3, prompt, SamplingParams(**fields), eos=EOS, bad_words=BAD_WORDS)
    third = driver.launch({"penalized": len(prompt)})
    for launched in (first, second, third):
        driver.runner.collect(launched)
    driver.requests["penalized"].tokens.append(driver.runner.collect(third).token_ids[0])
    assert driver.run(16)["penalized"] == undisturbed["penalized"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_finished_row_computed_one_step_longer_is_harmless_at_max_model_len(is_async: bool) -> None:
    def generate(extra_step: bool) -> list[int]:
        driver = Driver(toy_config(max_model_len=32), is_async=is_async)
        driver.enter("full", 0, make_prompt(30))
        driver.enter("other", 1, make_prompt(5, seed=1))
        steps = [driver.launch({"full": 30, "other": 5}), driver.launch({"full": 1, "other": 1})]
        if extra_step:  # the token at max_model_len - 1 is computed, one is sampled that nobody wants
            steps.append(driver.launch({"full": 1, "other": 1}))
        else:
            steps.append(driver.launch({"other": 1}))
        driver.free("full")
        driver.enter("next", 0, make_prompt(6, seed=2))
        steps.append(driver.launch({"next": 6, "other": 1}))
        for launched in steps:
            driver.collect(launched)
        driver.step({"next": 1, "other": 1})
        return driver.requests["next"].tokens[-2:] + driver.requests["other"].tokens

    assert generate(extra_step=True) == generate(extra_step=False)


def test_a_row_samples_only_in_the_step_that_completes_what_it_knows() -> None:
    driver = Driver()
    driver.enter("a", 0, make_prompt(10))
    driver.enter("b", 5, make_prompt(3, seed=1))
    outputs = [driver.step({"b": 3, "a": 4}), driver.step({"a": 5, "b": 1}), driver.step({"b": 1, "a": 1})]
    assert [output.rows for output in outputs] == [[5], [5], [5, 0]]
    assert [output.step_id for output in outputs] == [0, 1, 2]
    assert all(len(output.token_ids) == len(output.rows) for output in outputs)


def test_bad_rows_are_named_and_their_neighbours_go_on(undisturbed: dict[str, list[int]]) -> None:
    driver = Driver()
    driver.model.bad_tokens = {60}
    _enter_all(driver, ["greedy", "seeded"])
    driver.enter("bad", 7, [1, 2, 60], SamplingParams(temperature=1.0, seed=1))
    driver.enter(
        "empty", 6, [1, 2], SamplingParams(temperature=0.0, allowed_token_ids=[50]), bad_words=[[50]]
    )
    driver.run(16)
    assert set(driver.bad_rows[:2]) == {7, 6}
    assert {n: driver.requests[n].tokens[:16] for n in ("greedy", "seeded")} == {
        n: undisturbed[n] for n in ("greedy", "seeded")
    }


def _arrays(block: LogprobsBlock) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shape = block.num_positions, block.width
    return (
        np.frombuffer(block.token_ids, np.int32).reshape(shape),
        np.frombuffer(block.logprobs, np.float32).reshape(shape),
        np.frombuffer(block.ranks, np.int32),
    )


def _prompt_logprobs(driver: Driver, name: str) -> tuple[np.ndarray, ...]:
    parts = [_arrays(part.prompt) for part in driver.requests[name].logprobs if part.prompt is not None]
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


@pytest.mark.parametrize("chunk", [1, 4, 7, 1000])
def test_prompt_logprobs_are_those_of_the_prompt_in_any_chunks(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three positions of 61 logits a slice: the slicing is reached too.
    monkeypatch.setattr("quire.worker.steps.model_runner._PROMPT_LOGITS_ELEMENTS", 200)
    driver = Driver()
    prompt = make_prompt(20, seed=5)
    driver.enter("scored", 2, prompt, SamplingParams(temperature=0.0, prompt_logprobs=3, logprobs=2))
    driver.enter("whole", 4, prompt, SamplingParams(temperature=0.0, prompt_logprobs=-1))
    driver.enter("other", 3, make_prompt(9), SamplingParams(temperature=0.0))
    driver.run(3, chunk)
    ids, logprobs, ranks = _prompt_logprobs(driver, "scored")
    exact = torch.log_softmax(_logits_after(prompt)[:-1].double(), 1)
    assert ids[:, 0].tolist() == prompt[1:]
    assert ids.shape == (19, 4)
    # 61 terms and 4-wide logits: float32 roundings of the sum and of the result.
    np.testing.assert_allclose(
        logprobs, exact.gather(1, torch.from_numpy(ids.astype(np.int64))), rtol=0, atol=2e-6
    )
    assert ranks.tolist() == [1 + int((r > r[t]).sum()) for r, t in zip(exact, prompt[1:], strict=True)]
    whole = _prompt_logprobs(driver, "whole")
    assert whole[0].shape == (19, 62)
    assert whole[1][:, :4].tolist() == logprobs.tolist()


def _logits_after(tokens: list[int]) -> torch.Tensor:
    hidden = torch.tensor(prefix_hashes(tokens), dtype=torch.float64)[:, None]
    return ToyModel(61).compute_logits(hidden)


def test_sample_logprobs_are_of_the_raw_distribution() -> None:
    driver = Driver()
    prompt = make_prompt(6)
    params = {"temperature": 1.8, "seed": 3, "top_k": 5, "repetition_penalty": 1.9, "logit_bias": {4: 9.0}}
    driver.enter("edited", 0, prompt, SamplingParams(**params, logprobs=2))
    driver.enter("plain", 1, prompt, SamplingParams(**params))
    driver.enter("own", 2, prompt, SamplingParams(temperature=0.0, logprobs=0))
    tokens = driver.run(5)
    assert tokens["edited"] == tokens["plain"]
    assert not driver.requests["plain"].logprobs
    blocks = [part.sample for part in driver.requests["edited"].logprobs]
    history = list(prompt)
    for token, block in zip(tokens["edited"], blocks, strict=True):
        assert block is not None
        exact = torch.log_softmax(_logits_after(history)[-1].double(), 0)
        ids, logprobs, ranks = _arrays(block)
        assert (block.num_positions, block.width) == (1, 3)
        assert ids[0, 0] == token
        assert ids[0, 1:].tolist() == exact.topk(2).indices.tolist()
        np.testing.assert_allclose(
            logprobs[0], exact[torch.from_numpy(ids[0].astype(np.int64))], rtol=0, atol=2e-6
        )
        assert ranks.tolist() == [1 + int((exact > exact[token]).sum())]
        history.append(token)
    own = driver.requests["own"].logprobs[0].sample
    assert own is not None
    assert own.width == 1
    assert _arrays(own)[2].tolist() == [1]


def test_dynamic_rope_is_told_the_longer_of_prompt_and_position() -> None:
    driver = Driver(toy_config(rope=RopeConfig(type="dynamic", factor=2.0)))
    driver.enter("a", 0, make_prompt(5))
    driver.run(3, chunk=3)
    assert driver.model.rope_lengths == [[5, 5, 5], [5, 5], [6], [7]]


def test_reset_rows_forgets_requests_and_keeps_working(undisturbed: dict[str, list[int]]) -> None:
    driver = Driver(is_async=True)
    _enter_all(driver)
    lost = driver.launch({n: r.num_known for n, r in driver.requests.items()})
    driver.runner.reset_rows()
    driver.runner.collect(lost)
    driver.requests.clear()
    _enter_all(driver)
    assert {name: values[:16] for name, values in driver.run(16).items()} == undisturbed
