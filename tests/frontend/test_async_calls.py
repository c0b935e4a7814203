"""AsyncLLM's calls that compute vectors, over an engine that answers with what it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from frontend_fakes import FakeClient, start_async_llm
from quire.frontend import vector_calls
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.requests.vectors.encoder import EncodedText, TextPair
from quire.ipc.errors import EngineDeadError, InputError, PoolingParamsError, PromptError, RequestFailedError
from quire.ipc.params.pooling_params import PoolingParams
from quire.ipc.params.request_options import RequestOptions
from quire.ipc.protocol.messages import EngineCoreRequest

ALL = ("generate", "embed", "classify", "score", "token_embed", "token_classify")


class CountingClient(FakeClient):
    """Remembers how many requests came in each message."""

    def __init__(self) -> None:
        super().__init__(lambda _: [2], tasks=ALL, embedding_size=3)
        self.counts: list[int] = []

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        self.counts.append(len(requests))
        super().add_requests(requests)


@pytest.fixture
def client() -> CountingClient:
    return CountingClient()


@pytest.fixture
def llm(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, client: CountingClient
) -> Iterator[AsyncLLM]:
    with start_async_llm(runner, monkeypatch, client) as llm:
        yield llm


async def let_calls_be_sent() -> None:
    """Calls that have begun send in the turn of the loop after the one in which they began."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_encode_is_a_generator_of_one_output(llm: AsyncLLM, client: CountingClient) -> None:
    seen = [output async for output in llm.encode([5, 6], PoolingParams(task="classify"), "mine")]
    assert [(one.request_id, one.outputs.data.tolist()) for one in seen] == [("mine", [11, 2, -1])]
    assert client.engine.added[0].pooling_params == PoolingParams(task="classify")


async def test_many_prompts_of_any_kind_are_one_message_and_come_in_order(
    llm: AsyncLLM, client: CountingClient
) -> None:
    prompts = [[5, 6], "a text", EncodedText([7, 8, 9], 2), {"prompt_token_ids": [4]}, TextPair("a", "b")]
    outputs = await llm.pooling.encode_many(prompts, None, "mine", priority=3, tenant="t", timeout_s=9.0)
    assert [one.request_id for one in outputs] == [f"mine-{place}" for place in range(5)]
    assert outputs[2].outputs.data.tolist() == [24, 3, 2]
    assert [sum(one.prompt_token_ids) for one in outputs] == [one.outputs.data[0] for one in outputs]
    assert client.counts == [5]
    options = client.engine.added[0].options
    assert options == RequestOptions(3, tenant="t", timeout_s=9.0)
    assert {id(one.options) for one in client.engine.added} == {id(options)}
    assert await llm.pooling.encode_many([]) == []


async def test_what_could_not_be_sent_is_refused_before_it_is(llm: AsyncLLM, client: CountingClient) -> None:
    for salt in ("\ud800", "x" * 1000, 5):
        with pytest.raises(PromptError, match="cache_salt"):
            await llm.pooling.encode_many([[5]], cache_salt=salt)  # pyright: ignore[reportArgumentType]
    for start in (2**70, -1, 2):
        with pytest.raises(PromptError, match=r"prompts\[0\].type_start"):
            await llm.pooling.encode_many([EncodedText([5], start)])
    assert client.counts == []


