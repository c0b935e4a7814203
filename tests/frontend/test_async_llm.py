"""AsyncLLM: a generator a request, over an engine that answers with scripted tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from frontend_fakes import FakeClient, Script, prompt_ids
from quire.frontend import engine_start
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.options.engine_args import EngineArgs
from quire.frontend.requests import input_processor
from quire.ipc.errors import ConfigError, EngineDeadError, InputError, PromptError, RequestFailedError
from quire.ipc.params.sampling_params import RequestOutputKind, SamplingParams
from quire.ipc.protocol.messages import EngineCoreRequest

DELTA = RequestOutputKind.DELTA


def countdown(request: EngineCoreRequest) -> list[int]:
    return list(range(prompt_ids(request)[-1], 1, -1))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a test's coroutine with a started AsyncLLM and its client."""

    def run_with(
        scenario: Callable[[AsyncLLM, FakeClient], Awaitable[None]], script: Script = countdown
    ) -> None:
        async def main() -> None:
            client = FakeClient(script)

            async def make_client(_config: Any, _on_phase: Any) -> FakeClient:
                return client

            monkeypatch.setattr(engine_start, "make_async_client", make_client)
            async with AsyncLLM.from_engine_args(EngineArgs()) as llm:
                await scenario(llm, client)
            assert client.num_closed == 1

        asyncio.run(asyncio.wait_for(main(), 20))

    return run_with


def test_outputs_stream_until_the_request_has_finished(run: Any):
    async def scenario(llm: AsyncLLM, _client: FakeClient) -> None:
        seen = [
            output async for output in llm.generate([6], SamplingParams(max_tokens=50, output_kind=DELTA))
        ]
        assert [token for output in seen for token in output.outputs[0].token_ids] == [6, 5, 4, 3, 2]
        assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]

    run(scenario)


def test_with_an_engines_seed_requests_have_the_same_ones_in_every_run(monkeypatch: pytest.MonkeyPatch):
    async def collect_seeds(seed: int | None) -> list[int | None]:
        client = FakeClient(countdown)

        async def make_client(_config: Any, _on_phase: Any) -> FakeClient:
            return client

        monkeypatch.setattr(engine_start, "make_async_client", make_client)
        async with AsyncLLM(EngineArgs(seed=seed)) as llm:
            for prompt in ([6], [4]):
                assert [output async for output in llm.generate(prompt)]
        return [request.sampling_params.seed for request in client.engine.added]

    first = asyncio.run(collect_seeds(7))
    assert first == asyncio.run(collect_seeds(7))
    assert len({*first, *asyncio.run(collect_seeds(None))}) == 4


def test_many_requests_run_at_the_same_time(run: Any):
    async def scenario(llm: AsyncLLM, _client: FakeClient) -> None:
        async def last_of(start: int) -> list[int]:
            async for output in llm.generate([start], SamplingParams(max_tokens=50), f"r{start}"):
                if output.finished:
                    return output.outputs[0].token_ids
            raise AssertionError

        results = await asyncio.gather(*(last_of(start) for start in range(3, 40)))
        assert results == [list(range(start, 1, -1)) for start in range(3, 40)]

    run(scenario)


def test_a_slow_reader_gets_merged_deltas_and_nothing_is_lost(run: Any):
    async def scenario(llm: AsyncLLM, client: FakeClient) -> None:
        params = SamplingParams(max_tokens=100, output_kind=DELTA, n=2)
        generator = llm.generate([40], params)
        outputs = [await anext(generator)]
        while client.engine._live:  # the engine finishes while nobody reads
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        outputs += [output async for output in generator]
        assert len(outputs) <= 3
        for index in range(2):
            parts = [part for output in outputs for part in output.outputs if part.index == index]
            assert [token for part in parts for token in part.token_ids] == list(range(40, 1, -1))
            expected = llm.tokenizer.decode(list(range(40, 2, -1)), True) if llm.tokenizer else ""
            assert "".join(part.text for part in parts) == expected
            assert parts[-1].finish_reason == "stop"
        assert outputs[-1].finished

    run(scenario)


def test_a_slow_reader_of_cumulative_outputs_gets_the_latest(run: Any):
    async def scenario(llm: AsyncLLM, client: FakeClient) -> None:
        generator = llm.generate([40], SamplingParams(max_tokens=100))
        await anext(generator)
        while client.engine._live:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        (last,) = [output async for output in generator]
        assert last.outputs[0].token_ids == list(range(40, 1, -1))

    run(scenario)


@pytest.mark.parametrize("way", ["close", "cancel", "break"])
def test_a_reader_that_goes_away_aborts_its_request(run: Any, way: str):
    async def scenario(llm: AsyncLLM, client: FakeClient) -> None:
        started = asyncio.Event()

        async def read() -> None:
            generator = llm.generate([200], SamplingParams(max_tokens=500), "mine")
            async for _ in generator:
                started.set()
                if way == "break":
                    break
                if way == "close":
                    await generator.aclose()
                    return
            await generator.aclose()

        task = asyncio.create_task(read())
        await started.wait()
        if way == "cancel":
            task.cancel()
        await asyncio.wait([task])
        assert client.engine.aborted == [request.request_id for request in client.engine.added]
        last = [output async for output in llm.generate([4], SamplingParams(), "mine")][-1]
        assert last.outputs[0].token_ids == [4, 3, 2]

    run(scenario)


