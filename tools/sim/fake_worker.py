"""FakeWorker and what goes with it: an engine without a device, sockets or time.

FakeWorker honours ipc/protocol/step.py to the letter and checks that the core does: it keeps what is in every
KV slot (a digest of the KV group and of all tokens up to that position) and, for each row of a step and each
group, walks the block table as far as its window reaches and compares. Of a model with recurrent layers it
keeps of which tokens each state slot holds the states, and a row goes on from its own tokens' or not at all.
Its tokens are a hash of (prompt, position), so a lost, doubled or misrouted token shows at once.
"""

from __future__ import annotations

import copy
import itertools
import zlib
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...frontend.requests.beams import Hypothesis, read_candidates
from ...frontend.requests.input_processor import EngineInput
from ...ipc.params.pooling_params import PoolingParams
from ...ipc.params.request_options import OPTION_FIELDS, RequestOptions
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.protocol.messages import EngineCoreRequest, FinishReason, LogprobsBlock, Purpose
from ...ipc.protocol.step import (
    MIN_ROW_WORK_US,
    ModelRunnerOutput,
    NewRequestData,
    RowFailure,
    RowLogprobs,
    RowPooled,
    RowWork,
    SchedulerOutput,
    StepFailed,
)
from ...ipc.protocol.token_ids import count_token_ids, decode_token_ids, encode_token_ids
from ...ipc.protocol.token_lists import drop_packed, pack_token_lists
from ...ipc.spec.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from ...ipc.spec.model_spec import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    PoolingSpec,
    RopeConfig,
    has_dynamic_rope,
)
from ...ipc.spec.recurrent_spec import ShortConvSpec
from .fake_vectors import may_have_hit, pool_chunk

VOCAB_SIZE = 997


def make_config(
    *,
    max_model_len: int = 128,
    block_size: int = 8,
    eos_token_ids: tuple[int, ...] = (),
    enable_prefix_caching: bool = True,
    rope: RopeConfig | None = None,
    max_position_embeddings: int = 2048,
    scheduler: SchedulerConfig | None = None,
    vocab_size: int = VOCAB_SIZE,
    head_size: int = 8,
    pooling: PoolingSpec | None = None,
    is_causal: bool = True,
    kv_windows: tuple[int | None, ...] = (None,),
    num_state_slots: int | None = None,
) -> EngineConfig:
    """A small engine's configuration; the model is never loaded. With state slots a layer is recurrent."""
    attention = AttentionSpec(num_heads=1, num_kv_heads=1, head_size=head_size, is_causal=is_causal)
    recurrent = None if num_state_slots is None else ShortConvSpec(num_channels=16, kernel_size=2)
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=head_size,
        layers=(LayerSpec(attention=attention, recurrent=recurrent, ffn=DenseSpec(intermediate_size=16)),),
        max_position_embeddings=max_position_embeddings,
        rope=rope or RopeConfig(),
        has_logits=is_causal,
        pooling=pooling,
        kv_windows=kv_windows,
    )
    model = ModelConfig(
        model="fake",
        served_model_name="fake",
        tokenizer="fake",
        spec=spec,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
    )
    cache = CacheConfig(
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        num_state_slots=num_state_slots,
    )
    return EngineConfig(model=model, cache=cache, scheduler=scheduler or SchedulerConfig())


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    output: list[int] | None = None,
    arrival_time: float = 0.0,
    eos_token_ids: list[int] | None = None,
    grammar: str = "",
    purpose: Purpose = "",
    pooling_params: PoolingParams | None = None,
    **params: Any,
) -> EngineCoreRequest:
    """A request as a frontend sends it; `params` are fields of RequestOptions and SamplingParams."""
    options = RequestOptions(**{name: params.pop(name) for name in OPTION_FIELDS if name in params})
    sampling = SamplingParams(**{"temperature": 0.0, **params})
    lists = pack_token_lists(sampling, (), VOCAB_SIZE)
    drop_packed(sampling)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=encode_token_ids(prompt),
        sampling_params=sampling,
        arrival_time=arrival_time,
        eos_token_ids=eos_token_ids or [],
        output_token_ids=encode_token_ids(output or []),
        options=options,
        token_lists=lists,
        grammar=grammar,
        purpose=purpose,
        pooling_params=pooling_params,
    )