async def test_what_takes_long_is_done_beside_the_event_loop(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    to_thread = asyncio.to_thread

    async def count(function: Any, *args: Any) -> Any:
        threads.append(function.__name__)
        return await to_thread(function, *args)

    monkeypatch.setattr(vector_calls.asyncio, "to_thread", count)
    await llm.pooling.encode_many(["short", [5] * 9])
    assert threads == []
    params = PoolingParams(truncate_prompt_tokens=-1)
    for prompts in (["long " * 2000], [[5] * 30_000], [{"prompt": "long " * 2000}], ["x"] * 99):
        await llm.pooling.encode_many(prompts, params)
    assert threads == ["make"] * 4


async def test_the_first_failure_is_raised_and_ends_the_others(llm: AsyncLLM, client: CountingClient) -> None:
    client.is_paused = True
    call = asyncio.create_task(llm.pooling.encode_many([[5], [6], [7]], None, "mine"))
    await let_calls_be_sent()
    sent = [one.request_id for one in client.engine.added]
    client.engine.failing[sent[0]] = "out of luck"
    held = client.engine._live.pop(sent[2])  # pyright: ignore[reportPrivateUsage]
    client.is_paused = False
    with pytest.raises(RequestFailedError, match="out of luck"):
        await call
    assert sent[2] in client.engine.aborted
    assert held[0].request_id == sent[2]
    assert llm.pooling._requests._outputs.request_ids == []  # pyright: ignore[reportPrivateUsage]


async def test_cancelling_a_call_ends_its_requests(llm: AsyncLLM, client: CountingClient) -> None:
    client.is_paused = True
    call = asyncio.create_task(llm.pooling.encode_many([[5], [6]]))
    await let_calls_be_sent()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert sorted(client.engine.aborted) == sorted(one.request_id for one in client.engine.added)


async def test_an_abort_and_the_engines_end_are_raised(llm: AsyncLLM, client: CountingClient) -> None:
    client.is_paused = True
    call = asyncio.create_task(llm.pooling.encode_many([[5]], None, "mine"))
    await let_calls_be_sent()
    await llm.abort("mine")
    client.is_paused = False
    with pytest.raises(RequestFailedError, match="it was aborted, or its time was over"):
        await call
    client.is_paused = True
    call = asyncio.create_task(llm.pooling.encode_many([[5]]))
    await let_calls_be_sent()
    client.error = RuntimeError("gone")
    client.is_paused = False
    with pytest.raises(EngineDeadError, match="gone"):
        await call


async def test_calls_of_one_turn_are_sent_together_each_on_its_own(
    llm: AsyncLLM, client: CountingClient
) -> None:
    begun: list[str] = []
    tokenize = llm.pooling.processor.tokenize

    def note(prompts: Any, *args: Any, **keywords: Any) -> Any:
        begun.append(prompts[0])
        return tokenize(prompts, *args, **keywords)

    llm.pooling.processor.tokenize = note
    texts = ["one", "", "left", "other"]
    calls = [asyncio.create_task(llm.pooling.encode_many([text])) for text in texts]
    await asyncio.sleep(0)
    assert begun == []  # before all that come in this turn are here
    calls[2].cancel()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert begun == ["one", "", "other"]
    assert [type(one) for one in found] == [list, PromptError, asyncio.CancelledError, list]
    assert len(client.engine.added) == 2
    assert client.engine.aborted == []


async def test_an_id_that_is_in_use_leaves_nothing_behind(llm: AsyncLLM, client: CountingClient) -> None:
    client.is_paused = True
    first = asyncio.create_task(llm.pooling.encode_many([[5]], None, "mine-1"))
    await let_calls_be_sent()
    with pytest.raises(InputError, match="request_id='mine-1'"):
        await llm.pooling.encode_many([[5], [6]], None, "mine")
    assert len(client.engine.added) == 1
    client.is_paused = False
    assert len(await first) == 1
    assert len(await llm.pooling.encode_many([[5], [6]], None, "mine")) == 2


async def test_errors_name_the_callers_fields(llm: AsyncLLM, client: CountingClient) -> None:
    for fields, said in (("input", r"input\[1\]=''"), (["first", "second"], "second=''")):
        with pytest.raises(PromptError, match=said):
            await llm.pooling.encode_many(["a", ""], fields=fields)
    with pytest.raises(PromptError, match="prompt=''"):
        await anext(llm.encode(""))
    with pytest.raises(InputError, match="timeout_s=0"):
        await llm.pooling.encode_many(["a"], timeout_s=0)
    assert client.engine.added == []


async def test_a_model_without_vectors_says_what_it_does(llm: AsyncLLM, client: CountingClient) -> None:
    client.facts = msgspec.structs.replace(client.facts, tasks=("generate",))
    with pytest.raises(
        PoolingParamsError, match=r"task='embed': expected one of what this model does: generate"
    ):
        await anext(llm.encode("a"))