def test_abort_gives_the_reader_a_final_output(run: Any):
    async def scenario(llm: AsyncLLM, _client: FakeClient) -> None:
        generator = llm.generate([200], SamplingParams(max_tokens=500), "mine")
        await anext(generator)
        await llm.abort("mine")
        last = [output async for output in generator][-1]
        assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")

    run(scenario)


def test_an_abort_is_final_though_the_engine_is_silent_and_then_says_more(run: Any):
    async def scenario(llm: AsyncLLM, client: FakeClient) -> None:
        params = SamplingParams(max_tokens=500, output_kind=RequestOutputKind.FINAL_ONLY)
        reading = asyncio.ensure_future(anext(llm.generate([200], params, "whole")))
        other = llm.generate([200], SamplingParams(max_tokens=500))
        for _ in range(3):
            had = (await anext(other)).outputs[0].token_ids
        client.is_paused = True
        await llm.abort("whole")
        last = await reading
        assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
        assert last.outputs[0].token_ids[0] == had[0]
        client.is_paused = False
        assert len((await anext(other)).outputs[0].token_ids) > len(had)
        assert [one.rpartition("-")[0] for one in client.engine.aborted] == ["whole"]
        await other.aclose()

    run(scenario)


def test_bad_input_is_refused_and_disturbs_nobody(run: Any):
    async def scenario(llm: AsyncLLM, client: FakeClient) -> None:
        running = llm.generate([60], SamplingParams(max_tokens=500), "mine")
        await anext(running)
        with pytest.raises(PromptError, match="prompt"):
            await anext(llm.generate("", SamplingParams()))
        with pytest.raises(InputError, match="request_id='mine'"):
            await anext(llm.generate([5], SamplingParams(), "mine"))
        last = [output async for output in running][-1]
        assert last.outputs[0].token_ids == list(range(60, 1, -1))
        assert len(client.engine.added) == 1

    run(scenario)


def test_tenant_and_timeouts_reach_the_engine(run: Any):
    async def scenario(llm: AsyncLLM, client: FakeClient) -> None:
        terms = {"priority": 3, "tenant": "t", "timeout_s": 9.0, "queue_timeout_s": 2.0}
        async for _ in llm.generate([6], SamplingParams(max_tokens=1), **terms):
            pass
        (added,) = client.engine.added
        assert {name: getattr(added.options, name) for name in terms} == terms
        with pytest.raises(InputError, match="queue_timeout_s=0"):
            await anext(llm.generate([6], SamplingParams(), queue_timeout_s=0))

    run(scenario)


def test_a_request_that_the_engine_fails_raises_its_cause(run: Any):
    async def scenario(llm: AsyncLLM, client: FakeClient) -> None:
        generator = llm.generate([60], SamplingParams(max_tokens=500))
        await anext(generator)
        client.engine.failing[client.engine.added[0].request_id] = "bad luck"
        with pytest.raises(RequestFailedError, match="bad luck"):
            async for _ in generator:
                pass
        assert llm.is_running

    run(scenario)


def test_a_dead_engine_raises_in_every_reader_and_every_later_call(run: Any):
    async def scenario(llm: AsyncLLM, client: FakeClient) -> None:
        generators = [llm.generate([200], SamplingParams(max_tokens=500)) for _ in range(3)]
        for generator in generators:
            await anext(generator)
        client.error = EngineDeadError("the core is gone")
        for generator in generators:
            with pytest.raises(EngineDeadError, match="the core is gone"):
                async for _ in generator:
                    pass
        assert llm.errored
        with pytest.raises(EngineDeadError, match="the core is gone"):
            await anext(llm.generate([5], SamplingParams()))

    run(scenario)


def test_shutdown_ends_readers_and_refuses_new_ones(run: Any):
    async def scenario(llm: AsyncLLM, client: FakeClient) -> None:
        generator = llm.generate([200], SamplingParams(max_tokens=500))
        await anext(generator)
        client.is_paused = True
        reader = asyncio.create_task(drain(generator))
        await asyncio.sleep(0)
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await reader
        with pytest.raises(EngineDeadError, match="shut down"):
            await anext(llm.generate([5], SamplingParams()))
        client.num_closed -= 1  # leaving the block closes once more, which is allowed

    async def drain(generator: Any) -> None:
        async for _ in generator:
            pass

    run(scenario)


def test_a_stop_string_is_ended_in_the_engine(run: Any):
    async def scenario(llm: AsyncLLM, client: FakeClient) -> None:
        assert llm.tokenizer is not None
        text = llm.tokenizer.decode([300, 299])
        params = SamplingParams(max_tokens=500, stop=[text], output_kind=DELTA)
        outputs = [output async for output in llm.generate([302], params)]
        assert "".join(output.outputs[0].text for output in outputs) == llm.tokenizer.decode([302, 301])
        assert client.engine.aborted == [client.engine.added[0].request_id]

    run(scenario)


def test_long_texts_are_tokenized_beside_the_event_loop(run: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(input_processor, "_LONG_TEXT", 3)

    async def scenario(llm: AsyncLLM, _client: FakeClient) -> None:
        with pytest.raises(PromptError, match="max_model_len=64"):
            await anext(llm.generate("the fox " * 500, SamplingParams()))

    run(scenario)


def test_bad_arguments_are_refused_without_an_event_loop():
    with pytest.raises(ConfigError, match="max_num_seqs"):
        AsyncLLM.from_engine_args(EngineArgs(max_num_seqs=0))
