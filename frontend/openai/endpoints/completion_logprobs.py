"""Logprobs of a completions request: of its prompts, and of its choices from chunk to chunk."""

from __future__ import annotations

from collections.abc import Callable

from ...outputs import CompletionOutput, RequestOutput
from ..bodies.schema import CompletionLogprobs, CompletionRequest, PromptLogprobs
from .logprobs import (
    Top,
    as_json,
    join_completion_logprobs,
    make_completion_logprobs,
    make_prompt_logprobs,
)


class LogprobsOfChoices:
    """What one request shows of logprobs. Prompts and choices are known by their places."""

    def __init__(self, request: CompletionRequest) -> None:
        self._top: Top | None = request.logprob_token_ids or request.logprobs
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._wants_prompts = request.prompt_logprobs is not None
        self._echoes = bool(request.echo) and self._top is not None
        self._of_prompts: dict[int, PromptLogprobs] = {}
        self._echoed: dict[int, CompletionLogprobs] = {}
        self._offsets: dict[int, int] = {}  # by choice: characters of its tokens so far

    @property
    def are_wanted(self) -> bool:
        """Whether there are any."""
        return self._top is not None or self._wants_prompts

    def note_prompt(self, place: int, output: RequestOutput, token_text: Callable[[int], str]) -> None:
        """Keep what is said of a prompt, once, for the first chunk of each of its choices."""
        positions = output.prompt_logprobs
        if positions is None or self.has_prompt(place):
            return
        if self._wants_prompts:
            self._of_prompts[place] = as_json(make_prompt_logprobs(positions))
        if self._echoes:
            num_top = self._top if isinstance(self._top, int) else 0
            echoed = make_completion_logprobs(positions, num_top, 0, self._as_ids)
            first = output.prompt_token_ids[0]
            text = token_text(first)
            echoed.tokens[0] = f"token_id:{first}" if self._as_ids else text
            echoed.text_offset[1:] = [offset + len(text) for offset in echoed.text_offset[1:]]
            self._echoed[place] = echoed

    def has_prompt(self, place: int) -> bool:
        """Whether something is kept of a prompt."""
        return place in self._echoed or place in self._of_prompts

    def drop_prompt(self, place: int) -> None:
        """Each choice has had it."""
        self._echoed.pop(place, None)
        self._of_prompts.pop(place, None)

    def of_prompt(self, place: int) -> PromptLogprobs | None:
        """As prompt_logprobs asks for them, None if it does not."""
        return self._of_prompts.get(place)

    def make(
        self,
        place: int,
        index: int,
        one: CompletionOutput,
        *,
        num_echoed: int,
        is_first: bool,
        is_hidden: bool,
    ) -> CompletionLogprobs | None:
        """Of what is new of a choice of a prompt. num_echoed: characters before its first token.

        text_offset goes on with the tokens: text may lag behind them, while it could become a stop text.
        """
        if self._top is None or one.logprobs is None:
            return None
        positions = [] if is_hidden else one.logprobs
        own = make_completion_logprobs(
            positions, self._top, self._offsets.get(index, num_echoed), self._as_ids
        )
        if positions and (last := positions[-1]):
            length = len(next(iter(last.values())).decoded_token or "")
            self._offsets[index] = own.text_offset[-1] + length
        echoed = self._echoed.get(place) if is_first else None
        return own if echoed is None else join_completion_logprobs(echoed, own)