def token_at(prompt: bytes, position: int, grammar: str = "") -> int:
    """The token that every FakeWorker samples for output `position` of this prompt under this grammar."""
    return zlib.crc32(position.to_bytes(4, "little"), _digest(prompt, grammar)) % VOCAB_SIZE


def _digest(prompt: bytes, grammar: str) -> int:
    return zlib.crc32(grammar.encode(), zlib.crc32(prompt))


def expected_output(request: EngineCoreRequest, max_model_len: int) -> tuple[list[int], FinishReason]:
    """The tokens and the end of an undisturbed run, straight from the definition of stopping."""
    params = request.sampling_params
    tokens = decode_token_ids(request.output_token_ids)
    room = max_model_len - count_token_ids(request.prompt_token_ids)
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    stops = {*request.eos_token_ids, *decode_token_ids(request.token_lists.stop)}
    while True:
        is_forced = bool(request.grammar and tokens) and tokens[-1] in request.eos_token_ids
        if is_forced or (tokens and tokens[-1] in stops and len(tokens) >= params.min_tokens):
            return tokens, FinishReason.STOP
        if len(tokens) >= limit:
            return tokens, FinishReason.LENGTH
        tokens.append(token_at(request.prompt_token_ids, len(tokens), request.grammar))


class FakeClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@dataclass(slots=True)
class FakeRow:
    """One row of the worker: what it knows of a live request."""

    request_id: str
    prompt: bytes
    digest: int  # of prompt and grammar
    num_prompt_tokens: int
    params: SamplingParams
    tokens: array[int]  # prompt + output, the worker's own samples included
    digests: list[int]  # [p]: all tokens up to position p, and what else K and V depend on
    blocks: list[dict[int, int]]  # by KV group: place in the sequence -> block
    ends: list[int]  # by KV group: the place of its next block
    num_computed: int
    pooling_params: PoolingParams | None = None
    state_slot: int | None = None

    def extend_digests(self) -> None:
        """Digests of all known tokens."""
        for position in range(len(self.digests) - 1, len(self.tokens)):
            self.digests.append(hash((self.digests[-1], self.tokens[position])))


