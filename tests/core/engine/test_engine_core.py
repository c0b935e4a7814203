"""EngineCore: how requests end, what clients receive, and what happens when things go wrong."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from fakes import (
    VOCAB_SIZE,
    FakeEngine,
    make_engine,
    make_request,
    measure_step_overhead,
    token_at,
)
from msgspec import structs
from quire.ipc.errors import ProtocolError
from quire.ipc.protocol.messages import EngineCoreRequest, ErrorCode, FinishReason
from quire.ipc.protocol.step import ModelRunnerOutput, RowFailure, StepFailed
from quire.ipc.protocol.token_ids import decode_token_ids, encode_token_ids
from quire.ipc.spec.model_spec import RopeConfig


def run_one(request: EngineCoreRequest, **engine: Any) -> FakeEngine:
    made = make_engine(**engine)
    made.add(request)
    made.run()
    assert made.core.check_integrity() == []
    return made


def tokens_of(prompt: list[int], count: int) -> list[int]:
    return [token_at(encode_token_ids(prompt), i) for i in range(count)]


@pytest.mark.parametrize("run_ahead", [1, 2])
def test_a_request_ends_at_its_stop_conditions(run_ahead: int):
    prompt = [1, 2, 3]
    tokens = tokens_of(prompt, 10)
    fourth = tokens[3]
    cases: list[tuple[dict[str, Any], int, FinishReason, int | None]] = [
        ({"max_tokens": 10}, 10, FinishReason.LENGTH, None),
        ({"max_tokens": 10, "eos_token_ids": [fourth]}, 4, FinishReason.STOP, None),
        ({"max_tokens": 10, "stop_token_ids": [fourth]}, 4, FinishReason.STOP, fourth),
        (
            {"max_tokens": 10, "stop_token_ids": [fourth], "eos_token_ids": [fourth]},
            4,
            FinishReason.STOP,
            None,
        ),
        ({"max_tokens": 10, "stop_token_ids": [fourth], "min_tokens": 4}, 4, FinishReason.STOP, fourth),
        ({"max_tokens": 10, "stop_token_ids": [fourth], "min_tokens": 5}, 10, FinishReason.LENGTH, None),
        ({"max_tokens": 4, "stop_token_ids": [fourth]}, 4, FinishReason.STOP, fourth),
        ({"max_tokens": 1}, 1, FinishReason.LENGTH, None),
        ({"max_tokens": None}, 125, FinishReason.LENGTH, None),
    ]
    for params, count, reason, stop_reason in cases:
        engine = run_one(make_request("r", prompt, **params), run_ahead=run_ahead)
        final = engine.finals["r"]
        assert engine.tokens["r"] == tokens_of(prompt, count), params
        assert (final.finish_reason, final.stop_reason) == (reason, stop_reason), params


def test_a_request_that_stops_costs_one_slot_of_the_step_in_flight():
    prompt = [5] * 6
    stop = tokens_of(prompt, 3)[2]
    engine = run_one(make_request("r", prompt, max_tokens=50, stop_token_ids=[stop]), run_ahead=2)
    assert [step.num_tokens for step in engine.steps] == [[6], [1], [1], [1]]
    assert len(engine.tokens["r"]) == 3


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"max_tokens": 3}, FinishReason.LENGTH),
        ({"max_tokens": 2}, FinishReason.LENGTH),
        ({"max_tokens": 9, "eos_token_ids": [30]}, FinishReason.STOP),
        ({"max_tokens": 9, "stop_token_ids": [30]}, FinishReason.STOP),
    ],
)
def test_a_resumed_request_that_is_complete_ends_at_once(params: dict[str, Any], reason: FinishReason):
    engine = make_engine()
    engine.add(make_request("r", [1, 2, 3], output=[10, 20, 30], **params))
    final = engine.finals["r"]
    assert (final.finish_reason, final.start, final.new_token_ids) == (reason, 3, [])
    assert final.stop_reason == (30 if "stop_token_ids" in params else None)
    assert engine.launch() is None
    assert engine.core.check_integrity() == []


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (make_request("r", [1] * 128, max_tokens=1), ["128", "max_model_len=128"]),
        (make_request("r", [1] * 100, output=[1] * 29, max_tokens=50), ["100", "29", "max_model_len=128"]),
        (make_request("r", [1] * 10, max_tokens=None), ["128 tokens", "16 KV blocks", "10", "max_tokens"]),
        (make_request("r", [1] * 50, max_tokens=32), ["82 tokens", "11 KV blocks", "there are 10"]),
        (make_request("r", [], max_tokens=1), ["prompt_token_ids", "empty"]),
        (make_request("r", [1, VOCAB_SIZE], max_tokens=1), ["prompt_token_ids", "997", "0..996"]),
        (make_request("r", [-1], max_tokens=1), ["prompt_token_ids", "-1"]),
        (make_request("r", [1], output=[2000], max_tokens=1), ["output_token_ids", "2000"]),
        (make_request("r", [1], allowed_token_ids=[1, 2000]), ["allowed_token_ids", "2000", "996"]),
        (make_request("r", [1], logit_bias={2000: 1.0}), ["logit_bias", "2000", "996"]),
        (make_request("r", [1], stop_token_ids=[2000]), ["stop_token_ids", "2000", "996"]),
        (make_request("r", [1], eos_token_ids=[2000]), ["eos_token_ids", "2000", "996"]),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(request_: EngineCoreRequest, words: list[str]):
    engine = make_engine(10)
    engine.add(request_)
    final = engine.finals["r"]
    assert final.finish_reason is FinishReason.ERROR
    assert final.error is not None
    for word in words:
        assert word in final.error
    assert not engine.core.num_unfinished
    assert engine.launch() is None


def test_a_request_that_just_fits_runs_to_its_end():
    engine = run_one(make_request("r", [1] * 50, max_tokens=31), num_blocks=10)
    assert len(engine.tokens["r"]) == 31


def test_packed_ids_of_an_odd_length_are_refused():
    engine = make_engine()
    request = make_request("r", [1])
    broken = EngineCoreRequest("r", b"abc", request.sampling_params, 0.0)
    engine.add(broken)
    assert "3 bytes" in (engine.finals["r"].error or "")


def test_a_duplicate_id_is_refused_and_the_live_request_goes_on():
    core = make_engine().core
    core.add_request(b"one", make_request("r", [1], max_tokens=4))
    core.add_request(b"two", make_request("r", [2], max_tokens=4))
    outputs = core.take_outputs()
    assert list(outputs) == [b"two"]
    assert outputs[b"two"][0].finish_reason is FinishReason.ERROR
    assert "'r'" in (outputs[b"two"][0].error or "")
    assert core.num_unfinished == 1
    assert core.check_integrity() == []


def test_outputs_go_to_the_client_of_their_request():
    engine = make_engine()
    engine.core.add_request(b"one", make_request("a", [1], max_tokens=2))
    engine.core.add_request(b"two", make_request("b", [2], max_tokens=2))
    step = engine.core.schedule()
    assert step is not None
    engine.core.update(engine.worker.execute(step))  # pyright: ignore[reportArgumentType]
    outputs = engine.core.take_outputs()
    assert {client: [o.request_id for o in some] for client, some in outputs.items()} == {
        b"one": ["a"],
        b"two": ["b"],
    }
    assert engine.core.take_outputs() == {}


def test_cached_tokens_come_with_the_first_token_and_times_with_the_last():
    engine = make_engine(run_ahead=1)
    engine.add(make_request("a", [1] * 20, max_tokens=3))
    engine.run()
    engine.clock.advance(100.0)
    began = engine.clock.now
    engine.add(make_request("b", [1] * 20, max_tokens=3))
    engine.clock.advance(7.0)
    engine.run()
    first, middle, last = [o for o in engine.outputs if o.request_id == "b"]
    assert (first.num_cached_tokens, middle.num_cached_tokens, last.num_cached_tokens) == (16, None, None)
    assert first.times is None
    assert last.times is not None
    assert last.times.queued == began
    assert last.times.scheduled == last.times.first_token == began + 7.0
    assert last.times.last_token == began + 9.0


def test_an_abort_by_name_ends_the_requests_of_any_client_but_of_one_tenant_only() -> None:
    engine = make_engine()
    for name, client, tenant in (
        ("a", b"one", "x"),
        ("b", b"two", "x"),
        ("c", b"two", "y"),
        ("d", b"two", "x"),
    ):
        names = ["answer", f"own {name}"] if name != "d" else []
        engine.add(make_request(name, [1, 2], max_tokens=50, tenant=tenant, names=names), client)
    engine.turn()
    engine.core.abort_requests(b"three", [], ["own c", "unknown", "c"], "x".__eq__)
    assert engine.core.num_unfinished == 4
    engine.core.abort_requests(b"three", [], ["answer", "own a"], "x".__eq__)
    engine.deliver()
    assert {name: final.finish_reason for name, final in engine.finals.items()} == {
        "a": FinishReason.ABORT,
        "b": FinishReason.ABORT,
    }
    engine.core.abort_requests(b"three", [], ["c", "d"], "x".__eq__)  # as live views call it
    engine.deliver()
    assert set(engine.finals) == {"a", "b", "d"}
    engine.core.abort_requests(b"three", [], ["c"])
    engine.deliver()
    assert set(engine.finals) == {"a", "b", "c", "d"}
    engine.run()
    engine.core.abort_requests(b"three", [], ["answer", "own a"])
    assert engine.core.check_integrity() == []


def test_a_bad_row_fails_alone_and_is_not_shared():
    engine = make_engine()
    engine.worker.bad.add("bad")
    engine.add(make_request("bad", [1] * 20, max_tokens=9))
    engine.add(make_request("good", [2] * 20, max_tokens=9))
    engine.run()
    cause = engine.finals["bad"].error or ""
    assert "the logits are not finite, or allowed_token_ids, bad_words and min_tokens leave no token" in cause
    assert engine.finals["bad"].finish_reason is FinishReason.ERROR
    assert engine.tokens["bad"] == []
    assert len(engine.tokens["good"]) == 9
    engine.worker.bad.clear()
    engine.add(make_request("again", [1] * 20, max_tokens=2))
    engine.run()
    cached = {o.request_id: o.num_cached_tokens for o in engine.outputs if o.num_cached_tokens is not None}
    assert cached["again"] == 0


def test_answers_to_forgotten_steps_are_ignored_and_wrong_ones_are_not():
    engine = make_engine(run_ahead=2)
    engine.add(make_request("a", [1] * 8, max_tokens=9))
    first = engine.launch()
    assert first is not None
    engine.core.failures.lose_worker("the worker was lost")
    engine.core.update(ModelRunnerOutput(first.step_id, first.rows, [5]))
    engine.core.failures.fail_step(StepFailed(first.step_id, "late"))
    assert engine.core.num_unfinished == 1
    second = engine.core.schedule()
    assert second is not None
    with pytest.raises(ProtocolError):
        engine.core.update(ModelRunnerOutput(second.step_id + 1, second.rows, [5]))
    with pytest.raises(ProtocolError):
        engine.core.update(ModelRunnerOutput(second.step_id, [99], [5]))


@pytest.mark.parametrize("is_poison", [False, True])
@pytest.mark.parametrize("run_ahead", [1, 2])
def test_a_row_that_the_worker_fails_ends_with_the_reason_and_the_others_go_on(
    run_ahead: int, is_poison: bool
):
    engine = make_engine(run_ahead=run_ahead)
    engine.add(make_request("good", [1] * 8, max_tokens=9))
    engine.add(make_request("bad", [2] * 8, max_tokens=9))
    assert engine.launch() is not None
    answer = engine.executor.collect()
    assert isinstance(answer, ModelRunnerOutput)
    failure = RowFailure(answer.rows[1], "no way", is_poison)
    engine.core.update(structs.replace(answer, failed_rows=[failure]))
    engine.run()
    final = engine.finals["bad"]
    assert (final.finish_reason, final.error, final.error_code) == (
        FinishReason.ERROR,
        "no way",
        ErrorCode.POISON_REQUEST if is_poison else ErrorCode.BAD_GRAMMAR,
    )
    assert engine.tokens["good"] == tokens_of([1] * 8, 9)
    assert engine.core.check_integrity() == []


def test_under_a_grammar_the_end_of_sequence_counts_before_min_tokens():
    ends: list[FinishReason | None] = []
    for grammar in ("start: /a/", ""):
        fourth = token_at(encode_token_ids([1, 2, 3]), 3, grammar)
        fields: dict[str, Any] = {"max_tokens": 10, "min_tokens": 8, "eos_token_ids": [fourth]}
        finals = run_one(make_request("r", [1, 2, 3], grammar=grammar, **fields)).finals
        ends.append(finals["r"].finish_reason)
    assert ends == [FinishReason.STOP, FinishReason.LENGTH]


def test_logprobs_come_with_their_token():
    engine = run_one(make_request("r", [1, 2, 3], max_tokens=5, logprobs=0))
    for output in engine.outputs:
        assert output.logprobs is not None
        assert decode_token_ids(output.logprobs.token_ids) == output.new_token_ids
        assert array("f", output.logprobs.logprobs).tolist() == [-output.start]


@pytest.mark.parametrize("num_blocks", [64, 7])
def test_prompt_logprobs_come_once_in_order_also_after_preemption(num_blocks: int):
    engine = make_engine(num_blocks, max_num_batched_tokens=8)
    engine.add(make_request("first", [9] * 20, max_tokens=36))
    prompt = list(range(100, 120))
    engine.add(make_request("r", prompt, max_tokens=16, prompt_logprobs=0))
    if num_blocks == 64:
        engine.turn()
        engine.turn()
        engine.turn()
        engine.turn()
        engine.lose_worker()
    engine.run()
    assert engine.core.counters.num_preemptions > 0
    blocks = [o.prompt_logprobs for o in engine.outputs if o.prompt_logprobs is not None]
    tokens = [token_id for block in blocks for token_id in decode_token_ids(block.token_ids)]
    values = [value for block in blocks for value in array("f", block.logprobs)]
    assert tokens == prompt[1:]
    assert values == [float(-position) for position in range(1, 20)]
    assert sum(block.num_positions for block in blocks) == 19


def test_equal_prompts_under_other_salts_share_nothing():
    engine = make_engine()
    for i, salt in enumerate(["", "", "x", "y"]):
        engine.add(make_request(f"r{i}", [1] * 33, max_tokens=2, cache_salt=salt))
        engine.run()
    cached = [o.num_cached_tokens for o in engine.outputs if o.num_cached_tokens is not None]
    assert cached == [0, 32, 0, 0]


def test_dynamic_rope_shares_only_what_is_computed_alike():
    engine = make_engine(rope=RopeConfig(type="dynamic", factor=4.0), max_position_embeddings=24)
    for i, length in enumerate((20, 24, 30, 31, 30)):
        engine.add(make_request(f"r{i}", [1] * length, max_tokens=20))
        engine.run()
    cached = [o.num_cached_tokens for o in engine.outputs if o.num_cached_tokens is not None]
    assert cached == [0, 16, 0, 0, 24]


def test_the_prefix_cache_is_reset_only_when_idle():
    engine = make_engine()
    engine.add(make_request("a", [1] * 33, max_tokens=2))
    engine.launch()
    assert not engine.core.reset_prefix_cache()
    engine.run()
    assert engine.core.reset_prefix_cache()
    engine.add(make_request("b", [1] * 33, max_tokens=2))
    engine.run()
    assert engine.core.counters.prefix_cache_hits == 0


def test_stats_count_what_was_done():
    engine = make_engine()
    engine.add(make_request("a", [1] * 33, max_tokens=3))
    engine.run()
    engine.add(make_request("b", [1] * 33, max_tokens=3))
    engine.turn()
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_clients) == (1, 0, 1)
    assert stats.prefix_cache_queries_total == 66
    assert stats.prefix_cache_hits_total == 32
    assert stats.prompt_tokens_total == 34
    assert stats.generation_tokens_total == 4
    assert stats.num_steps_total == len(engine.steps)
    assert stats.kv_blocks_total == 64
    assert stats.kv_blocks_used == 5


def test_a_wrong_clock_of_a_client_neither_breaks_nor_blocks_the_queue():
    engine = make_engine(max_num_seqs=1)
    for i, arrival in enumerate((float("nan"), float("inf"), 1e18, 0.0)):
        engine.add(make_request(f"r{i}", [i + 1], arrival_time=arrival, max_tokens=2))
    engine.run()
    assert len(engine.finals) == 4
    assert next(iter(engine.finals)) == "r3"


def test_the_integrity_check_sees_a_leaked_block_a_lost_row_and_a_lost_request():
    def broken(attribute: str) -> list[str]:
        engine = make_engine()
        engine.add(make_request("a", [1] * 9, max_tokens=9))
        engine.turn()
        if attribute == "block":
            engine.requests["a"].blocks[0].ids.pop()
        elif attribute == "row":
            engine.scheduler.batch.free_rows.pop()
        elif attribute == "placeholder":
            engine.requests["a"].num_placeholders += 1
        else:
            engine.requests.clear()
        return engine.core.check_integrity()

    for attribute in ("block", "row", "placeholder", "request"):
        assert broken(attribute), attribute


def test_the_step_overhead_can_be_measured():
    figures = measure_step_overhead(num_running=8, num_waiting=20, num_steps=5)
    assert set(figures) == {"schedule_us", "update_us", "total_us", "worst_us"}
    assert all(value > 0 for value in figures.values())
