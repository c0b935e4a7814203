"""Requests that answer with a vector, in the core: no neighbour, chunk or accident changes one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fakes import FakeEngine, make_request
from fakes import make_engine as make_any_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.core.scheduling import scheduler
from quire.ipc.params.pooling_params import PoolingParams, PoolingTask
from quire.ipc.protocol.messages import EngineCoreOutput, EngineCoreRequest, ErrorCode, FinishReason
from quire.ipc.spec.config import SchedulingPolicy
from quire.ipc.spec.model_spec import EmbeddingSpec, PoolingSpec
from quire.tools.sim.fake_vectors import expected_pooled

LAST = PoolingSpec(pools=("last",), is_matryoshka=True)
MEAN = PoolingSpec(pools=("mean",))
TASKS: list[PoolingTask] = ["embed", "token_embed"]
POLICIES: list[SchedulingPolicy] = ["fcfs", "priority", "fair"]


def make_engine(
    pooling: PoolingSpec = LAST, *, num_blocks: int = 64, is_causal: bool = True, **scheduler: Any
) -> FakeEngine:
    return make_any_engine(
        num_blocks if is_causal else 0,
        pooling=pooling,
        is_causal=is_causal,
        max_model_len=128 if is_causal else 32,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        enable_chunked_prefill=is_causal,
        **scheduler,
    )


def ask(name: str, num_tokens: int, task: PoolingTask = "embed", **fields: Any) -> EngineCoreRequest:
    params = PoolingParams(task=task, dimensions=fields.pop("dimensions", None))
    prompt = [(7 * i + num_tokens) % 900 for i in range(num_tokens)]
    return make_request(name, prompt, pooling_params=params, **fields)


def answer_of(engine: FakeEngine, name: str) -> bytes:
    return b"".join(one.pooled or b"" for one in engine.outputs if one.request_id == name)


def check_answers(engine: FakeEngine, requests: list[EngineCoreRequest]) -> None:
    for request in requests:
        final = engine.finals[request.request_id]
        assert final.finish_reason is FinishReason.STOP, final.error
        assert answer_of(engine, request.request_id) == expected_pooled(request, engine.config.model.spec)
    assert engine.core.check_integrity() == []


# What comes back.


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("task", ["embed", "token_embed"])
@pytest.mark.parametrize("pooling", [LAST, MEAN])
def test_vectors_come_beside_text_whatever_the_chunks(
    pooling: PoolingSpec, task: PoolingTask, policy: SchedulingPolicy
) -> None:
    engine = make_engine(pooling, policy=policy)
    requests = [ask(f"v{size}", size, task) for size in (1, 2, 31, 32, 33, 65, 128)]
    texts = [make_request(f"t{size}", [size] * size, max_tokens=9) for size in (1, 17, 40)]
    for one in [*texts, *requests]:
        engine.add(one)
    engine.run()
    check_answers(engine, requests)
    assert all(len(engine.tokens[one.request_id]) == 9 for one in texts)


def test_a_vector_comes_with_its_times_and_counts_no_token() -> None:
    engine = make_engine()
    engine.add(ask("a", 5))
    engine.run()
    final = engine.finals["a"]
    assert (final.start, final.new_token_ids, final.num_cached_tokens) == (0, [], 0)
    assert final.times is not None
    metrics = engine.core.metrics()
    assert metrics.stats.generation_tokens_total == 0
    assert metrics.finished_by_kind_total["pooling"] == 1
    assert metrics.histograms["request_prefill_time_seconds"].sum >= 0.0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_without_kv_is_never_split_and_needs_no_block(policy: SchedulingPolicy) -> None:
    engine = make_engine(MEAN, is_causal=False, policy=policy)
    requests = [ask(f"v{place}", size) for place, size in enumerate((20, 20, 12, 32, 1, 31, 5, 4, 3, 9, 1))]
    for one in requests:
        engine.add(one)
    engine.run()
    check_answers(engine, requests)
    assert max(sum(step.num_tokens) for step in engine.steps) == 32
    assert engine.core.stats().kv_blocks_total == 0


def test_only_a_vector_of_the_last_token_reads_the_prefix_cache() -> None:
    cases: list[tuple[PoolingSpec, PoolingTask, int]] = [
        *((LAST, "embed", 32), (LAST, "token_embed", 0)),
        (MEAN, "embed", 0),
    ]
    for pooling, task, num_hits in cases:
        engine = make_engine(pooling)
        engine.add(ask("first", 40, task))
        engine.run()
        engine.add(ask("second", 40, task))
        engine.run()
        assert engine.finals["second"].num_cached_tokens == num_hits
        assert answer_of(engine, "second") == answer_of(engine, "first")


def test_token_wise_answers_share_steps_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    width = 8
    monkeypatch.setattr(scheduler, "MAX_STEP_ANSWER_BYTES", 24 * 4 * width)
    pooling = msgspec.structs.replace(MEAN, is_matryoshka=True)
    engine = make_engine(pooling)
    spec = msgspec.structs.replace(engine.config.model.spec, hidden_size=width)
    model = msgspec.structs.replace(engine.config.model, spec=spec)
    engine = FakeEngine(msgspec.structs.replace(engine.config, model=model), 64)
    requests = [ask(f"v{place}", 20, "token_embed") for place in range(3)]
    for one in requests:
        engine.add(one)
    engine.run()
    check_answers(engine, requests)
    assert [sum(step.num_tokens) for step in engine.steps] == [24, 24, 12]


# Accidents.


@settings(max_examples=60, deadline=None)
@given(data=st.data(), policy=st.sampled_from(POLICIES), is_causal=st.booleans())
def test_accidents_change_no_vector(data: st.DataObject, policy: SchedulingPolicy, is_causal: bool) -> None:
    engine = make_engine(LAST if is_causal else MEAN, num_blocks=20, is_causal=is_causal, policy=policy)
    tasks: st.SearchStrategy[PoolingTask] = st.sampled_from(TASKS)
    longest = 100 if is_causal else 32
    sizes = data.draw(st.lists(st.tuples(st.integers(1, longest), tasks), min_size=1, max_size=8))
    requests = [ask(f"v{place}", *each, tenant=f"{place % 2}") for place, each in enumerate(sizes)]
    texts = [make_request(f"t{place}", [place], max_tokens=40) for place in range(2 if is_causal else 0)]
    for one in [*requests, *texts]:
        engine.add(one)
    before, after = (data.draw(st.lists(st.sampled_from(["turn", "launch"]), max_size=5)) for _ in range(2))
    for accident in [*before, data.draw(st.sampled_from(["fail", "lose"])), *after]:  # two would convict
        match accident:
            case "turn":
                engine.turn()
            case "launch":
                engine.launch()
            case "fail":
                engine.worker.fail_next = "a fault"
            case _:
                engine.lose_worker()
    engine.worker.fail_next = None
    engine.run()
    check_answers(engine, requests)


def test_a_poisonous_vector_fails_alone() -> None:
    engine = make_engine()
    requests = [ask(name, 9) for name in ("a", "b", "c")]
    engine.worker.poisoned.add("b")
    for one in requests:
        engine.add(one)
    engine.run()
    assert engine.finals["b"].error_code is ErrorCode.POISON_REQUEST
    check_answers(engine, [requests[0], requests[2]])


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_a_vector_that_is_not_finite_fails_alone(task: PoolingTask) -> None:
    engine = make_engine()
    requests = [ask(name, 40, task) for name in ("a", "b")]
    engine.worker.bad.add("b")
    for one in requests:
        engine.add(one)
    engine.run()
    final = engine.finals["b"]
    assert (final.error_code, final.error) == (ErrorCode.BAD_VECTOR, "the vector is not finite")
    check_answers(engine, requests[:1])


# What is refused, and what it costs.


@pytest.mark.parametrize(
    ("request_", "part"),
    [
        (
            ask("a", 3, "classify"),
            "task: 'classify', and the model's are generate, embed, token_embed, score",
        ),
        (ask("a", 129), "the prompt has 129 tokens, more than max_model_len=128"),
        (ask("a", 3, dimensions=9), "dimensions: 9, allowed: absent or an integer from 1 to 8"),
        (ask("a", 3, output=[1]), "pooling_params: neither output_token_ids nor a grammar"),
        (msgspec.structs.replace(ask("a", 3), type_start=1), "type_start: 1, and there are no types"),
    ],
)
def test_what_the_model_cannot_do_is_refused(request_: EngineCoreRequest, part: str) -> None:
    assert part in refusal_of(make_engine(), request_)


def test_dimensions_are_refused_without_matryoshka_and_beside_its_list() -> None:
    request = ask("a", 3, dimensions=4)
    assert "dimensions: 4, allowed: absent or 8: this" in refusal_of(make_engine(MEAN), request)
    listed = msgspec.structs.replace(LAST, matryoshka_dimensions=(2, 8))
    assert "dimensions: 4, allowed: absent or one of 2, 8" in refusal_of(make_engine(listed), request)


def test_a_model_without_logits_generates_nothing() -> None:
    refusal = refusal_of(make_engine(MEAN, is_causal=False), make_request("a", [1], max_tokens=1))
    assert refusal == "it generates nothing; its tasks: embed, token_embed, score"


def test_a_second_text_begins_within_the_prompt() -> None:
    engine = make_engine()
    spec = msgspec.structs.replace(engine.config.model.spec, embedding=EmbeddingSpec(num_types=2))
    model = msgspec.structs.replace(engine.config.model, spec=spec)
    engine = FakeEngine(msgspec.structs.replace(engine.config, model=model), 64)
    request = msgspec.structs.replace(ask("a", 3), type_start=4)
    assert "type_start: 4, and there are 0..3, the prompt's length" in refusal_of(engine, request)
    engine.add(msgspec.structs.replace(request, request_id="b", type_start=3))
    engine.run()
    assert engine.steps[-1].new_requests[0].type_start == 3


def refusal_of(engine: FakeEngine, request: EngineCoreRequest) -> str:
    engine.add(request)
    final: EngineCoreOutput = engine.finals[request.request_id]
    assert final.error_code is ErrorCode.REFUSED
    assert final.error is not None
    return final.error


def test_the_answer_counts_in_the_price() -> None:
    engine = make_engine()
    for name, task in zip(("vector", "vectors"), TASKS, strict=True):
        engine.core.add_request(b"c", ask(name, 10, task))
    held = {one.request_id: one.held_bytes for one in engine.requests.values()}
    assert held["vectors"] - held["vector"] == 9 * 8 * 4


@pytest.mark.parametrize(
    ("pooling", "tasks"),
    [
        (PoolingSpec(num_labels=1), ("generate", "classify", "token_classify", "score")),
        (PoolingSpec(num_labels=3), ("generate", "classify", "token_classify")),
        (PoolingSpec(pools=("all",)), ("generate", "token_embed")),
        (PoolingSpec(pools=("cls", "mean")), ("generate", "embed", "score")),
    ],
)
def test_tasks_are_those_of_the_head(pooling: PoolingSpec, tasks: tuple[str, ...]) -> None:
    assert make_engine(pooling).config.model.spec.tasks == tasks
