"""A client process of `quire bench fair`: `python -m quire.tools.bench.fair_client NAME`.

Attaches to the daemon NAME and answers each command, a JSON object a line on stdin, with a line on stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time

import msgspec

from ...frontend.async_llm import AsyncLLM
from ...frontend.requests.prompts import Prompt
from ...ipc.params.sampling_params import SamplingParams

PERIOD_S = 0.2  # between the starts of two requests, if the first has ended by then
_FIRST_PLAIN_TOKEN = 16
_LAST_PLAIN_TOKEN = 1000  # every vocabulary has that many


class MeasureFirstTokens(msgspec.Struct, tag=True, frozen=True):
    """Send `num_requests` of this size one after another; answered by FirstTokens."""

    num_requests: int
    prompt_len: int
    output_len: int


class StartFlood(msgspec.Struct, tag=True, frozen=True):
    """Keep `num_requests` of this size alive, until StopFlood; answered by TokenCount once tokens flow."""

    num_requests: int
    prompt_len: int
    output_len: int


class CountTokens(msgspec.Struct, tag=True, frozen=True):
    """Answered by TokenCount."""


class StopFlood(msgspec.Struct, tag=True, frozen=True):
    """Drop every request; answered by TokenCount when they are gone."""


class FirstTokens(msgspec.Struct, tag=True, frozen=True):
    """Seconds from a request's start to its first token, of each request."""

    seconds: list[float]


class TokenCount(msgspec.Struct, tag=True, frozen=True):
    """Tokens that the flood has received, at a monotonic time, and the CPU seconds of this process."""

    num_tokens: int
    at: float
    cpu_s: float


Command = MeasureFirstTokens | StartFlood | CountTokens | StopFlood
Answer = FirstTokens | TokenCount


class FairClient:
    """Answers commands with the requests of one AsyncLLM."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._rng = random.Random()  # prompts that no earlier client has sent
        self._streams: list[asyncio.Task[None]] = []
        self._num_tokens = 0
        self._num_first_tokens = 0

    async def answer(self, command: Command) -> Answer:
        """Do what is asked."""
        match command:
            case MeasureFirstTokens():
                return FirstTokens(await self._measure_first_tokens(command))
            case StartFlood():
                await self._start_flood(command)
            case CountTokens():
                pass
            case StopFlood():
                for stream in self._streams:
                    stream.cancel()
                await asyncio.gather(*self._streams, return_exceptions=True)
                self._streams.clear()
        return TokenCount(self._num_tokens, time.monotonic(), time.process_time())

    async def _measure_first_tokens(self, command: MeasureFirstTokens) -> list[float]:
        seconds: list[float] = []
        for _ in range(command.num_requests):
            began = time.monotonic()
            waited_s: float | None = None
            stream = self._llm.generate(
                self._make_prompt(command.prompt_len), _make_params(command.output_len)
            )
            async for _ in stream:
                waited_s = waited_s or time.monotonic() - began
            assert waited_s is not None, "a request of at least one token ended without one"
            seconds.append(waited_s)
            await asyncio.sleep(max(0.0, began + PERIOD_S - time.monotonic()))
        return seconds

    async def _start_flood(self, command: StartFlood) -> None:
        before = self._num_tokens
        self._streams = [asyncio.create_task(self._stream_on(command)) for _ in range(command.num_requests)]
        while self._num_tokens - before < command.num_requests * command.output_len / 2:
            await asyncio.sleep(0.05)

    async def _stream_on(self, command: StartFlood) -> None:
        params = _make_params(command.output_len)
        while True:
            num_seen = 0
            async with contextlib.aclosing(
                self._llm.generate(self._make_prompt(command.prompt_len), params)
            ) as outputs:
                async for output in outputs:
                    num_now = len(output.outputs[0].token_ids)
                    self._num_tokens += num_now - num_seen
                    num_seen = num_now

    def _make_prompt(self, length: int) -> Prompt:
        ids = [self._rng.randrange(_FIRST_PLAIN_TOKEN, _LAST_PLAIN_TOKEN) for _ in range(length)]
        return {"prompt_token_ids": ids}


def _make_params(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)


async def _serve(name: str) -> None:
    decoder, encoder = msgspec.json.Decoder(Command), msgspec.json.Encoder()
    async with AsyncLLM(attach=name) as llm:
        client = FairClient(llm)
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            sys.stdout.buffer.write(encoder.encode(await client.answer(decoder.decode(line))) + b"\n")
            sys.stdout.buffer.flush()
        await client.answer(StopFlood())


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
