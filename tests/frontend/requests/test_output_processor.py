"""Outputs are merged by position, grouped by request, and every request ends in exactly one final output."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from frontend_fakes import make_facts
from quire.frontend.logprobs import Logprob
from quire.frontend.outputs import RequestOutput
from quire.frontend.requests.input_processor import EngineInput, InputProcessor
from quire.frontend.requests.output_processor import OutputProcessor
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.errors import InputError
from quire.ipc.params.sampling_params import RequestOutputKind, SamplingParams
from quire.ipc.protocol.messages import EngineCoreOutput, FinishReason, LogprobsBlock, RequestTimes

CUMULATIVE, DELTA, FINAL = RequestOutputKind


class Bench:
    """An OutputProcessor with one request, and the position up to which the engine has sent tokens."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Any = "the", **params: Any) -> None:
        self.tokenizer = tokenizer
        self.processor = OutputProcessor(tokenizer)
        maker = InputProcessor(make_facts(), tokenizer)
        self.request: EngineInput = maker.process("r", prompt, SamplingParams(**params), arrival_time=1.0)
        self.taken: list[RequestOutput] = []
        self.processor.add_request(self.request, lambda output: self.taken.append(output))
        self.ids = [sequence.request_id for sequence in self.request.sequences]
        self.starts = dict.fromkeys(self.ids, 0)
        self.aborts: list[str] = []

    def send(self, tokens: list[int], finish: FinishReason | None = None, child: int = 0, **more: Any) -> Any:
        engine_id = self.ids[child]
        start = more.pop("start", self.starts[engine_id])
        self.starts[engine_id] = start + len(tokens)
        return EngineCoreOutput(engine_id, start, tokens, finish, **more)

    def take(self, *outputs: EngineCoreOutput) -> list[RequestOutput]:
        self.aborts += self.processor.process_outputs(list(outputs)).ids_to_abort
        taken, self.taken = self.taken, []
        return taken


def block(rows: list[list[tuple[int, float]]], ranks: list[int]) -> LogprobsBlock:
    flat = [entry for row in rows for entry in row]
    return LogprobsBlock(
        len(rows),
        len(rows[0]),
        array("i", [token_id for token_id, _ in flat]).tobytes(),
        array("f", [value for _, value in flat]).tobytes(),
        array("i", ranks).tobytes(),
    )


def test_a_gap_fails_the_request_and_ends_it_in_the_engine(byte_level: Tokenizer):
    bench = Bench(byte_level)
    bench.take(bench.send([65]))
    (output,) = bench.take(bench.send([66], start=3))
    assert output.finished
    assert output.outputs[0].finish_reason == "error"
    assert "tokens from 1 to 2 never arrived" in str(output.error)
    assert bench.aborts == bench.ids


def test_unknown_ids_are_ignored(byte_level: Tokenizer):
    bench = Bench(byte_level)
    assert bench.take(EngineCoreOutput("someone else", 0, [1], FinishReason.STOP)) == []
    assert bench.processor.num_unfinished == 1


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("include", [True, False])
def test_the_stop_token_is_in_the_ids_and_not_in_the_text(byte_level: Tokenizer, kind: Any, include: bool):
    fox = byte_level.encode(" fox")
    bench = Bench(byte_level, output_kind=kind, stop_token_ids=[fox[-1]], include_stop_str_in_output=include)
    ids = byte_level.encode(" the") + fox
    outputs = bench.take(bench.send(ids[:-1]), bench.send(ids[-1:], FinishReason.STOP, stop_reason=fox[-1]))
    last = outputs[-1].outputs[0]
    text = "".join(out.outputs[0].text for out in outputs) if kind == DELTA else last.text
    assert text == byte_level.decode(ids if include else ids[:-1])
    assert (last.finish_reason, last.stop_reason) == ("stop", fox[-1])
    assert last.token_ids[-1] == fox[-1]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_stop_string_ends_the_request_here_and_in_the_engine(byte_level: Tokenizer, kind: Any):
    bench = Bench(byte_level, output_kind=kind, stop=["fox"])
    ids = byte_level.encode(" the quick fox over the dog")
    outputs = bench.take(bench.send(ids))
    (output,) = outputs
    completion = output.outputs[0]
    assert completion.text == " the quick "
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "fox")
    assert byte_level.decode(completion.token_ids).endswith("fox")
    assert bench.aborts == bench.ids
    assert bench.take(bench.send([65], FinishReason.ABORT)) == []  # the engine's answer to the abort


