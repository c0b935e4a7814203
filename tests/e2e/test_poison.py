"""Requests that make a real worker's steps raise, or kill it, among 64: they alone fail.

Each death of a worker takes a second, and a search among 64 has four; the default test has fake workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import poisoned_fake
import pytest
from daemons import fake_modules
from generated import find_tokens, make_prompts
from poisoned import HANGS, HANGS_AGAIN, KILLS, KILLS_LATE, NEVER_ENDS, PANICS, RAISES, poison_steps
from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.frontend.client import engines
from quire.frontend.models.model_folder import POCKET_ENCODER
from quire.worker.worker import Worker

NUM_REQUESTS = 64
PARAMS = [
    SamplingParams(temperature=float(i % 2), seed=i, max_tokens=16, ignore_eos=True)
    for i in range(NUM_REQUESTS)
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
        patch.setattr(engines, "CORE_MODULE", "poisoned")
        processors = ["own_processors:Fails"]
        with LLM(max_model_len=128, max_num_seqs=NUM_REQUESTS, logits_processors=processors) as llm:
            yield llm


@pytest.fixture(scope="module")
def golden(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(make_prompts({}, NUM_REQUESTS), PARAMS, use_tqdm=False)
    assert all(output.error is None for output in outputs)
    return find_tokens(outputs)


@pytest.mark.parametrize(
    ("count", "poisoned", "cause"),
    [
        (64, {31: RAISES}, "a poisonous prompt"),
        (64, {0: RAISES, 63: RAISES}, "a poisonous prompt"),
        pytest.param(64, {40: KILLS}, "was killed by SIGSEGV", marks=pytest.mark.slow),
    ],
)
def test_exactly_the_poison_fails(
    llm: LLM, golden: list[list[int]], count: int, poisoned: dict[int, int], cause: str
) -> None:
    check_that_poison_fails_alone(llm, golden, count, poisoned, cause)


def test_exactly_the_request_that_kills_workers_fails() -> None:
    with fake_modules(poisoned_fake.MODULE), LLM(max_model_len=128, max_num_seqs=NUM_REQUESTS) as llm:
        golden = find_tokens(llm.generate(make_prompts({}, NUM_REQUESTS), PARAMS, use_tqdm=False))
        check_that_poison_fails_alone(llm, golden, NUM_REQUESTS, {40: KILLS}, "was killed by SIGSEGV")


@pytest.mark.slow
def test_who_kills_workers_some_tokens_later_each_time_fails_before_the_engine_has_lost_too_many(
    llm: LLM,
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    golden = find_tokens(llm.generate(make_prompts({}, 4), params, use_tqdm=False))
    outputs = llm.generate(make_prompts({2: KILLS_LATE}, 4), params, use_tqdm=False)
    assert outputs[2].error_code == "poison_request"
    assert [list(outputs[i].outputs[0].token_ids) for i in (0, 1, 3)] == [golden[i] for i in (0, 1, 3)]


def check_that_poison_fails_alone(
    llm: LLM, golden: list[list[int]], count: int, poisoned: dict[int, int], cause: str
) -> None:
    outputs = llm.generate(make_prompts(poisoned, count), PARAMS[:count], use_tqdm=False)
    assert len(outputs) == count
    for i, output in enumerate(outputs):
        if i in poisoned:
            assert output.outputs[0].finish_reason == "error"
            assert output.error_code == "poison_request"
            assert cause in (output.error or "")
        else:
            assert list(output.outputs[0].token_ids) == golden[i]
            assert output.outputs[0].finish_reason == "length"


def test_in_the_callers_process_too_exactly_the_poison_fails(
    golden: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "launch", Worker.launch)  # as it is now, afterwards
    poison_steps()
    with LLM(max_model_len=128, max_num_seqs=NUM_REQUESTS, distributed_executor_backend="uni") as llm:
        outputs = llm.generate(make_prompts({31: RAISES}, NUM_REQUESTS), PARAMS, use_tqdm=False)
        assert llm.llm_engine.check_integrity() is None
    assert outputs[31].error_code == "poison_request"
    assert "a poisonous prompt" in (outputs[31].error or "")
    others = [list(output.outputs[0].token_ids) for i, output in enumerate(outputs) if i != 31]
    assert others == golden[:31] + golden[32:]


NUM_TEXTS = 256


@pytest.mark.parametrize(
    ("backend", "harm"), [("uni", RAISES), pytest.param("mp", KILLS, marks=pytest.mark.slow)]
)
def test_of_many_texts_exactly_the_poisonous_one_gets_no_vector(
    backend: str, harm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [{"prompt_token_ids": [100 + i] + [200] * (i % 40)} for i in range(NUM_TEXTS)]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
    monkeypatch.setattr(engines, "CORE_MODULE", "poisoned")
    monkeypatch.setattr(Worker, "launch", Worker.launch)  # as it is now, afterwards
    poison_steps()
    with LLM(POCKET_ENCODER, max_num_batched_tokens=1024, distributed_executor_backend=backend) as llm:
        golden = [one.outputs.raw for one in llm.embed(prompts, use_tqdm=False)]
        prompts[77]["prompt_token_ids"][0] = harm
        outputs = llm.embed(prompts, use_tqdm=False)
    (bad,) = (i for i, one in enumerate(outputs) if one.error is not None)
    assert (bad, outputs[bad].error_code) == (77, "poison_request")
    golden[77] = b""
    assert [one.outputs.raw for one in outputs] == golden


def test_a_logits_processor_that_raises_costs_its_own_request_alone(
    llm: LLM, golden: list[list[int]]
) -> None:
    params = [one.clone() for one in PARAMS[:4]]
    params[2].extra_args = {"fails_at": 5}
    num_preemptions = llm.stats().num_preemptions_total
    outputs = llm.generate(make_prompts({}, 4), params, use_tqdm=False)
    assert llm.stats().num_preemptions_total == num_preemptions, "nobody's step fails"
    assert outputs[2].error_code == "poison_request"
    assert "LookupError: what this processor needs is not there" in (outputs[2].error or "")
    tokens = find_tokens(outputs)
    assert tokens == [*golden[:2], golden[2][:5], golden[3]]


def make_choice(text: str) -> SamplingParams:
    return SamplingParams(temperature=0.0, structured_outputs=StructuredOutputsParams(choice=[text]))


def test_a_panic_over_a_grammar_is_one_requests(llm: LLM, golden: list[list[int]]) -> None:
    epoch = llm.llm_engine.facts.pids["worker"]
    params = [make_choice(PANICS), *PARAMS[1:6], make_choice("red")]
    outputs = llm.generate(make_prompts({}, 7), params, use_tqdm=False)
    assert outputs[0].error_code == "bad_grammar"
    assert "llguidance panicked: called `Option" in (outputs[0].error or "")
    assert [list(output.outputs[0].token_ids) for output in outputs[1:6]] == golden[1:6]
    assert outputs[6].outputs[0].text == "red"
    assert llm.llm_engine.facts.pids["worker"] == epoch, "it lives on"


@pytest.mark.slow
def test_a_grammar_that_never_compiles_fails_alone(
    golden: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
    monkeypatch.setattr(engines, "CORE_MODULE", "poisoned")
    with LLM(max_model_len=128, max_num_seqs=NUM_REQUESTS, step_timeout_s=3.0) as llm:
        params = [*PARAMS[:3], make_choice(HANGS)]
        outputs = llm.generate(make_prompts({}, 4), params, use_tqdm=False)
    assert outputs[3].error_code == "poison_request"
    assert "step" in (outputs[3].error or "")
    assert [list(output.outputs[0].token_ids) for output in outputs[:3]] == golden[:3]


@pytest.mark.slow  # beside test_hung.py's, which no request is the cause of, and the simulator's
@pytest.mark.parametrize("count", [8, 64])
def test_a_step_that_never_ends_costs_three_workers_and_its_own_request(
    golden: list[list[int]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], count: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
    monkeypatch.setattr(engines, "CORE_MODULE", "poisoned")
    with LLM(max_model_len=128, max_num_seqs=NUM_REQUESTS, step_timeout_s=3.0) as llm:
        outputs = llm.generate(make_prompts({count // 2: NEVER_ENDS}, count), PARAMS[:count], use_tqdm=False)
    assert outputs[count // 2].error_code == "poison_request"
    assert "took longer than" in (outputs[count // 2].error or "")
    tokens = find_tokens(outputs)
    assert tokens[: count // 2] == golden[: count // 2]
    assert tokens[count // 2 + 1 :] == golden[count // 2 + 1 : count]
    assert capfd.readouterr().err.count("; starting another") == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("poisoned", "num_lost"),
    [
        ({3: HANGS_AGAIN}, 4),  # two steps of all, two tests
        ({2: NEVER_ENDS, 5: NEVER_ENDS}, 5),
        ({2: NEVER_ENDS, 5: HANGS_AGAIN}, 6),
    ],
)
def test_hangs_that_come_again_or_are_several_end_their_requests_and_no_engine(
    golden: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    poisoned: dict[int, int],
    num_lost: int,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
    monkeypatch.setattr(engines, "CORE_MODULE", "poisoned")
    with LLM(max_model_len=128, max_num_seqs=NUM_REQUESTS, step_timeout_s=3.0) as llm:
        params = [one.clone() for one in PARAMS[:8]]
        outputs = llm.generate(make_prompts(poisoned, 8), params, use_tqdm=False)
    for i, output in enumerate(outputs):
        if i in poisoned:
            assert output.error_code == "poison_request"
            assert "took longer than" in (output.error or "")
        else:
            assert list(output.outputs[0].token_ids) == golden[i]
    assert capfd.readouterr().err.count("; starting another") == num_lost
