"""PoolingCalls: those of LLM's calls that compute vectors; AsyncPooling: many prompts of an AsyncLLM."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack, cast

import msgspec

from ..ipc.errors import InputError, RequestFailedError
from ..ipc.params.absent_arguments import check_absent
from ..ipc.params.pooling_params import PoolingParams, PoolingTask
from ..ipc.params.request_options import (
    NO_OPTIONS,
    RequestKeywords,
    RequestOptions,
    read_options,
    read_priorities,
)
from .client.async_requests import AsyncRequests
from .llm_engine import LLMEngine
from .request_batch import RequestBatch, run_batches
from .requests.prompts import ParsedPrompt, Prompt, is_many
from .requests.vectors.outputs import PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from .requests.vectors.processor import PoolingProcessor, PoolingPrompt
from .requests.vectors.scoring import Texts, prepare_scoring
from .requests.vectors.state import PoolingInput

Params = PoolingParams | Sequence[PoolingParams] | None
Pooled = PoolingRequestOutput[PoolingOutput]


class PoolingOptions(TypedDict, total=False):
    """What LLM's calls take that compute vectors of prompts."""

    truncate_prompt_tokens: int | None
    prompt_name: str | None
    prompt: str | None
    use_tqdm: bool | Callable[..., Any]
    priority: Sequence[int] | None