def test_a_stop_string_in_the_engines_last_output_needs_no_abort(byte_level: Tokenizer):
    bench = Bench(byte_level, stop=["fox"])
    (output,) = bench.take(bench.send(byte_level.encode(" fox"), FinishReason.LENGTH))
    assert output.outputs[0].finish_reason == "stop"
    assert bench.aborts == []


def test_the_engines_error_is_the_outputs_error(byte_level: Tokenizer):
    bench = Bench(byte_level)
    bench.take(bench.send([65]))
    (output,) = bench.take(bench.send([], FinishReason.ERROR, error="the step raised"))
    assert (output.error, output.outputs[0].finish_reason, output.finished) == (
        "the step raised",
        "error",
        True,
    )
    assert output.outputs[0].token_ids == [65]


def test_metrics_come_with_the_final_output(byte_level: Tokenizer):
    bench = Bench(byte_level)
    (first,) = bench.take(bench.send([65], num_cached_tokens=7))
    assert (first.metrics, first.num_cached_tokens) == (None, 7)
    times = RequestTimes(1.5, 2.0, 3.0, 4.0, 2)
    (last,) = bench.take(bench.send([66], FinishReason.LENGTH, times=times))
    metrics = last.metrics
    assert metrics is not None
    assert (metrics.arrival_time, metrics.queued_ts, metrics.scheduled_ts) == (1.0, 1.5, 2.0)
    assert (metrics.first_token_ts, metrics.last_token_ts) == (3.0, 4.0)
    assert (metrics.num_generation_tokens, metrics.num_preemptions) == (2, 2)
    assert last.num_cached_tokens == 7


def test_a_live_id_cannot_be_used_twice(byte_level: Tokenizer):
    bench = Bench(byte_level)
    with pytest.raises(InputError, match="request_id='r'"):
        bench.processor.add_request(bench.request, bench.taken.append)
    bench.take(bench.send([65], FinishReason.LENGTH))
    bench.processor.add_request(bench.request, bench.taken.append)


def test_forgotten_requests_leave_nothing_and_name_what_to_end(byte_level: Tokenizer):
    bench = Bench(byte_level, n=2)
    bench.take(bench.send([65], FinishReason.LENGTH, child=1))
    assert bench.processor.forget_requests(["r", "unknown"]) == [bench.ids[0]]
    assert bench.processor.num_unfinished == 0
    assert bench.take(bench.send([65])) == []


def test_logprobs_are_dicts_with_the_chosen_token_first(byte_level: Tokenizer):
    bench = Bench(byte_level, logprobs=2, output_kind=CUMULATIVE)
    first = block([[(65, -2.5), (66, -0.5), (67, -1.5)]], [3])
    second = block([[(66, -0.25), (66, -0.25), (67, -3.0)]], [1])
    bench.take(bench.send([65], logprobs=first))
    (output,) = bench.take(bench.send([66], FinishReason.LENGTH, logprobs=second))
    completion = output.outputs[0]
    texts = byte_level.token_text
    assert completion.logprobs == [
        {65: Logprob(-2.5, 3, texts(65)), 66: Logprob(-0.5, 1, texts(66)), 67: Logprob(-1.5, 2, texts(67))},
        {66: Logprob(-0.25, 1, texts(66)), 67: Logprob(-3.0, 2, texts(67))},
    ]
    assert completion.cumulative_logprob == -2.75
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 2
    assert completion.logprobs[-1] == completion.logprobs[1:][0]
    assert "logprob=-2.5" in repr(completion.logprobs)


def test_logprobs_of_ids_have_no_rank_but_the_tokens_own(byte_level: Tokenizer):
    bench = Bench(byte_level, logprob_token_ids=[66, 65])
    sent = block([[(65, -0.5), (66, -3.0), (65, -0.5)]], [2])
    (output,) = bench.take(bench.send([65], FinishReason.LENGTH, logprobs=sent))
    text = byte_level.token_text
    assert output.outputs[0].logprobs == [{65: Logprob(-0.5, 2, text(65)), 66: Logprob(-3.0, None, text(66))}]
    assert output.outputs[0].cumulative_logprob == -0.5


def test_delta_logprobs_and_repeated_ones_line_up_with_their_tokens(byte_level: Tokenizer):
    bench = Bench(byte_level, logprobs=0, output_kind=DELTA)
    rows = [[(token, -token / 64)] for token in (65, 66, 67)]
    bench.take(bench.send([65, 66], logprobs=block(rows[:2], [1, 1])))
    (output,) = bench.take(
        bench.send([65, 66, 67], FinishReason.LENGTH, start=0, logprobs=block(rows, [1, 1, 1]))
    )
    completion = output.outputs[0]
    assert completion.token_ids == [67]
    assert [list(entry or ()) for entry in completion.logprobs or ()] == [[67]]
    assert completion.cumulative_logprob == -(65 + 66 + 67) / 64


