"""POST /v1/completions: one prompt or many, as text or token ids."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, NamedTuple

from starlette.responses import Response

from ....ipc.errors import PromptError
from ....ipc.params.sampling_params import NumLogprobs, SamplingParams
from ...outputs import CompletionOutput, RequestOutput
from ...requests.input_processor import PreparedParams
from ...requests.prompts import find_truncation
from ...text.tokenizer import Tokenizer
from ..bodies.schema import CompletionLogprobs, PromptLogprobs, SamplingFields, TokenId
from ..caller import Caller
from ..errors import ApiError, FieldError
from ..serving import PromptInput, Serving, make_id
from ..stream import Json, cancel_and_wait, respond
from .formats import find_format
from .logprobs import (
    ALL_SHOWN,
    TextOffsets,
    Top,
    as_json,
    join_completion_logprobs,
    make_beside,
    make_completion_logprobs,
    make_prompt_logprobs,
)
from .prompts import decode_prompt, prepare_params, split_prompts, tokenize_prompts
from .route import REFUSED_BY_ALL, PostRoute, is_off
from .sampling import (
    check_logprob_token_ids,
    check_stream_options,
    first_given,
    make_params,
    read_beam_search,
)
from .usage import Chunks, take_last

_MAX_TOKENS = 16  # OpenAI's default; a chat's is what is left of the context
_MAX_SIZE_A_TURN = 20_000  # token ids or characters that are checked and sent in a turn of the event loop
_ECHOED_BYTES, _ID_BYTES = 6, 8  # of a prompt's token in an answer: its text, and its id
_PROMPT_COST = 500  # what each prompt counts beside them


class LogprobsOfChoices:
    """What one request shows of logprobs. Prompts and choices are known by their places."""

    def __init__(
        self, request: CompletionRequest, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self._params, self._tokenizer = params, tokenizer
        self._top: Top | None = request.logprob_token_ids or request.logprobs
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._wants_prompts = request.prompt_logprobs is not None
        self._echoes = bool(request.echo) and self._top is not None
        self._of_prompts: dict[int, PromptLogprobs] = {}
        self._echoed: dict[int, CompletionLogprobs] = {}
        self._offsets: dict[int, TextOffsets] = {}  # by choice

    @property
    def are_wanted(self) -> bool:
        """Whether there are any."""
        return self._top is not None or self._wants_prompts

    def note_prompt(self, place: int, output: RequestOutput, num_echoed: int) -> None:
        """Keep what is said of a prompt, once, for the first chunk of each of its choices.

        num_echoed: characters of it that are shown. A token that was put before it is none of them.
        """
        positions = output.prompt_logprobs
        if positions is None or self.has_prompt(place):
            return
        if self._wants_prompts:
            self._of_prompts[place] = as_json(make_prompt_logprobs(positions))
        if self._echoes:
            num_top = self._top if isinstance(self._top, int) else 0
            first = output.prompt_token_ids[0]
            text = "" if self._tokenizer is None else self._tokenizer.token_text(first)
            offsets = TextOffsets(self._tokenizer, [], ALL_SHOWN)
            offsets.take(first)
            echoed = make_completion_logprobs(positions, num_top, offsets.take, self._as_ids)
            echoed.tokens[0] = f"token_id:{first}" if self._as_ids else text
            num_before = offsets.finish() - num_echoed
            echoed.text_offset[1:] = [max(0, offset - num_before) for offset in echoed.text_offset[1:]]
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
        completion: CompletionOutput,
        *,
        prompt: list[int],
        num_echoed: int,
        is_first: bool,
        is_hidden: bool,
    ) -> CompletionLogprobs | None:
        """Of what is new of a choice of a prompt. num_echoed: characters before its first token.

        text_offset goes on with the tokens: text may lag behind them, while it could become a stop text.
        """
        if self._top is None or completion.logprobs is None:
            return None
        offsets = self._offsets.get(index)
        if offsets is None:
            offsets = self._offsets[index] = TextOffsets(self._tokenizer, prompt, self._params, num_echoed)
        positions = [] if is_hidden else completion.logprobs
        generated = make_completion_logprobs(positions, self._top, offsets.take, self._as_ids)
        echoed = self._echoed.get(place) if is_first else None
        return generated if echoed is None else join_completion_logprobs(echoed, generated)


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. prompt: a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[TokenId]]
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    suffix: str | None = None
    prompt_embeds: Any = None


def _make_params(serving: Serving, request: CompletionRequest) -> SamplingParams:
    """max_tokens 0, which OpenAI allows beside echo, generates one token that is not shown."""
    check_logprob_token_ids(request, request.logprobs is not None, "only with logprobs")
    logprob_fields = {"logprobs": None if request.logprob_token_ids else request.logprobs}
    num_logprobs = 0 if request.logprob_token_ids else request.logprobs
    if request.echo and num_logprobs is not None:
        logprob_fields["prompt_logprobs"] = first_given(request.prompt_logprobs, num_logprobs)
    default = serving.default_sampling.get("max_tokens")
    max_tokens = first_given(request.max_tokens, default, _MAX_TOKENS)
    return make_params(serving, request, max_tokens or 1, **logprob_fields)


async def create_completion(serving: Serving, request: CompletionRequest, caller: Caller) -> Response:
    """Continue prompts. Raises InputErrors and ApiErrors before anything is generated."""
    job = _Job(serving, request, await admit_completion(serving, request, caller), caller)
    if request.stream:
        return serving.stream(job.stream(), job.id)
    body = await job.complete()
    return respond(body, job.id)


class Admitted(NamedTuple):
    """A request that was found good. `prompts` as it has them, `inputs` as the engine takes them."""

    prompts: list[PromptInput]
    inputs: list[PromptInput]
    prepared: PreparedParams


async def admit_completion(serving: Serving, request: CompletionRequest, caller: Caller) -> Admitted:
    """What is checked and tokenized before anything is generated. Raises as `create_completion`."""
    check_stream_options(request)
    search = read_beam_search(request)
    params = _make_params(serving, request)
    max_prompts, facts = serving.options.limits.max_prompts, serving.llm.facts
    truncation = find_truncation(params, facts)
    prompts = split_prompts(request.prompt, max_prompts, facts.max_model_len, truncation)
    serving.check_room(params, caller, len(prompts))
    prepared = await prepare_params(serving, params, caller, find_format(request), search=search)
    inputs = await tokenize_prompts(serving, prompts, request.add_special_tokens, caller, truncation)
    _check_repeated(request, inputs, params.n, serving.options.limits.max_result_bytes)
    if len(prompts) > 1:  # each alone is checked when it is generated from
        serving.check_room(params, caller, len(prompts), sum(map(len, inputs)))
    return Admitted(prompts, inputs, prepared)


def _check_repeated(request: CompletionRequest, inputs: list[PromptInput], n: int, max_bytes: int) -> None:
    """ApiError 413 if prompts, which each of their n choices repeats, were too much for an answer."""
    size_a_token = _ECHOED_BYTES * bool(request.echo) + _ID_BYTES * bool(request.return_token_ids)
    num_bytes = n * size_a_token * sum(map(len, inputs))
    if num_bytes > max_bytes:
        raise ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"n={n} answers repeat their prompts, with {num_bytes} bytes: at most {max_bytes} "
            "(max_result_bytes); lower n, or leave out echo and return_token_ids",
            code="answer_too_large",
        )


class _Job:
    """One request while it runs: its prompts are engine requests that run at the same time."""

    def __init__(
        self, serving: Serving, request: CompletionRequest, admitted: Admitted, caller: Caller
    ) -> None:
        """Of `admitted.inputs` the engine is told each once."""
        prompts, inputs, prepared = admitted
        self._serving = serving
        self._request = request
        self._prepared = prepared
        self._n = prepared.sampling_params.n
        self._caller = caller
        self._num_prompts = len(prompts)
        self._inputs = list(inputs)
        # By prompt: its text, for echo. What may have been cut is read from its token ids.
        echoes = request.echo and prepared.sampling_params.truncate_prompt_tokens is None
        self._echoes = {i: text for i, text in enumerate(prompts) if echoes and isinstance(text, str)}
        self._logprobs = LogprobsOfChoices(request, prepared.sampling_params, serving.llm.tokenizer)
        self._hides_output = request.max_tokens == 0
        model, options = serving.find_name(request.model), request.stream_options
        self._chunks = Chunks("text_completion", make_id("cmpl"), model, options, serving.options)
        self._counts_tokens = not request.stream or self._chunks.has_usage
        self._says_more = self._chunks.always_has_usage or bool(request.return_token_ids)  # in each chunk
        self._has_beginning = bool(request.echo) or request.prompt_logprobs is not None
        # What a choice does not have is null in whole answers, and not there in chunks.
        absent = ("prompt_logprobs", "prompt_token_ids", "token_ids")
        self._absent: Json = {} if request.stream else dict.fromkeys(absent)
        self._begun: set[int] = set()  # choices of which something was sent
        after = b',"logprobs":null,"finish_reason":null,"stop_reason":null'
        self._texts = self._chunks.make_template(b'"text":', after)

    @property
    def id(self) -> str:
        return self._chunks.id

    async def complete(self) -> Json:
        """The whole answer; the first prompt that fails ends the others."""
        tasks: list[asyncio.Future[list[Json]]] = []
        try:
            async for place in self._places():
                tasks.append(asyncio.ensure_future(self._finish_one(place)))
            choices = list(itertools.chain.from_iterable(await asyncio.gather(*tasks)))
        except BaseException:
            await cancel_and_wait(*tasks)
            tasks.clear()  # the error's traceback holds this frame: with its task that would be a cycle
            raise
        return self._chunks.make_whole(choices)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """SSE bytes of all prompts as they come."""
        if self._num_prompts == 1:
            async with aclosing(self._outputs(0)) as outputs:
                async for output in outputs:
                    # Without logprobs there is nothing to wait for: a coroutine a chunk costs 6 % of it.
                    if data := (
                        await self._make_beside(0, output)
                        if self._logprobs.are_wanted
                        else self._make_chunks(0, output)
                    ):
                        yield data
        else:
            async with aclosing(self._merge()) as merged:
                async for place, output in merged:
                    if data := await self._make_beside(place, output):
                        yield data
        yield self._chunks.make_last()

    async def _places(self) -> AsyncGenerator[int, None]:
        """The prompts, as many in a turn of the event loop as it has time to check and send."""
        size = 0
        for place, prompt_input in enumerate(self._inputs):
            yield place
            size += len(prompt_input) + _PROMPT_COST
            if size > _MAX_SIZE_A_TURN:
                size = 0
                await asyncio.sleep(0)

    async def _outputs(self, place: int) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one prompt; PromptErrors name its place in the list."""
        request = self._request
        request_id = f"{self.id}-{place}"
        generate = self._serving.generate(
            request_id, self._take_input(place), self._prepared, self._caller, request, self.id
        )
        try:
            async with aclosing(generate) as outputs:
                async for output in outputs:
                    if self._hides_output:
                        _hide(output)
                    if self._counts_tokens:
                        self._chunks.counter.add(output)
                    if request.echo and place not in self._echoes:
                        ids = output.prompt_token_ids
                        self._echoes[place] = await decode_prompt(self._serving, ids, self._caller)
                    yield output
        except PromptError as error:
            if self._num_prompts == 1 or error.field != "prompt":
                raise
            raise FieldError(f"prompt[{place}]", error.value, error.allowed) from None

    def _take_input(self, place: int) -> PromptInput:
        prompt_input, self._inputs[place] = self._inputs[place], ""
        return prompt_input

    async def _merge(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of all prompts in the order of their arrival."""
        generators = [self._outputs(place) for place in range(self._num_prompts)]
        waiting: dict[asyncio.Future[RequestOutput | None], int] = {}
        try:
            async for place in self._places():
                waiting[asyncio.ensure_future(anext(generators[place], None))] = place
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    place = waiting.pop(task)
                    if (output := task.result()) is None:
                        continue
                    yield place, output
                    waiting[asyncio.ensure_future(anext(generators[place], None))] = place
        finally:
            await cancel_and_wait(*waiting)
            for generator in generators:
                await generator.aclose()

    async def _finish_one(self, place: int) -> list[Json]:
        whole = await take_last(self._outputs(place))
        return await make_beside(whole, lambda: self._make_choices(place, whole))

    def _make_choices(self, place: int, whole: RequestOutput) -> list[Json]:
        self._note_prompt(place, whole)
        return [self._make_choice(place, completion, whole.prompt_token_ids) for completion in whole.outputs]

    async def _make_beside(self, place: int, output: RequestOutput) -> bytes:
        """As `_make_chunks`; many logprobs do not hold up the event loop."""
        return await make_beside(output, lambda: self._make_chunks(place, output))

    def _make_chunks(self, place: int, output: RequestOutput) -> bytes:
        self._note_prompt(place, output)
        chunks = [
            self._make_chunk(place, completion, output.prompt_token_ids) for completion in output.outputs
        ]
        if self._logprobs.has_prompt(place):
            choices = range(place * self._n, (place + 1) * self._n)
            if self._begun.issuperset(choices):  # a stream does not hold them once each choice has had them
                self._logprobs.drop_prompt(place)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _make_chunk(self, place: int, completion: CompletionOutput, prompt: list[int]) -> bytes:
        index = place * self._n + completion.index
        is_plain = completion.finish_reason is None and completion.logprobs is None and not self._says_more
        if is_plain and (not self._has_beginning or index in self._begun):
            return self._texts.make(index, completion.text) if completion.text else b""
        return self._chunks.make_chunk([self._make_choice(place, completion, prompt)])

    def _make_choice(self, place: int, completion: CompletionOutput, prompt: list[int]) -> Json:
        index = place * self._n + completion.index
        is_first = index not in self._begun
        self._begun.add(index)
        echoed = self._echoes[place] if self._request.echo and is_first else ""
        logprobs = self._logprobs.make(
            place,
            index,
            completion,
            prompt=prompt,
            num_echoed=len(echoed),
            is_first=is_first,
            is_hidden=self._hides_output,
        )
        choice: Json = {
            "index": index,
            "text": echoed + completion.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            **self._absent,
        }
        if is_first and (of_prompt := self._logprobs.of_prompt(place)) is not None:
            choice["prompt_logprobs"] = of_prompt
        if self._request.return_token_ids:
            choice["token_ids"] = completion.token_ids
            if is_first:
                choice["prompt_token_ids"] = prompt
        return choice

    def _note_prompt(self, place: int, output: RequestOutput) -> None:
        if output.prompt_logprobs is not None:
            self._logprobs.note_prompt(place, output, len(self._echoes.get(place, "")))


def _hide(output: RequestOutput) -> None:
    """max_tokens=0: the token that was generated all the same is not shown and not counted."""
    output.metrics = None
    for completion in output.outputs:
        completion.text = ""
        completion.token_ids = []
        if completion.finish_reason in ("stop", "repetition"):  # because of that token
            completion.finish_reason, completion.stop_reason = "length", None


REFUSED = REFUSED_BY_ALL | {
    "suffix": ("none: filling in the middle is not supported", is_off),
    "prompt_embeds": ("none: a prompt is text or token ids", is_off),
}
ROUTES = [PostRoute("/v1/completions", CompletionRequest, create_completion, "generate", REFUSED)]
