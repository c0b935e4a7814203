"""Every public name of LLM, LLMEngine and AsyncLLM after its end, and of AsyncLLM in another event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from typing import Any

import pytest
from frontend_fakes import FakeClient, use_client
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.client.async_requests import OutputCollector
from quire.frontend.llm import LLM
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.options.engine_args import EngineArgs
from quire.frontend.requests.input_processor import InputProcessor
from quire.ipc.errors import EngineDeadError, WrongEventLoopError
from quire.ipc.params.beam_search import BeamSearchParams
from quire.ipc.params.sampling_params import RequestOutputKind, SamplingParams
from quire.ipc.protocol.messages import FrontendCounts, UtilityMethod

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "generate": ([5],),
    "enqueue": ([5],),
    "chat": ([{"role": "user", "content": "x"}],),
    "add_request": ("x", [5]),
    "add_soon": (deque[Any](), OutputCollector(RequestOutputKind.FINAL_ONLY)),
    "call_each": (UtilityMethod.STATS,),
    "call_client": (lambda client: client.stats(),),
    "abort_request": ("x",),
    "abort": ("x",),
    "prepare_params": (SamplingParams(),),
    "beam_search": ([5], BeamSearchParams(beam_width=2, max_tokens=2)),
    "abort_named": (["x"],),
    "add_counts": (FrontendCounts(1),),
    "embed": ([5],),
    "classify": ([5],),
    "reward": ([5],),
    "encode": ([5],),
    "encode_many": ([[5]],),
    "score": ("x", "y"),
}
# What another engine could do as well, or what has to go through when this one has ended, with the reason.
ANSWERS_AFTER_CLOSE = {
    "from_engine_args",  # makes another one
    "collective_rpc",  # refused in any state
    "apply_model",  # likewise
    "attach",
    "close",
    "shutdown",
    "forget_requests",  # cleans up, whatever has happened
    "leave",  # likewise
    "wait_until_dead",  # says that it has
    "startup",  # how long the start took
    "errored",  # state
    "is_running",
    "is_recovering",
}


def countdown(_request: Any) -> list[int]:
    return [4, 3, 2]


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_client(monkeypatch, FakeClient(countdown))


def public_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_") and name not in ANSWERS_AFTER_CLOSE]


def use(owner: Any, name: str) -> Any:
    """Read a property, or call a method with what it takes."""
    value = getattr(owner, name)
    if name == "add_inputs":
        made = InputProcessor(FakeClient(countdown).facts, None).process("x", [5], SamplingParams())
        return value([made])
    return value(*ARGUMENTS.get(name, ())) if callable(value) else value


async def use_async(owner: AsyncLLM, name: str) -> None:
    result = use(owner, name)
    if inspect.isasyncgen(result):
        async for _ in result:
            pass
    elif inspect.isawaitable(result):
        await result


@pytest.mark.parametrize("name", public_names(LLM))
def test_every_call_of_a_closed_llm_says_so(name: str) -> None:
    llm = LLM(skip_tokenizer_init=True)
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        use(llm, name)


@pytest.mark.parametrize("name", public_names(LLMEngine))
def test_every_call_of_a_closed_engine_says_so(name: str) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(skip_tokenizer_init=True))
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        use(engine, name)


@pytest.mark.parametrize("name", public_names(AsyncLLM))
async def test_every_call_of_an_async_llm_that_was_shut_down_says_so(name: str) -> None:
    llm = AsyncLLM(EngineArgs())
    await llm.start()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await use_async(llm, name)


@pytest.mark.parametrize("name", [*public_names(AsyncLLM), "wait_until_dead"])
def test_every_call_in_another_event_loop_says_so(name: str) -> None:
    llm = AsyncLLM(EngineArgs())
    asyncio.run(llm.start())
    with pytest.raises(WrongEventLoopError, match="which has ended"):
        asyncio.run(use_async(llm, name))
    llm.shutdown()


def test_an_engine_that_has_died_by_itself_still_says_what_it_was() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(skip_tokenizer_init=True))
    client: Any = engine._client
    client.is_paused = True
    engine.add_request("x", [5])
    client.dead = "killed"
    assert engine.has_unfinished_requests()  # so that a loop of steps raises the cause
    assert engine.facts.served_model_name == "fake"
    with pytest.raises(EngineDeadError, match="killed"):
        engine.step()
    engine.close()