def test_logprobs_after_a_stop_string_are_cut_with_their_tokens(byte_level: Tokenizer):
    bench = Bench(byte_level, prompt="a", logprobs=0, stop="A")
    ids = byte_level.encode("xAyz")
    rows = [[(token, -1.0)] for token in ids]
    (output,) = bench.take(bench.send(ids, logprobs=block(rows, [1] * len(ids))))
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) < len(ids)
    assert completion.cumulative_logprob == -float(len(completion.token_ids))


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_prompt_logprobs_begin_with_none_and_come_when_complete(byte_level: Tokenizer, kind: Any):
    bench = Bench(byte_level, prompt=[5, 6, 7], prompt_logprobs=0, output_kind=kind)
    bench.take(bench.send([], prompt_logprobs=block([[(6, -1.0)]], [4])))
    outputs = bench.take(bench.send([65], prompt_logprobs=block([[(7, -2.0)]], [9])))
    outputs += bench.take(bench.send([66], FinishReason.LENGTH))
    with_logprobs = [output for output in outputs if output.prompt_logprobs is not None]
    assert len(with_logprobs) == {CUMULATIVE: 2, DELTA: 1, FINAL: 1}[kind]
    text = byte_level.token_text
    assert with_logprobs[0].prompt_logprobs == [
        None,
        {6: Logprob(-1.0, 4, text(6))},
        {7: Logprob(-2.0, 9, text(7))},
    ]


def test_prompt_logprobs_that_are_sent_again_are_dropped(byte_level: Tokenizer):
    bench = Bench(byte_level, prompt=[5, 6], prompt_logprobs=0)
    bench.take(bench.send([65], prompt_logprobs=block([[(6, -1.0)]], [4])))
    (output,) = bench.take(bench.send([66], FinishReason.LENGTH, prompt_logprobs=block([[(6, -1.0)]], [4])))
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 2


def test_deltas_wait_for_the_logprobs_of_a_prompt_that_the_first_sequence_scores(byte_level: Tokenizer):
    bench = Bench(byte_level, prompt=[5, 6], prompt_logprobs=0, n=2, output_kind=DELTA)
    assert bench.take(bench.send([65], child=1)) == []
    assert bench.take(bench.send([66], FinishReason.LENGTH, child=1)) == []
    assert bench.take(bench.send([], prompt_logprobs=block([[(6, -1.0)]], [4]))) == []
    (both,) = bench.take(bench.send([67]))
    assert [(one.index, one.token_ids) for one in both.outputs] == [(0, [67]), (1, [65, 66])]
    assert both.outputs[1].finish_reason == "length"
    assert len(both.prompt_logprobs or []) == 2
    (last,) = bench.take(bench.send([68], FinishReason.LENGTH))
    assert last.finished
    assert last.prompt_logprobs is None


def test_a_prompt_of_one_token_has_logprobs_of_none_only(byte_level: Tokenizer):
    bench = Bench(byte_level, prompt=[5], prompt_logprobs=0)
    (output,) = bench.take(bench.send([66], FinishReason.LENGTH))
    assert output.prompt_logprobs == [None]


def test_cumulative_outputs_of_several_sequences_carry_all_of_them(byte_level: Tokenizer):
    bench = Bench(byte_level, n=2, output_kind=CUMULATIVE)
    (first,) = bench.take(bench.send([65], child=1))
    assert [one.index for one in first.outputs] == [1]
    (second,) = bench.take(bench.send([66], child=0))
    assert [(one.index, one.token_ids) for one in second.outputs] == [(0, [66]), (1, [65])]
    (third,) = bench.take(bench.send([67], FinishReason.LENGTH, child=0), bench.send([68], child=1))
    assert [one.token_ids for one in third.outputs] == [[66, 67], [65, 68]]
    assert not third.finished
    (last,) = bench.take(bench.send([], FinishReason.LENGTH, child=1))
    assert last.finished
    assert [one.finish_reason for one in last.outputs] == ["length", "length"]
    assert last.metrics is not None
    assert last.metrics.num_generation_tokens == 4


