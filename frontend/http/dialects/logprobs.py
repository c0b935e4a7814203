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

from ....ipc.params.sampling_params import SamplingParams
from ...logprobs import Logprob, LogprobsList
from ...outputs import RequestOutput
from ...text.detokenizer import Detokenizer
from ...text.tokenizer import Tokenizer
from ..bodies.schema import (
    ChoiceLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

_LOWEST = -9999.0  # vLLM's
_MAX_INLINE = 64  # positions that are made in the event loop
_MAX_INLINE_ENTRIES = 64 * 21  # of all of them: 4 ms
Positions = Sequence[dict[int, Logprob] | None]
# What stands beside each token: so many of the likeliest (-1: all), or these ids.
Top = int | Sequence[int]
T = TypeVar("T")
ALL_SHOWN = SamplingParams(skip_special_tokens=False)

_encode = msgspec.json.Encoder().encode


async def make_beside(output: RequestOutput, make: Callable[[], T]) -> T:
    """`make()`, which is made of `output`: in a thread if that has many logprobs."""
    lists = [output.prompt_logprobs, *(completion.logprobs for completion in output.outputs)]
    num_positions = sum(len(positions) for positions in lists if positions is not None)
    num_entries = sum(positions.num_entries for positions in lists if isinstance(positions, LogprobsList))
    is_short = num_positions <= _MAX_INLINE and num_entries <= _MAX_INLINE_ENTRIES
    return make() if is_short else await asyncio.to_thread(make)


def as_json(value: T) -> T:
    """A value that is only going to be encoded, as its JSON."""
    return cast(T, msgspec.Raw(_encode(value)))


def _choose_form(positions: Positions) -> Callable[[T], T]:
    return as_json if len(positions) > _MAX_INLINE else lambda value: value


def make_chat_logprobs(
    positions: Positions, top: Top, tokenizer: Tokenizer | None = None, as_ids: bool = False
) -> ChoiceLogprobs:
    """One entry a token, with its alternatives. as_ids: tokens are shown as 'token_id:5'.

    tokenizer: for the bytes of a token that is part of a character.
    """
    form: Callable[[TokenLogprob], TokenLogprob] = _choose_form(positions)

    def read_parts(token_id: int, entry: Logprob) -> tuple[str, float, list[int]]:
        text = _name(token_id, entry, as_ids)
        if tokenizer is not None and "\N{REPLACEMENT CHARACTER}" in text:
            data = tokenizer.token_bytes(token_id)
        else:
            data = text.encode()
        return text, _finite(entry.logprob), list(data)

    def make_one(entries: dict[int, Logprob]) -> TokenLogprob:
        sampled = next(iter(entries.items()))  # the token itself
        others = [TopLogprob(*read_parts(*alternative)) for alternative in _choose(entries, top)]
        return TokenLogprob(*read_parts(*sampled), others)

    return ChoiceLogprobs([form(make_one(entries)) for entries in positions if entries])


def make_completion_logprobs(
    positions: Positions, top: Top, find_offset: Callable[[int], int], as_ids: bool = False
) -> CompletionLogprobs:
    """`find_offset` is asked once for each token, in their order. as_ids: tokens are shown as 'token_id:5'.

    The token itself is among the alternatives of each position, as in OpenAI's and vLLM's answers.
    """
    made = CompletionLogprobs([], [], [], [])
    form: Callable[[dict[str, float]], dict[str, float]] = _choose_form(positions)
    for entries in positions:
        if not entries:  # the first token of a prompt: nothing precedes it
            made.text_offset.append(0)
            made.token_logprobs.append(None)
            made.tokens.append("")
            made.top_logprobs.append(None)
            continue
        token_id, sampled = next(iter(entries.items()))
        made.text_offset.append(find_offset(token_id))
        made.token_logprobs.append(_finite(sampled.logprob))
        made.tokens.append(_name(token_id, sampled, as_ids))
        made.top_logprobs.append(form(_make_top(entries, top, as_ids)))
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


def _make_top(entries: dict[int, Logprob], top: Top, as_ids: bool) -> dict[str, float]:
    """Text -> logprob. Ids that were asked for and have the same text are told apart, in vLLM's words."""
    chosen = _choose(entries, top)
    if isinstance(top, int):
        sampled_id = next(iter(entries))
        chosen = [(sampled_id, entries[sampled_id]), *(pair for pair in chosen if pair[0] != sampled_id)]
    made: dict[str, float] = {}
    for token_id, entry in chosen:
        text = _name(token_id, entry, as_ids)
        if text in made and not isinstance(top, int):
            text = _name(token_id, entry, as_ids=True)
        made.setdefault(text, _finite(entry.logprob))
    return made


def _choose(entries: dict[int, Logprob], top: Top) -> list[tuple[int, Logprob]]:
    """The token itself is among the likeliest only if it is likely enough."""
    if not isinstance(top, int):
        return [(token_id, entries[token_id]) for token_id in top]
    ranked = sorted(entries.items(), key=lambda item: -item[1].logprob)
    return ranked if top < 0 else ranked[:top]


def _name(token_id: int, entry: Logprob, as_ids: bool) -> str:
    """How a token is shown: its text, or its id, in vLLM's words."""
    return f"token_id:{token_id}" if as_ids else entry.decoded_token or ""


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


class TextOffsets:
    """Where the tokens of a text begin: behind the characters that those before them have completed.

    A token's own text does not tell: it may be part of a character, be left out, or have lost its space.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: list[int], params: SamplingParams, start: int = 0
    ) -> None:
        """Of what follows the prompt, from `start` on. Without a tokenizer there is no text."""
        self._start = start
        self._text = None if tokenizer is None else Detokenizer(tokenizer, prompt, params)

    def take(self, token_id: int) -> int:
        """The offset of the next token, which is this one."""
        if self._text is None:
            return self._start
        offset = self._start + self._text.num_characters
        self._text.add((token_id,))
        return offset

    def finish(self) -> int:
        """The length of the whole text; call once, after the last token."""
        if self._text is not None:
            self._text.finish()
            return self._start + self._text.num_characters
        return self._start