@dataclass
class FakeWorker:
    """A worker whose forward pass is bookkeeping. Raises AssertionError when a step breaks the contract.

    verify: check KV contents; off for timing. poisoned: request ids whose presence makes a step fail.
    bad: request ids whose logits are not finite. stuck: those whose grammar cannot be followed.
    fail_next: the cause with which the next step fails.
    """

    config: EngineConfig
    num_blocks: int
    verify: bool = True
    poisoned: set[str] = field(default_factory=set[str])
    bad: set[str] = field(default_factory=set[str])
    stuck: set[str] = field(default_factory=set[str])
    work_us: Mapping[str, int] = field(default_factory=dict[str, int])  # of each token of these requests
    pass_s: float = 0.0  # how long a step takes without that
    fail_next: str | None = None
    rows: dict[int, FakeRow] = field(default_factory=dict[int, FakeRow])
    slots: dict[int, int] = field(default_factory=dict[int, int])  # slot -> digest
    states: dict[int, int] = field(default_factory=dict[int, int])  # state slot -> digest of what it is after
    last_step_id: int = -1
    has_failed: bool = False

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of the KV groups; see `ModelSpec.kv_windows`."""
        return self.config.model.spec.kv_windows

    @property
    def has_kv(self) -> bool:
        """Whether tokens have a place in the cache."""
        return self.config.block_size_bytes > 0

    def reset_rows(self) -> None:
        """Forget all rows; the cache stays."""
        self.rows.clear()
        self.has_failed = False

    def lose(self) -> None:
        """Die and come back with an empty cache."""
        self.reset_rows()
        self.slots.clear()
        self.states.clear()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput | StepFailed:
        """One step: effects in the contract's order, then all writes, then all reads, then samples."""
        assert step.step_id > self.last_step_id, "step ids go up"
        self.last_step_id = step.step_id
        if self.has_failed:
            return StepFailed(step.step_id, "an earlier step failed")
        self._enter(step)
        self._check_shape(step)
        cause, self.fail_next = self.fail_next, None
        failure = self.find_failure(step) if cause is None else StepFailed(step.step_id, cause)
        if failure is not None:
            self.has_failed = True
            self._spoil_states(step)
            return failure
        if self.verify and self.has_kv:
            self._write(step)
            self._read(step)
        if self.verify and self.config.cache.num_state_slots:
            self._recur(step)
        return self._sample(step)

    def find_failure(self, step: SchedulerOutput) -> StepFailed | None:
        """How this step fails, once its requests are in their rows; None if it does not."""
        found = sorted({self.rows[row].request_id for row in step.rows} & self.poisoned)
        return StepFailed(step.step_id, f"poisoned by {found}") if found else None

    def _enter(self, step: SchedulerOutput) -> None:
        for row in step.freed_rows:
            assert self.rows.pop(row, None) is not None, f"row {row} is freed and was not in use"
        for new in step.new_requests:
            assert new.row not in self.rows, f"row {new.row} is entered and still in use"
            assert 0 <= new.row < self.config.scheduler.max_num_seqs
            self.rows[new.row] = self._make_row(new)
            self._check_blocks(self.rows[new.row])
        for row, group, block_ids in step.new_block_ids:
            assert block_ids, "an empty list of new blocks says nothing"
            table = self.rows[row].blocks[group]
            table.update(enumerate(block_ids, self.rows[row].ends[group]))
            self.rows[row].ends[group] += len(block_ids)
            self._check_blocks(self.rows[row])
        for _, source, destination in step.block_copies:
            self._copy_block(source, destination)
        for source, destination in step.state_copies:
            assert source != destination
            assert 0 <= destination < (self.config.cache.num_state_slots or 0)
            self.states[destination] = self.states.get(source, 0)

    def _copy_block(self, source: int, destination: int) -> None:
        size = self.config.cache.block_size
        for offset in range(size):
            if (contents := self.slots.get(source * size + offset)) is not None:
                self.slots[destination * size + offset] = contents

    def _make_row(self, new: NewRequestData) -> FakeRow:
        tokens = array("i")
        tokens.frombytes(new.prompt_token_ids + new.output_token_ids)
        num_prompt = count_token_ids(new.prompt_token_ids)
        spec = self.config.model.spec
        is_stretched = has_dynamic_rope(spec) and num_prompt > spec.max_position_embeddings
        row = FakeRow(
            request_id=new.request_id,
            prompt=new.prompt_token_ids,
            digest=_digest(new.prompt_token_ids, new.grammar),
            num_prompt_tokens=num_prompt,
            params=new.sampling_params,
            tokens=tokens,
            digests=[num_prompt if is_stretched else 0],
            blocks=[dict(enumerate(held.block_ids, held.first)) for held in new.blocks],
            ends=[held.first + len(held.block_ids) for held in new.blocks],
            num_computed=new.num_computed_tokens,
            pooling_params=new.pooling_params,
            state_slot=new.state_slot,
        )
        assert (row.state_slot is not None) == bool(self.config.cache.num_state_slots)
        assert 0 <= row.num_computed < len(tokens), "a prefix hit leaves at least one token to compute"
        if new.pooling_params is not None and row.num_computed:
            assert may_have_hit(new.pooling_params, spec), "nobody has the hidden states of cached tokens"
        return row

    def _check_shape(self, step: SchedulerOutput) -> None:
        scheduler, block_size = self.config.scheduler, self.config.cache.block_size
        assert step.rows, "a step has work"
        assert len(set(step.rows)) == len(step.rows) == len(step.num_tokens)
        assert sum(step.num_tokens) <= scheduler.max_num_batched_tokens, "the token budget"
        for new in step.new_requests:
            assert new.row in step.rows, "a new request computes something"
        for row, count in zip(step.rows, step.num_tokens, strict=True):
            state = self.rows[row]
            end = state.num_computed + count
            assert count >= 1, "a scheduled row computes something"
            assert end <= len(state.tokens), f"{state.request_id} has no token at {end - 1}"
            if self.has_kv:
                assert end <= min(state.ends) * block_size, f"{state.request_id}: no block for {end - 1}"
            elif not self.config.model.spec.is_causal:
                assert count == end == len(state.tokens), "a prompt without KV is computed in one step"
            assert len(state.tokens) <= self.config.model.max_model_len

    def _check_blocks(self, state: FakeRow) -> None:
        assert max(state.ends) <= self.config.max_blocks_per_sequence
        held = [block_id for group in range(len(self.windows)) for block_id in self._list_held(state, group)]
        assert len(set(held)) == len(held)
        assert len(held) <= self.config.max_blocks_per_request
        assert all(0 <= block_id < self.num_blocks for table in state.blocks for block_id in table.values())

    def _list_held(self, state: FakeRow, group: int) -> list[int]:
        """The blocks of which the request may still read or write something."""
        first = self._first_seen(group, state.num_computed) // self.config.cache.block_size
        return [block_id for place, block_id in state.blocks[group].items() if place >= first]

    def _first_seen(self, group: int, position: int) -> int:
        """The first token that the one at `position` sees in layers of the group."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def _write(self, step: SchedulerOutput) -> None:
        written: set[int] = set()
        for row, count in zip(step.rows, step.num_tokens, strict=True):
            state = self.rows[row]
            state.extend_digests()
            for group in range(len(self.windows)):
                for position in range(state.num_computed, state.num_computed + count):
                    slot = self._slot(state, group, position)
                    assert slot not in written, f"slot {slot} is written twice in step {step.step_id}"
                    written.add(slot)
                    self.slots[slot] = hash((state.digests[position + 1], group))

    def _recur(self, step: SchedulerOutput) -> None:
        """Each row goes on from the states in its slot; some states on the way are saved."""
        held = [state.state_slot for state in self.rows.values()]
        saved = [slot for _, _, slot in step.state_saves]
        assert len({*held, *saved}) == len(held) + len(saved), "a state slot has two owners"
        assert {*held, *saved} <= set(range(self.config.cache.num_state_slots or 0))
        counts = dict(zip(step.rows, step.num_tokens, strict=True))
        for row, n, slot in step.state_saves:
            state = self.rows[row]
            assert state.num_computed < n <= state.num_computed + counts[row], "a state that never is"
            state.extend_digests()
            self.states[slot] = state.digests[n]
        for row, count in counts.items():
            state = self.rows[row]
            assert state.state_slot is not None
            state.extend_digests()
            if state.num_computed:
                found, expected = self.states.get(state.state_slot), state.digests[state.num_computed]
                assert found == expected, f"{state.request_id}: states of other tokens"
            self.states[state.state_slot] = state.digests[state.num_computed + count]

    def _spoil_states(self, step: SchedulerOutput) -> None:
        """A step that fails has written what nobody knows."""
        for slot in [self.rows[row].state_slot for row in step.rows] + [save[2] for save in step.state_saves]:
            if slot is not None:
                self.states[slot] = hash(("spoilt", step.step_id))

    def _read(self, step: SchedulerOutput) -> None:
        for row, count in zip(step.rows, step.num_tokens, strict=True):
            state = self.rows[row]
            for group in range(len(self.windows)):
                first = self._first_seen(group, state.num_computed)
                for position in range(first, state.num_computed + count):
                    found = self.slots.get(self._slot(state, group, position))
                    assert found == hash((state.digests[position + 1], group)), (
                        f"step {step.step_id}: {state.request_id} reads other contents at position {position}"
                        f" of group {group}"
                    )

    def _sample(self, step: SchedulerOutput) -> ModelRunnerOutput:
        rows: list[int] = []
        token_ids: list[int] = []
        logprobs: list[RowLogprobs] = []
        pooled: list[RowPooled] = []
        sampled_rows = step.rows if step.sampled_rows is None else step.sampled_rows
        samples = set(sampled_rows)
        for row, count in zip(step.rows, step.num_tokens, strict=True):
            state = self.rows[row]
            start = state.num_computed
            state.num_computed += count
            sample, prompt = None, self._prompt_logprobs(state, start)
            if state.pooling_params is not None:
                assert row not in samples, "a request with pooling_params samples nothing"
                is_complete = row in step.pooled_rows
                assert is_complete == (state.num_computed == len(state.tokens)), "who is pooled"
                params, spec = state.pooling_params, self.config.model.spec
                if data := pool_chunk(state.prompt, params, spec, start, count, is_complete=is_complete):
                    pooled.append(RowPooled(row, data))
                continue
            assert (row in samples) == (state.num_computed == len(state.tokens)), "who samples"
            if row in samples:
                position = len(state.tokens) - state.num_prompt_tokens
                token_id = zlib.crc32(position.to_bytes(4, "little"), state.digest) % VOCAB_SIZE
                rows.append(row)
                token_ids.append(token_id)
                state.tokens.append(token_id)
                if state.params.logprobs is not None:
                    sample = make_logprobs([token_id], position)
                    if state.params.logprobs > 1:
                        sample = make_candidates(state.tokens[:-1], state.params.logprobs)
            if sample is not None or prompt is not None:
                logprobs.append(RowLogprobs(row, sample, prompt))
        assert rows == sampled_rows, "in the order of rows"
        may_be_bad = rows + [entry.row for entry in pooled]
        bad_rows = [row for row in may_be_bad if self.rows[row].request_id in self.bad] if self.bad else []
        stuck = [row for row in rows if self.rows[row].request_id in self.stuck] if self.stuck else []
        work = [(row, self.work_us.get(self.rows[row].request_id, 0)) for row in rows] if self.work_us else []
        return ModelRunnerOutput(
            step.step_id,
            rows,
            token_ids,
            logprobs,
            bad_rows,
            execute_s=self.pass_s + 1e-6 * sum(work_us for _, work_us in work),
            failed_rows=[RowFailure(row, "stuck") for row in stuck],
            pooled=[entry for entry in pooled if entry.row not in bad_rows],
            row_work=[RowWork(row, work_us) for row, work_us in work if work_us >= MIN_ROW_WORK_US],
        )

    def _prompt_logprobs(self, state: FakeRow, start: int) -> LogprobsBlock | None:
        if state.params.prompt_logprobs is None:
            return None
        first, last = start + 1, min(state.num_computed + 1, state.num_prompt_tokens)
        return make_logprobs(state.tokens[first:last].tolist(), first) if first < last else None

    def _slot(self, state: FakeRow, group: int, position: int) -> int:
        block_size = self.config.cache.block_size
        return state.blocks[group][position // block_size] * block_size + position % block_size


def make_logprobs(token_ids: list[int], first_position: int) -> LogprobsBlock:
    """Logprobs of width 1; the value at a position is minus the position, so that order can be checked."""
    count = len(token_ids)
    return LogprobsBlock(
        num_positions=count,
        width=1,
        token_ids=encode_token_ids(token_ids),
        logprobs=array("f", [-(first_position + i) for i in range(count)]).tobytes(),
        ranks=encode_token_ids([1] * count),
    )


def make_candidates(tokens: array[int], count: int) -> LogprobsBlock:
    """The likeliest tokens after these: `count` of them after an entry 0."""
    seed = zlib.crc32(tokens)
    first, step = seed % VOCAB_SIZE, 1 + seed % (VOCAB_SIZE - 1)  # the vocabulary's size is prime
    ids = [(first + i * step) % VOCAB_SIZE for i in range(count)]
    drops = [1 + zlib.crc32(i.to_bytes(4, "little"), seed) % 64 for i in range(count)]
    values = list(itertools.accumulate(-drop / 64 for drop in drops))
    return LogprobsBlock(
        num_positions=1,
        width=1 + count,
        token_ids=encode_token_ids([0, *ids]),
        logprobs=array("f", [0.0, *values]).tobytes(),
        ranks=encode_token_ids([1]),
    )


def find_user_id(request_id: str) -> str:
    """Whose request it is that a beam search has made; a user's id has no underscore here."""
    return request_id.rpartition("_")[2]