def test_deltas_of_several_sequences_carry_what_is_new(byte_level: Tokenizer):
    bench = Bench(byte_level, n=2, output_kind=DELTA)
    (both,) = bench.take(bench.send([65], child=0), bench.send([66], child=1), bench.send([67], child=0))
    assert [(one.index, one.token_ids) for one in both.outputs] == [(0, [65, 67]), (1, [66])]
    (one,) = bench.take(bench.send([68], FinishReason.LENGTH, child=1))
    assert [(out.index, out.token_ids) for out in one.outputs] == [(1, [68])]
    (last,) = bench.take(bench.send([], FinishReason.LENGTH, child=0))
    assert last.finished


def test_final_outputs_of_several_sequences_come_together_in_order(byte_level: Tokenizer):
    bench = Bench(byte_level, n=3, output_kind=FINAL)
    for child in (2, 0):
        assert bench.take(bench.send([65 + child], FinishReason.LENGTH, child=child)) == []
    (output,) = bench.take(bench.send([66], FinishReason.LENGTH, child=1))
    assert [one.token_ids for one in output.outputs] == [[65], [66], [67]]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("logprobs", [None, 0])
def test_best_of_returns_the_most_likely_sequences_at_the_end(
    byte_level: Tokenizer, kind: Any, logprobs: Any
):
    bench = Bench(byte_level, n=2, best_of=4, output_kind=kind, logprobs=logprobs)
    outputs: list[RequestOutput] = []
    for child, value in enumerate([-3.0, -1.0, -4.0, -2.0]):
        rows = block([[(65 + child, value)]], [1])
        assert outputs == []
        outputs = bench.take(bench.send([65 + child], FinishReason.LENGTH, child=child, logprobs=rows))
    (output,) = outputs
    assert [(one.index, one.token_ids, one.text) for one in output.outputs] == [
        (0, [66], byte_level.decode([66])),
        (1, [68], byte_level.decode([68])),
    ]
    if logprobs is None:
        assert [(one.cumulative_logprob, one.logprobs) for one in output.outputs] == [(None, None)] * 2
    else:
        assert [one.cumulative_logprob for one in output.outputs] == [-1.0, -2.0]
        assert all(one.logprobs is not None for one in output.outputs)


def test_best_of_prefers_whatever_did_not_fail(byte_level: Tokenizer):
    bench = Bench(byte_level, n=1, best_of=2)
    bench.take(bench.send([], FinishReason.ERROR, child=0, error="why"))
    rows = block([[(65, -9.0)]], [1])
    (output,) = bench.take(bench.send([65], FinishReason.LENGTH, child=1, logprobs=rows))
    assert output.outputs[0].token_ids == [65]
    assert output.error == "why"


def test_without_detokenizing_there_are_ids_and_no_text(byte_level: Tokenizer):
    for tokenizer in (byte_level, None):
        bench = Bench(tokenizer, prompt=[5], detokenize=False, logprobs=0)
        rows = block([[(65, -1.0)]], [1])
        (output,) = bench.take(bench.send([65], FinishReason.LENGTH, logprobs=rows))
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [65])
        assert output.outputs[0].logprobs == [{65: Logprob(-1.0, 1, None)}]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_grouping_and_repeating_deliveries_changes_nothing(byte_level: Tokenizer, kind: Any, seed: int):
    draw = random.Random(seed)
    ids = byte_level.encode(" the quick 😀 brown fox over the lazy café dog")
    stop = draw.choice([[], ["lazy"], ["x o", "dog"]])
    bench = Bench(byte_level, output_kind=kind, stop=stop)
    outputs: list[RequestOutput] = []
    as_taken: list[list[int]] = []  # which later deliveries do not change
    position = 0
    while position < len(ids):
        start = draw.randint(max(0, position - 3), position)
        end = draw.randint(position, min(len(ids), position + 4))
        position = max(position, end)
        finish = FinishReason.LENGTH if position == len(ids) else None
        outputs += bench.take(bench.send(ids[start:end], finish, start=start))
        as_taken += [[*output.outputs[0].token_ids] for output in outputs[len(as_taken) :]]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert bench.processor.num_unfinished == 0
    parts = [output.outputs[0] for output in outputs]
    assert [part.token_ids for part in parts] == as_taken
    text, taken = parts[-1].text, as_taken[-1]
    if kind == DELTA:
        text, taken = "".join(part.text for part in parts), [token for part in as_taken for token in part]
    whole = byte_level.decode(ids)
    cut = min((whole.index(one) for one in stop if one in whole), default=len(whole))
    assert text == whole[:cut]
    assert taken == ids[: len(taken)]
    assert cut < len(byte_level.decode(taken)) or cut == len(whole)
    if kind == CUMULATIVE:
        assert all(text.startswith(part.text) for part in parts)
        assert all(part == taken[: len(part)] for part in as_taken)
    assert kind != FINAL or len(outputs) == 1