class PoolingCalls:
    """Over one engine; `request_numbers` make ids."""

    def __init__(self, engine: LLMEngine, request_numbers: Iterator[int]) -> None:
        self._engine = engine
        self._request_numbers = request_numbers
        self._processor = PoolingProcessor(engine.facts, engine.tokenizer)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params,
        task: PoolingTask | None,
        *,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[Pooled]:
        """What is pooled of each prompt, in their order. Arguments and errors are LLM's."""
        check_absent(others, PoolingOptions.__annotations__)
        self._engine.check_usable()
        has_many = is_many(prompts)
        many = list(cast(Sequence[Prompt], prompts)) if has_many else [cast(Prompt, prompts)]
        each = self._check_each(params, len(many), task, truncate_prompt_tokens)
        names = [f"prompts[{place}]" for place in range(len(many))] if has_many else ["prompt"]
        before = self._processor.find_prompt(prompt_name, prompt)
        tokenized = self._processor.tokenize(many, each, names, prompt=before)
        return self._run(tokenized, each, priority, use_tqdm)

    def score(
        self,
        data_1: Texts,
        data_2: Texts,
        params: PoolingParams | None,
        *,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[ScoringRequestOutput]:
        """A score for each pair. Arguments and errors are LLM's."""
        self._engine.check_usable()
        merged = _with_truncation(params, truncate_prompt_tokens)
        scoring = prepare_scoring(self._processor, data_1, data_2, merged, instruction=instruction)
        each = [scoring.params] * len(scoring.prompts)
        return scoring.make_scores(self._run(scoring.prompts, each, None, use_tqdm))

    def _check_each(
        self, params: Params, num_prompts: int, task: PoolingTask | None, truncation: int | None
    ) -> list[PoolingParams]:
        if params is None or isinstance(params, PoolingParams):
            merged = _with_truncation(params, truncation)
            return [self._processor.check_params(merged, task)] * num_prompts
        if not isinstance(params, Sequence) or isinstance(params, (str, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError("pooling_params", params, "a PoolingParams, or one for each prompt")
        if len(params) != num_prompts:
            allowed = f"one, or {num_prompts}, one a prompt"
            raise InputError("pooling_params", f"{len(params)} of them", allowed)
        return [self._processor.check_params(_with_truncation(each, truncation), task) for each in params]

    def _run(
        self,
        prompts: Sequence[ParsedPrompt],
        params: Sequence[PoolingParams],
        priority: Sequence[int] | None,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[Pooled]:
        options = read_priorities(priority, len(prompts))
        make, numbers = self._processor.make_input, self._request_numbers
        requests = [make(str(next(numbers)), *parts) for parts in zip(prompts, params, options, strict=True)]
        return run_batches([RequestBatch[Pooled](self._engine, requests)], use_tqdm)


def _with_truncation(params: PoolingParams | None, truncation: int | None) -> PoolingParams | None:
    """`params` with the call's own truncate_prompt_tokens, which wins."""
    if truncation is None:
        return params
    return msgspec.structs.replace(params or PoolingParams(), truncate_prompt_tokens=truncation)


# AsyncPooling: vectors for an asyncio program, of many prompts in one call. Of AsyncLLM's event loop.

_MANY = 32  # prompts, whose requests take about half a millisecond to make


class AsyncPooling:
    """AsyncLLM's calls that compute vectors, over the engine that it has started."""

    def __init__(
        self, processor: PoolingProcessor, requests: AsyncRequests, check_running: Callable[[], object]
    ) -> None:
        """check_running: raises when the engine is gone."""
        self.processor = processor
        self._requests = requests
        self._check_running = check_running
        self._numbers = itertools.count()
        self._waiting: list[_Call] = []  # of this turn of the loop

    async def encode_many(
        self,
        prompts: Sequence[PoolingPrompt],
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        task: PoolingTask | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        fields: str | Sequence[str] = "prompts",
        options: RequestOptions = NO_OPTIONS,
        **keywords: Unpack[RequestKeywords],
    ) -> list[Pooled]:
        """What is pooled of each prompt, in their order; all go to the engine in one message.

        prompts: as for LLM.embed, and TextPair and EncodedText. fields: what they are called in errors, or
        the name of a list of them. Several have ids with their place behind request_id. Cancelling it ends
        them. The rest is as for AsyncLLM.generate. Raises InputErrors, EngineDeadError, and for the first one
        that the engine fails or somebody aborts RequestFailedError; then the others end, too.
        """
        self._check_running()
        checked = self.processor.check_params(pooling_params, task)
        options = read_options(options, **keywords)
        if isinstance(fields, str):
            fields = [f"{fields}[{place}]" for place in range(len(prompts))]
        before = self.processor.find_prompt(prompt_name, prompt)

        def make() -> list[PoolingInput]:
            each = [checked] * len(prompts)
            tokenized = self.processor.tokenize(prompts, each, fields, prompt=before)
            return self._make_inputs(request_id, tokenized, checked, options)

        if not prompts:
            return []
        call = _Call(make, len(prompts))
        if len(prompts) > _MANY or self.processor.takes_long(prompts):
            self._send(call, await asyncio.to_thread(make))
        else:
            self._send_soon(call)
        is_finished = False
        try:
            outputs = await call.future
            is_finished = True
        finally:
            if call.ids:
                self._requests.leave(call.ids, is_finished, call)
        return [outputs[request_id] for request_id in call.ids]

    def _make_inputs(
        self,
        request_id: str | None,
        prompts: Sequence[ParsedPrompt],
        params: PoolingParams,
        options: RequestOptions,
    ) -> list[PoolingInput]:
        name = f"pooling-{next(self._numbers)}" if request_id is None else request_id
        make = functools.partial(self.processor.make_input, params=params, options=options)
        if len(prompts) == 1:
            return [make(name, prompts[0])]
        return [make(f"{name}-{place}", prompt) for place, prompt in enumerate(prompts)]

    def _send_soon(self, call: _Call) -> None:
        """Make its requests together with all that come in this turn of the loop: a tokenizer that was used
        just before takes half as long (95 and 50 us for 136 tokens beside a busy worker).
        """
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._send_waiting)
        self._waiting.append(call)

    def _send_waiting(self) -> None:
        calls, self._waiting = self._waiting, []
        for call in calls:
            if call.future.done():  # its caller has left
                continue
            try:
                self._send(call, call.make())
            except Exception as error:
                call.fail(error)

    def _send(self, call: _Call, inputs: Sequence[PoolingInput]) -> None:
        self._check_running()  # it may have ended meanwhile
        self._requests.add(inputs, call)
        call.ids = [request.request_id for request in inputs]


class _Call:
    """What one call asks for, and an output for each of its requests.

    make: makes the requests. ids: theirs, once they are with the engine.
    """

    def __init__(self, make: Callable[[], list[PoolingInput]], num_requests: int) -> None:
        self.make = make
        self.ids: list[str] = []
        self.future: asyncio.Future[dict[str, Pooled]] = asyncio.get_running_loop().create_future()
        self._outputs: dict[str, Pooled] = {}
        self._num_requests = num_requests

    def put(self, output: Pooled) -> None:
        """The first failure ends it."""
        self._outputs[output.request_id] = output
        if output.error is not None:
            self.fail(RequestFailedError(output.error, output.error_code))
        elif len(self._outputs) == self._num_requests and not self.future.done():
            self.future.set_result(self._outputs)

    def fail(self, error: Exception) -> None:
        """Let the reader raise `error`."""
        if not self.future.done():
            self.future.set_exception(error)