def expected_beams(request: EngineInput) -> list[Hypothesis]:
    """What an undisturbed beam search finds on every FakeWorker."""
    assert request.beam_search is not None
    state, prompt = copy.deepcopy(request.beam_search), array("i", request.prompt_token_ids)
    while not state.is_done:
        blocks = [make_candidates(prompt + beam.token_ids, state.num_candidates) for beam in state.running]
        state.advance([read_candidates(block) for block in blocks])
    return state.finished


class FakeExecutor:
    """Hands steps to a worker in order and answers in order, a step being run when its answer is fetched."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.pending: deque[SchedulerOutput] = deque()
        self._resets: set[int] = set()  # ids of the last steps before rows are reset

    def submit(self, step: SchedulerOutput) -> None:
        """Send a step; it runs later."""
        self.pending.append(step)

    def reset_rows(self) -> None:
        """Send ResetRows, which comes after the steps that were sent before."""
        if self.pending:
            self._resets.add(self.pending[-1].step_id)
        else:
            self.worker.reset_rows()

    def collect(self) -> ModelRunnerOutput | StepFailed:
        """The answer to the oldest step."""
        step = self.pending.popleft()
        answer = self.worker.execute(step)
        if step.step_id in self._resets:
            self.worker.reset_rows()
        return answer
