"""The engine's logprobs in the forms of the API. JSON has no infinity, so the lowest logprob is -9999.

An answer can hold hundreds of thousands: `make_beside` makes it in a thread then, and what is made of many
positions is kept as JSON, position by position. Objects of all of them would have the garbage collector hold
up the event loop for as long as it walks over them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import msgspec

from ...logprobs import Logprob
from ...outputs import RequestOutput
from ..bodies.schema import (
    ChoiceLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

_LOWEST = -9999.0  # vLLM's
_MAX_INLINE = 64  # positions that are made in the event loop: 4 ms if each has 20 alternatives
Positions = Sequence[dict[int, Logprob] | None]
T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


async def make_beside(output: RequestOutput, make: Callable[[], T]) -> T:
    """`make()`, which is made of `output`: in a thread if that has logprobs of many positions."""
    num_positions = sum(len(one.logprobs or ()) for one in output.outputs) + len(output.prompt_logprobs or ())
    return make() if num_positions <= _MAX_INLINE else await asyncio.to_thread(make)


def as_json(value: T) -> T:
    """A value that is only going to be encoded, as its JSON."""
    return cast(T, msgspec.Raw(_encode(value)))


def _choose_form(positions: Positions) -> Callable[[T], T]:
    return as_json if len(positions) > _MAX_INLINE else lambda value: value


def make_chat_logprobs(positions: Positions, num_top: int) -> ChoiceLogprobs:
    """One entry a token, with its `num_top` likeliest alternatives."""
    form: Callable[[TokenLogprob], TokenLogprob] = _choose_form(positions)
    return ChoiceLogprobs([form(make_token_logprob(entries, num_top)) for entries in positions if entries])


def make_token_logprob(entries: dict[int, Logprob], num_top: int) -> TokenLogprob:
    """The first entry is the token itself."""
    own = next(iter(entries.values()))
    top = [TopLogprob(*_token_parts(entry)) for entry in _likeliest(entries, num_top)]
    return TokenLogprob(*_token_parts(own), top)


def make_completion_logprobs(positions: Positions, num_top: int, offset: int) -> CompletionLogprobs:
    """`offset`: characters of the choice's text before the first of these tokens."""
    made = CompletionLogprobs([], [], [], [])
    form: Callable[[dict[str, float]], dict[str, float]] = _choose_form(positions)
    for entries in positions:
        made.text_offset.append(offset)
        if not entries:  # the first token of a prompt: nothing precedes it
            made.token_logprobs.append(None)
            made.tokens.append("")
            made.top_logprobs.append(None)
            continue
        own = next(iter(entries.values()))
        made.token_logprobs.append(_finite(own.logprob))
        made.tokens.append(_text_of(own))
        top = {_text_of(entry): _finite(entry.logprob) for entry in _likeliest(entries, num_top)}
        made.top_logprobs.append(form(top))
        offset += len(_text_of(own))
    return made


def join_completion_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The prompt's and the output's as one."""
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )


def make_prompt_logprobs(positions: Positions) -> PromptLogprobs:
    """vLLM's form: token id -> entry, for each token of the prompt."""
    form: Callable[[dict[str, PromptLogprob]], dict[str, PromptLogprob]] = _choose_form(positions)
    return [form(_make_prompt_entries(entries)) if entries else None for entries in positions]


def _make_prompt_entries(entries: dict[int, Logprob]) -> dict[str, PromptLogprob]:
    return {
        str(token_id): PromptLogprob(_finite(entry.logprob), entry.rank, entry.decoded_token)
        for token_id, entry in entries.items()
    }


def _likeliest(entries: dict[int, Logprob], num_top: int) -> list[Logprob]:
    """The token itself is among them only if it is likely enough; -1 asks for all."""
    ranked = sorted(entries.values(), key=lambda entry: -entry.logprob)
    return ranked if num_top < 0 else ranked[:num_top]


def _token_parts(entry: Logprob) -> tuple[str, float, list[int]]:
    text = _text_of(entry)
    return text, _finite(entry.logprob), list(text.encode())


def _text_of(entry: Logprob) -> str:
    return entry.decoded_token or ""


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
