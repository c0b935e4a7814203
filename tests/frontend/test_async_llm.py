"""AsyncLLM: a generator a request, over an engine that answers with scripted tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from frontend_fakes import FakeClient, prompt_ids, start_async_llm, use_client
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
def client() -> FakeClient:
    return FakeClient(countdown)


@pytest.fixture
def llm(runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, client: FakeClient) -> Iterator[AsyncLLM]:
    with start_async_llm(runner, monkeypatch, client) as llm:
        yield llm


async def test_outputs_stream_until_the_request_has_finished(llm: AsyncLLM) -> None:
    seen = [output async for output in llm.generate([6], SamplingParams(max_tokens=50, output_kind=DELTA))]
    assert [token for output in seen for token in output.outputs[0].token_ids] == [6, 5, 4, 3, 2]
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]


async def test_with_an_engines_seed_requests_have_the_same_ones_in_every_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def collect_seeds(seed: int | None) -> list[int | None]:
        client = FakeClient(countdown)
        use_client(monkeypatch, client)
        async with AsyncLLM(EngineArgs(seed=seed)) as llm:
            for prompt in ([6], [4]):
                assert [output async for output in llm.generate(prompt)]
        return [request.sampling_params.seed for request in client.engine.added]

    first = await collect_seeds(7)
    assert first == await collect_seeds(7)
    assert len({*first, *await collect_seeds(None)}) == 4


async def test_many_requests_run_at_the_same_time(llm: AsyncLLM) -> None:
    async def last_of(start: int) -> list[int]:
        async for output in llm.generate([start], SamplingParams(max_tokens=50), f"r{start}"):
            if output.finished:
                return output.outputs[0].token_ids
        raise AssertionError

    results = await asyncio.gather(*(last_of(start) for start in range(3, 40)))
    assert results == [list(range(start, 1, -1)) for start in range(3, 40)]


async def test_a_slow_reader_gets_merged_deltas_and_nothing_is_lost(
    llm: AsyncLLM, client: FakeClient
) -> None:
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


async def test_a_slow_reader_of_cumulative_outputs_gets_the_latest(llm: AsyncLLM, client: FakeClient) -> None:
    generator = llm.generate([40], SamplingParams(max_tokens=100))
    await anext(generator)
    while client.engine._live:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    (last,) = [output async for output in generator]
    assert last.outputs[0].token_ids == list(range(40, 1, -1))


@pytest.mark.parametrize("way", ["close", "cancel", "break"])
async def test_a_reader_that_goes_away_aborts_its_request(
    llm: AsyncLLM, client: FakeClient, way: str
) -> None:
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


async def test_abort_gives_the_reader_a_final_output(llm: AsyncLLM) -> None:
    generator = llm.generate([200], SamplingParams(max_tokens=500), "mine")
    await anext(generator)
    await llm.abort("mine")
    last = [output async for output in generator][-1]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")


async def test_an_abort_is_final_though_the_engine_is_silent_and_then_says_more(
    llm: AsyncLLM, client: FakeClient
) -> None:
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


async def test_bad_input_is_refused_and_disturbs_nobody(llm: AsyncLLM, client: FakeClient) -> None:
    running = llm.generate([60], SamplingParams(max_tokens=500), "mine")
    await anext(running)
    with pytest.raises(PromptError, match="prompt"):
        await anext(llm.generate("", SamplingParams()))
    with pytest.raises(InputError, match="request_id='mine'"):
        await anext(llm.generate([5], SamplingParams(), "mine"))
    last = [output async for output in running][-1]
    assert last.outputs[0].token_ids == list(range(60, 1, -1))
    assert len(client.engine.added) == 1


async def test_tenant_and_timeouts_reach_the_engine(llm: AsyncLLM, client: FakeClient) -> None:
    terms = {"priority": 3, "tenant": "t", "timeout_s": 9.0, "queue_timeout_s": 2.0}
    async for _ in llm.generate([6], SamplingParams(max_tokens=1), **terms):
        pass
    (added,) = client.engine.added
    assert {name: getattr(added.options, name) for name in terms} == terms
    with pytest.raises(InputError, match="queue_timeout_s=0"):
        await anext(llm.generate([6], SamplingParams(), queue_timeout_s=0))


async def test_a_request_that_the_engine_fails_raises_its_cause(llm: AsyncLLM, client: FakeClient) -> None:
    generator = llm.generate([60], SamplingParams(max_tokens=500))
    await anext(generator)
    client.engine.failing[client.engine.added[0].request_id] = "bad luck"
    with pytest.raises(RequestFailedError, match="bad luck"):
        async for _ in generator:
            pass
    assert llm.is_running


async def test_a_dead_engine_raises_in_every_reader_and_every_later_call(
    llm: AsyncLLM, client: FakeClient
) -> None:
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


async def test_a_stop_string_is_ended_in_the_engine(llm: AsyncLLM, client: FakeClient) -> None:
    assert llm.tokenizer is not None
    text = llm.tokenizer.decode([300, 299])
    params = SamplingParams(max_tokens=500, stop=[text], output_kind=DELTA)
    outputs = [output async for output in llm.generate([302], params)]
    assert "".join(output.outputs[0].text for output in outputs) == llm.tokenizer.decode([302, 301])
    assert client.engine.aborted == [client.engine.added[0].request_id]


async def test_long_texts_are_tokenized_beside_the_event_loop(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_processor, "_LONG_TEXT", 3)
    with pytest.raises(PromptError, match="max_model_len=64"):
        await anext(llm.generate("the fox " * 500, SamplingParams()))


def test_bad_arguments_are_refused_without_an_event_loop():
    with pytest.raises(ConfigError, match="max_num_seqs"):
        AsyncLLM.from_engine_args(EngineArgs(max_num_seqs=0))
