"""Token counts of an answer, collected from the engine's outputs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from ...outputs import RequestOutput
from ..bodies.schema import CompletionTokensDetails, PromptTokensDetails, StreamOptions, Usage

T = TypeVar("T")


def choose_usage(options: StreamOptions | None, is_forced: bool) -> tuple[bool, bool]:
    """Whether a stream ends with its usage, and whether each chunk has it so far. is_forced: both, always."""
    if is_forced:
        return True, True
    at_end = options is not None and bool(options.include_usage)
    return at_end, at_end and options is not None and bool(options.continuous_usage_stats)


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

    def __init__(self) -> None:
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
            self._completion_tokens[name] = known + sum(len(one.token_ids) for one in output.outputs)

    def usage(self) -> Usage:
        """The counts so far."""
        prompt, completion = sum(self._prompt_tokens.values()), sum(self._completion_tokens.values())
        cached = PromptTokensDetails(sum(self._cached_tokens.values()))
        usage = Usage(prompt, completion, prompt + completion, cached)
        if self.num_reasoning_tokens is not None:
            usage.completion_tokens_details = CompletionTokensDetails(self.num_reasoning_tokens)
        return usage
