"""Several engines behind one LLM: the tokens of one, whatever becomes of the others."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time

import pytest
from generated import find_tokens
from quire import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from quire.frontend.daemon import start_daemon, stop_daemon
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.params.sampling_params import RequestOutputKind
from quire.tools.stress.site import own_folders

PROMPTS = [f"Once upon a time there were {number} foxes" for number in range(12)]
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)


def generate(llm: LLM) -> list[list[int]]:
    return find_tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def generate_while_one_is_killed(llm: LLM) -> list[list[int]]:
    """An engine's core and worker are killed when every request has some tokens."""
    engine = llm.llm_engine
    tokens = {f"r{number}": list[int]() for number in range(len(PROMPTS))}
    for name, prompt in zip(tokens, PROMPTS, strict=True):
        engine.add_request(name, prompt, PARAMS)
    victims = dict(engine._client.engines[1].pids)
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        if victims and all(tokens.values()):
            for role in ("core", "worker"):
                os.kill(victims[role], signal.SIGKILL)
            victims = {}
    assert not victims
    return list(tokens.values())


@pytest.mark.usefixtures("fake_worker")
def test_two_engines_say_what_one_says_also_when_one_is_killed() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=10)
    with LLM(max_model_len=512) as llm:
        expected, (found,) = generate(llm), llm.beam_search(PROMPTS[:1], params)
    with LLM(max_model_len=512, data_parallel_size=2) as llm:
        assert generate(llm) == expected
        stats = llm.llm_engine.stats_by_engine()
        assert [stats[index].generation_tokens_total for index in range(2)] == [240, 240]
        assert generate_while_one_is_killed(llm) == expected
        (again,) = llm.beam_search(PROMPTS[:1], params)
        assert [one.tokens for one in again.sequences] == [one.tokens for one in found.sequences]


NUM_STREAMS = 64
MAX_SILENCE_S = 0.5


class Streams:
    """Requests of one AsyncLLM at once: their tokens, and when each part of each came."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.tokens: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
        self._times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]

    async def run(self, victim: int | None = None) -> None:
        """Until all have ended. When each has 10 tokens the engine of the process `victim` is killed."""
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_STREAMS):
                group.create_task(self._read(number))
            if victim is not None:
                while min(map(len, self.tokens)) < 10:
                    await asyncio.sleep(0.005)
                os.kill(victim, signal.SIGKILL)

    async def _read(self, number: int) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=80, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        async for output in self._llm.generate(f"The fox number {number} went", params):
            assert output.error is None
            self.tokens[number] += output.outputs[0].token_ids
            self._times[number].append(time.monotonic())

    @property
    def longest_silence_s(self) -> float:
        """Of any stream, once it has begun."""
        return max(later - at for times in self._times for at, later in itertools.pairwise(times))


async def fail_over(llm: AsyncLLM) -> None:
    async with llm:
        calm, disturbed = Streams(llm), Streams(llm)
        await calm.run()
        await disturbed.run(llm._running_client().engines[1].pids["core"])
    assert disturbed.tokens == calm.tokens
    # A machine that has other things to do is silent by itself.
    assert disturbed.longest_silence_s < MAX_SILENCE_S + calm.longest_silence_s


@pytest.mark.slow
@pytest.mark.parametrize("is_attached", [False, True])
def test_streams_go_on_at_once_when_one_of_two_engines_is_killed(is_attached: bool) -> None:
    if not is_attached:
        asyncio.run(fail_over(AsyncLLM(EngineArgs(max_model_len=256, data_parallel_size=2))))
        return
    config = EngineArgs(max_model_len=256, data_parallel_size=2, scheduling_policy="fair")
    with own_folders():
        start_daemon("failover", config.create_engine_config())
        try:
            asyncio.run(fail_over(AsyncLLM(attach="failover")))
        finally:
            stop_daemon("failover")
