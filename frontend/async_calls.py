"""AsyncPooling: vectors for an asyncio program, of many prompts in one call. Of AsyncLLM's event loop."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ..ipc.errors import RequestFailedError
from ..ipc.params.pooling_params import PoolingParams, PoolingTask
from .client.async_requests import AsyncRequests
from .requests.prompt_tokenizer import TokenizedPrompt
from .requests.prompts import parse_salt
from .requests.request_fields import check_fields
from .requests.vectors.outputs import PoolingOutput, PoolingRequestOutput
from .requests.vectors.processor import PoolingProcessor, PoolingPrompt
from .requests.vectors.state import PoolingInput

Pooled = PoolingRequestOutput[PoolingOutput]
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
        cache_salt: str = "",
        priority: int = 0,
        tenant: str = "",
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        names: Sequence[str] = (),
    ) -> list[Pooled]:
        """What is pooled of each prompt, in their order; all go to the engine in one message.

        prompts: as for LLM.embed, and TextPair and EncodedText. fields: what they are called in errors, or
        the name of a list of them. Several have ids with their place behind request_id. Cancelling it ends
        them. The rest is as for AsyncLLM.generate. Raises InputErrors, EngineDeadError, and for the first one
        that the engine fails or somebody aborts RequestFailedError; then the others end, too.
        cache_salt: of prompts that have none.
        """
        self._check_running()
        checked = self.processor.check_params(pooling_params, task)
        more = check_fields(tenant, timeout_s, queue_timeout_s, names) | {
            "cache_salt": parse_salt("cache_salt", cache_salt or None)
        }
        if isinstance(fields, str):
            fields = [f"{fields}[{place}]" for place in range(len(prompts))]
        before = self.processor.find_prompt(prompt_name, prompt)

        def make() -> list[PoolingInput]:
            each = [checked] * len(prompts)
            tokenized = self.processor.tokenize(prompts, each, fields, prompt=before)
            return self._make_inputs(request_id, tokenized, checked, priority, more)

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
                self._requests.leave(call.ids, is_finished)
        return [outputs[one] for one in call.ids]

    def _make_inputs(
        self,
        request_id: str | None,
        prompts: Sequence[TokenizedPrompt],
        params: PoolingParams,
        priority: int,
        fields: dict[str, Any],
    ) -> list[PoolingInput]:
        name = f"pooling-{next(self._numbers)}" if request_id is None else request_id
        make = functools.partial(self.processor.make_input, params=params, priority=priority, **fields)
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
        call.ids = [one.request_id for one in inputs]


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
