"""Token counts of an answer, collected from the engine's outputs, and the chunks that tell them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

from ...outputs import RequestOutput
from ..bodies.schema import StreamOptions
from ..options import ServerOptions
from ..stream import DONE, ChunkTemplate, Json, encode_event

T = TypeVar("T")


async def take_last(outputs: AsyncGenerator[T, None]) -> T:
    """The final output, which every request ends in."""
    last: T | None = None
    async with aclosing(outputs):
        async for output in outputs:
            last = output
    assert last is not None, "every request ends in a final output"
    return last


class UsageCounter:
    """Counts over all prompts of one request; outputs may be deltas or whole."""

    def __init__(self, has_prompt_details: bool = True) -> None:
        """has_prompt_details: it is told how much of the prompts was cached; else that is null."""
        self._has_prompt_details = has_prompt_details
        self.num_reasoning_tokens: int | None = None  # of the outputs so far; None: there can be none
        self._prompt_tokens: dict[str, int] = {}
        self._cached_tokens: dict[str, int] = {}
        self._completion_tokens: dict[str, int] = {}

    def add(self, output: RequestOutput) -> None:
        """Take an output. Its final one has the count of every sequence, also of those not returned."""
        name = output.request_id
        self._prompt_tokens[name] = len(output.prompt_token_ids)
        if output.num_cached_tokens is not None:
            self._cached_tokens[name] = output.num_cached_tokens
        if output.finished and output.metrics is not None:
            self._completion_tokens[name] = output.metrics.num_generation_tokens
        else:
            known = self._completion_tokens.get(name, 0)
            self._completion_tokens[name] = known + sum(
                len(completion.token_ids) for completion in output.outputs
            )

    def usage(self) -> Json:
        """The counts so far."""
        prompt, completion = sum(self._prompt_tokens.values()), sum(self._completion_tokens.values())
        details = {"cached_tokens": sum(self._cached_tokens.values())}
        usage: Json = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,  # of every sequence that was generated
            "total_tokens": prompt + completion,
            "prompt_tokens_details": details if self._has_prompt_details else None,
        }
        if self.num_reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning_tokens}
        return usage


class Chunks:
    """An answer that has choices, or the stream of its chunks: what they have beside the choices.

    counter: to be told each output. has_usage: a stream ends with its usage; always_has_usage: each chunk has
    it so far. server: says whether both are forced, whatever the request says.
    """

    def __init__(
        self, kind: str, request_id: str, model: str, options: StreamOptions | None, server: ServerOptions
    ) -> None:
        self.id = request_id
        self.counter = UsageCounter(server.enable_prompt_tokens_details)
        is_forced = server.enable_force_include_usage
        self.has_usage = is_forced or (options is not None and bool(options.include_usage))
        continuous = options is not None and bool(options.continuous_usage_stats)
        self.always_has_usage = is_forced or (self.has_usage and continuous)
        self._head: Json = {"id": request_id, "object": kind, "created": int(time.time()), "model": model}
        self._empty = self._head | {"choices": []} | ({"usage": None} if self.has_usage else {})

    def make_template(self, before: bytes, after: bytes) -> ChunkTemplate:
        """Of chunks in which one choice says one thing, as ChunkTemplate has them."""
        return ChunkTemplate(self._empty, before, after)

    def make_chunk(self, choices: list[Json], **more: Any) -> bytes:
        """A chunk."""
        usage = {"usage": self.counter.usage()} if self.always_has_usage else {}
        return encode_event(self._empty | {"choices": choices} | usage | more)

    def make_last(self) -> bytes:
        """Usage, if it was asked for, and the end."""
        usage = encode_event(self._empty | {"usage": self.counter.usage()}) if self.has_usage else b""
        return usage + DONE

    def make_whole(self, choices: list[Json], **more: Any) -> Json:
        """The whole answer."""
        return self._head | {"choices": choices, "usage": self.counter.usage()} | more
