"""The whole core under random histories: whatever happens, requests end once, with their own tokens.

FakeWorker checks every step (budget, rows, block tables, contents of every KV slot that is read); the
machine checks integrity after each event and compares all tokens with an undisturbed run at the end.
"""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from fakes import VOCAB_SIZE, FakeEngine, expected_output, make_config, make_engine, make_request, token_at
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from quire.core.scheduling.step import Step
from quire.core.scheduling.tenant import ClientShare
from quire.ipc.protocol.messages import EngineCoreRequest, ErrorCode, FinishReason
from quire.ipc.protocol.token_ids import encode_token_ids
from quire.ipc.spec.config import SchedulerConfig, SchedulingPolicy

MAX_MODEL_LEN = 64
CLIENTS = (b"one", b"two")


class EngineMachine(RuleBasedStateMachine):
    """Clients, a busy loop and a worker that fails, in any order."""

    @initialize(
        num_blocks=st.integers(8, 20),
        max_num_seqs=st.integers(1, 5),
        budget=st.sampled_from([1, 2, 7, 16, 40, 64, 200]),
        threshold=st.sampled_from([0, 1, 9]),
        chunked=st.booleans(),
        policy=st.sampled_from([*get_args(SchedulingPolicy), "fair"]),
        max_num_queued=st.sampled_from([None, None, None, 3]),
        run_ahead=st.sampled_from([1, 2]),
        caching=st.sampled_from([True, True, False]),
        num_stages=st.sampled_from([1, 1, 2, 3]),
    )
    def start(
        self,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        threshold: int,
        chunked: bool,
        policy: str,
        max_num_queued: int | None,
        run_ahead: int,
        caching: bool,
        num_stages: int,
    ) -> None:
        chunked = chunked or budget < MAX_MODEL_LEN
        scheduler = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            policy=policy,  # pyright: ignore[reportArgumentType]
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=threshold,
            max_num_queued_reqs=max_num_queued,
            run_ahead=run_ahead,
            num_stages=num_stages,
        )
        config = make_config(max_model_len=MAX_MODEL_LEN, enable_prefix_caching=caching, scheduler=scheduler)
        self.engine = FakeEngine(config, num_blocks)
        self.max_num_queued, self.max_num_seqs = max_num_queued, max_num_seqs
        self.num_stages = num_stages
        self.engine.core.set_client(b"one", ClientShare(2.5))
        self.longest_beside_decodes = (threshold or max(1, budget // 4)) if chunked else budget
        self.requests: dict[str, tuple[bytes, EngineCoreRequest]] = {}
        self.aborted: set[str] = set()
        self.removed: dict[str, int] = {}  # request id -> tokens received when its client left
        self.num_left_out: dict[str, int] = {}  # request id -> steps in a row that left out its decode
        self.suspects: set[str] = set()  # were in a step that failed

    # -- what clients do

    @rule(
        client=st.sampled_from(CLIENTS),
        shared=st.sampled_from([0, 7, 8, 9, 16, 24, 40]),
        own=st.lists(st.integers(1, 3), min_size=1, max_size=20),
        max_tokens=st.integers(1, 40),
        min_tokens=st.integers(0, 3),
        num_given=st.integers(0, 2),
        num_stops=st.sampled_from([0, 0, 20, 100]),
        priority=st.integers(0, 2),
        arrival=st.integers(0, 3),
        salt=st.sampled_from(["", "", "", "x"]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        tenant=st.sampled_from(["", "", "a", "b", "c"]),
        timeout_s=st.sampled_from([None, None, 0.5, 9.0]),
        queue_timeout_s=st.sampled_from([None, None, 0.5, 9.0]),
        is_continued=st.booleans(),
    )
    def add(
        self,
        client: bytes,
        shared: int,
        own: list[int],
        max_tokens: int,
        min_tokens: int,
        num_given: int,
        num_stops: int,
        priority: int,
        arrival: int,
        salt: str,
        prompt_logprobs: int | None,
        tenant: str,
        timeout_s: float | None,
        queue_timeout_s: float | None,
        is_continued: bool,
    ) -> None:
        prompt = [5] * shared + own
        packed = encode_token_ids(prompt)
        request = make_request(
            f"r{len(self.requests)}",
            prompt,
            output=[token_at(packed, i) for i in range(num_given)],
            arrival_time=float(arrival),
            eos_token_ids=list(range(0, num_stops, 2)),
            priority=priority,
            cache_salt=salt,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=list(range(VOCAB_SIZE - num_stops, VOCAB_SIZE)),
            prompt_logprobs=prompt_logprobs,
            tenant=tenant,
            timeout_s=timeout_s,
            queue_timeout_s=queue_timeout_s,
        )
        request = msgspec.structs.replace(request, is_continued=is_continued)
        self.requests[request.request_id] = (client, request)
        self.engine.add(request, client)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), client=st.sampled_from(CLIENTS))
    def abort(self, data: st.DataObject, client: bytes) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if self.requests[request_id][0] == client and request_id not in self.engine.finals:
            self.aborted.add(request_id)
        self.engine.core.abort_requests(client, [request_id, "unknown"])
        self.engine.deliver()

    @rule(client=st.sampled_from(CLIENTS))
    def remove_client(self, client: bytes) -> None:
        self.engine.core.remove_client(client)
        for request_id, (owner, _) in self.requests.items():
            if owner == client and request_id not in self.engine.finals:
                self.removed.setdefault(request_id, len(self.engine.tokens[request_id]))

    # -- what the loop and the worker do

    @rule()
    def launch(self) -> None:
        step = self.engine.launch()
        if step is None:
            return
        newest = self.engine.newest_step
        entered = {new.row for new in step.new_requests}
        decodes = {row for row in newest.sampled_rows if row not in entered}
        counts = dict(zip(step.rows, step.num_tokens, strict=True))
        if any(counts[row] == 1 for row in decodes):
            assert max(step.num_tokens) <= max(1, self.longest_beside_decodes)
        self.check_that_no_decode_starves(newest)

    def check_that_no_decode_starves(self, step: Step) -> None:
        """A limited step gives one a turn at the least, and every second one may be somebody else's.

        With several stages only one step of as many has a request's turn.
        """
        in_step = {request.request_id for request in step.requests}
        left_out = {
            request.request_id
            for request in self.engine.scheduler.running
            if request.num_tokens + request.num_placeholders - request.num_computed_tokens == 1
            and request.num_tokens + request.num_placeholders < request.max_total_tokens
            and request.request_id not in in_step
        }
        self.num_left_out = {name: self.num_left_out.get(name, 0) + 1 for name in left_out}
        assert max(self.num_left_out.values(), default=0) <= 2 * self.max_num_seqs * self.num_stages

    @precondition(lambda self: self.engine.executor.pending)
    @rule()
    def finish_step(self) -> None:
        self.engine.finish_step()

    @rule(num_turns=st.integers(1, 8))
    def run_a_while(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.launch()
            self.launch()
            if self.engine.executor.pending:
                self.engine.finish_step()

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0]))
    def let_time_pass(self, seconds: float) -> None:
        core = self.engine.core
        self.engine.clock.advance(seconds)
        core.expire(self.engine.clock.now)
        deadline = core.next_deadline()
        assert deadline is None or deadline > self.engine.clock.now
        self.engine.deliver()

    @precondition(lambda self: self.engine.executor.pending)
    @rule()
    def fail_the_oldest_step(self) -> None:
        self.suspect_those_in_flight()
        self.engine.worker.fail_next = "injected"
        self.engine.finish_step()

    @rule()
    def lose_the_worker(self) -> None:
        self.suspect_those_in_flight()
        self.engine.lose_worker()

    def suspect_those_in_flight(self) -> None:
        for step in self.engine.scheduler.in_flight:
            self.suspects |= {request.request_id for request in step.requests}

    # -- what must hold

    @invariant()
    def nothing_is_wrong_inside(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.core.check_integrity() == []

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run(max_turns=20_000)
        assert self.engine.core.check_integrity() == []
        assert self.engine.core.stats().kv_blocks_used == 0
        for request_id, (_, request) in self.requests.items():
            self.check_end(request_id, request)

    def check_end(self, request_id: str, request: EngineCoreRequest) -> None:
        tokens = self.engine.tokens[request_id]
        expected, reason = expected_output(request, MAX_MODEL_LEN)
        if request_id in self.removed:
            assert request_id not in self.engine.finals
            assert len(tokens) == self.removed[request_id]
            assert tokens == expected[: len(tokens)]
            return
        final = self.engine.finals[request_id]  # exactly one: FakeEngine refuses a second
        if final.finish_reason is FinishReason.ABORT:
            assert request_id in self.aborted or request.options.timeout_s is not None
            assert tokens == expected[: len(tokens)]
        elif final.finish_reason is FinishReason.ERROR:
            if final.error_code is ErrorCode.POISON_REQUEST:
                assert request_id in self.suspects
            elif final.error_code is ErrorCode.OVERLOADED:
                assert self.max_num_queued is not None
                assert not request.output_token_ids
            elif final.error_code is ErrorCode.QUEUE_TIMEOUT:
                assert request.options.queue_timeout_s is not None
                assert not request.output_token_ids
                assert tokens == []
            else:
                assert any(
                    name in (final.error or "") for name in ("max_model_len", "KV blocks", "max_num_seqs")
                )
            assert tokens == expected[: len(tokens)]
        else:
            assert (tokens, final.finish_reason) == (expected, reason)


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestEngineMachine = EngineMachine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_examples_hold() -> None:
    run_state_machine_as_test(
        EngineMachine, settings=settings(EngineMachine.TestCase.settings, max_examples=1000)
    )


@pytest.mark.parametrize(("run_ahead", "policy"), [(1, "fcfs"), (2, "priority"), (1, "fair"), (2, "fair")])
def test_a_pool_so_small_that_requests_are_preempted_changes_no_token(run_ahead: int, policy: str):
    engine = make_engine(24, max_num_seqs=24, max_num_batched_tokens=128, run_ahead=run_ahead, policy=policy)
    requests = [
        make_request(
            f"r{i}",
            [i % 5] * (i * 7 % 30) + [i % 900 + 10] * (1 + i * 11 % 17),  # some share prefixes
            arrival_time=float(i),
            max_tokens=1 + i * 13 % 40,
            priority=i % 3,
            eos_token_ids=[7],
            tenant="abc"[i % 7 % 3],
        )
        for i in range(130)
    ]
    engine.add_all(requests)
    engine.run()
    assert engine.core.counters.num_preemptions > 10
    engine.check_undisturbed(requests)
