"""Serving: one engine as the routes see it: its model's text, the limits, and its requests under way.

Knows no HTTP, and no other engine of this process: what they share is in ServerParts. A request enters
through `generate`, which counts it, names it, salts it and passes it on.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from ...ipc.errors import RequestFailedError
from ...ipc.params.pooling_params import PoolingParams
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.protocol.request_price import find_result_price
from ...ipc.protocol.rights import CALLER_OPTIONS
from ..async_llm import AsyncLLM
from ..formats.output_format import OutputFormat
from ..formats.schemas.grammar_cache import GrammarCache
from ..outputs import RequestOutput
from ..requests.input_processor import PreparedParams
from ..requests.vectors.encoder import ModelTexts
from ..requests.vectors.outputs import PoolingOutput, PoolingRequestOutput
from ..text.tokenizer import Tokenizer
from .caller import Caller, TenantUsage
from .engines.server_parts import ServerParts
from .errors import ApiError, FieldError, overloaded, unavailable
from .stream import SSE, EventStream, StreamForm
from .text_process.service import TextService

PromptInput = str | list[int]
# Of a request that is under way: how its answer is to look, and what every one of its prompts is asked with.
_KEPT_FIELDS = {
    *("stream", "stream_options", "echo", "logprobs", "top_logprobs", "prompt_logprobs", "max_tokens"),
    *("logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids"),
    *CALLER_OPTIONS,
}


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one request takes of a server. answer_bytes: of logprobs or vectors."""

    tenant: str
    num_sequences: int
    answer_bytes: int = 0


class Capacity:
    """Counts who takes how much. Raises ApiErrors with status 429."""

    def __init__(self, max_answer_bytes: int, answer_bytes: TenantUsage) -> None:
        """`answer_bytes`: of the process, with those of other engines' requests."""
        self._max_answer_bytes = max_answer_bytes
        self._reservations: dict[str, Reservation] = {}  # engine request id -> what it takes
        self._sequences = TenantUsage()
        self._answer_bytes = answer_bytes

    @property
    def num_sequences(self) -> int:
        """Sequences that are inside."""
        return self._sequences.amount

    @property
    def request_ids(self) -> list[str]:
        """The requests that are inside."""
        return list(self._reservations)

    def check(self, wanted: Reservation, max_sequences: int) -> None:
        """ApiError 429 if there is no room for `wanted` now. `max_sequences`: places that there are."""
        tenant, places, held = wanted.tenant, self._sequences, self._answer_bytes
        if not places.has_room(tenant, wanted.num_sequences, max_sequences):
            raise overloaded(
                f"{places.amount} sequences are under way ({places.find_amount(tenant)} of them yours), "
                f"{wanted.num_sequences} more are asked for, and at most {max_sequences} may be "
                "(max_num_seqs + max_waiting)"
            )
        if not held.has_room(tenant, wanted.answer_bytes, self._max_answer_bytes):
            raise overloaded(
                f"logprobs or vectors of {wanted.answer_bytes} bytes, and answers under way may need "
                f"{held.amount} ({held.find_amount(tenant)} of them yours): at most {self._max_answer_bytes} "
                "(max_total_logprobs_bytes)"
            )

    def enter(self, request_id: str, reservation: Reservation) -> None:
        """Count a request until it leaves."""
        self._reservations[request_id] = reservation
        self._sequences.enter(reservation.tenant, reservation.num_sequences)
        self._answer_bytes.enter(reservation.tenant, reservation.answer_bytes)

    def leave(self, request_id: str) -> None:
        """The request has ended, however it did."""
        reservation = self._reservations.pop(request_id)
        self._sequences.leave(reservation.tenant, reservation.num_sequences)
        self._answer_bytes.leave(reservation.tenant, reservation.answer_bytes)


class Serving:
    """One an engine. `open` once the engine runs, `close` at last."""

    def __init__(self, llm: AsyncLLM, parts: ServerParts) -> None:
        self.llm = llm
        self.options = parts.options
        self.responses = parts.responses
        self.is_open = False
        limits = parts.options.limits
        self.capacity = Capacity(
            limits.max_total_logprobs_bytes, parts.answer_bytes
        )  # of the requests under way
        self.default_sampling: dict[str, Any] = {}  # SamplingParams fields that the model recommends
        self.grammars = GrammarCache()
        self._parts = parts
        self._text: TextService | None = None

    def open(self) -> None:
        """The engine is ready: requests may enter."""
        defaults = self.llm.get_default_sampling_params()
        plain = SamplingParams()
        self.default_sampling = {
            name: getattr(defaults, name)
            for name in SamplingParams.__struct_fields__
            if getattr(defaults, name) != getattr(plain, name)
        }
        self.is_open = True

    def start_text(self) -> None:
        """Have the first chat not wait for the process that renders it."""
        tokenizer = self.llm.tokenizer
        if tokenizer is not None and tokenizer.has_chat_template:
            self.text.start()

    def close(self) -> None:
        """End the text processes; what waits for them is answered with 503. Idempotent."""
        if self._text is not None:
            self._text.close()

    @property
    def status(self) -> str:
        """'ready' while new requests are taken; else 'loading', 'recovering', 'draining' or 'dead'."""
        if self._parts.is_draining:
            return "draining"
        if not self.is_open:
            return "loading"
        if not self.llm.is_running:
            return "dead"
        return "recovering" if self.llm.is_recovering else "ready"

    @property
    def max_sequences(self) -> int:
        """Most of them that run and wait: what fits into all engines' steps, and max_waiting."""
        return self.llm.facts.max_num_seqs * self.llm.num_engines + self.options.max_waiting

    @property
    def model_id(self) -> str:
        """The first name under which the model is served."""
        return self.llm.facts.served_model_name

    def find_name(self, asked: str | None) -> str:
        """What an answer calls the model: the name that it was asked for by, else the first."""
        return asked if asked in self.llm.facts.served_model_aliases else self.model_id

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; ApiError 400 when the engine runs without one."""
        tokenizer = self.llm.tokenizer
        if tokenizer is None:
            raise ApiError(HTTPStatus.BAD_REQUEST, "this engine runs without a tokenizer: token ids only")
        return tokenizer

    @property
    def output_format(self) -> OutputFormat | None:
        """How the model writes thoughts and calls; None: it writes text, as far as that is known."""
        return self.llm.output_format

    @property
    def is_thinking(self) -> bool:
        """Whether the model may write thoughts before its answer, which are told apart."""
        return self.output_format is not None and self.output_format.thinking is not None

    @property
    def text(self) -> TextService:
        """What renders and tokenizes apart from the event loop; ApiError 400 without a tokenizer."""
        if self._text is None:
            assert self.tokenizer is not None
            facts = self.llm.facts
            noted = facts.noted and facts.noted.tokenizer
            max_render_s = self.options.limits.max_render_s
            self._text = TextService(facts.tokenizer, max_render_s, facts.chat_template, noted)
        return self._text

    @property
    def model_texts(self) -> ModelTexts:
        """Names of the model's classes, and prompts that go before its texts."""
        return self.llm.pooling.processor.texts

    def check_open(self) -> None:
        """ApiError 503 while the engine loads, and once the server is about to end."""
        self._parts.check_open()
        if not self.is_open:
            raise unavailable("the model is being loaded", "loading")

    def check_room(
        self, params: SamplingParams, caller: Caller, num_prompts: int = 1, num_prompt_tokens: int = 0
    ) -> None:
        """ApiError 429 when there is no room for the caller now; 400 or 413 when there never is any.

        num_prompt_tokens: of all prompts, as far as they are known.
        """
        limits, num_sequences = self.options.limits, num_prompts * params.num_sequences
        if num_sequences > limits.max_sequences:
            allowed = f"at most {limits.max_sequences} in a request"
            raise FieldError("n", f"{num_sequences} sequences", allowed)
        self._find_reservation(params, caller, -(-num_prompt_tokens // num_prompts), num_prompts)

    def _find_reservation(
        self, params: SamplingParams, caller: Caller, num_prompt_tokens: int, num_prompts: int = 1
    ) -> Reservation:
        """What so many prompts of this length take, for which there is room now; else ApiError 413 or 429."""
        facts = self.llm.facts
        price = find_result_price(params, num_prompt_tokens, facts.max_model_len, facts.vocab_size)
        max_bytes = self.options.limits.max_result_bytes
        if num_prompts * price.total_bytes > max_bytes:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the answer may come to {num_prompts * price.total_bytes} bytes and may have {max_bytes} "
                "(max_result_bytes): lower n, max_tokens or the number of logprobs",
                code="answer_too_large",
            )
        reservation = Reservation(
            caller.tenant, num_prompts * params.num_sequences, num_prompts * price.logprobs_bytes
        )
        self.capacity.check(reservation, self.max_sequences)
        return reservation

    async def generate(
        self,
        request_id: str,
        prompt: PromptInput,
        prepared: PreparedParams,
        caller: Caller,
        fields: msgspec.Struct,
        answer_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """AsyncLLM.generate for one prompt of a request; closing the generator aborts it.

        `answer_id`: what callers abort it by; None: `request_id`.

        Afterwards all fields of `fields` but _KEPT_FIELDS are None: a stream would hold megabytes of them.
        """
        params = prepared.sampling_params
        self.check_open()
        # A text has about as many tokens as characters, or fewer.
        reservation = self._find_reservation(params, caller, len(prompt))
        options = caller.make_options(fields, answer_id or request_id)
        generating = self.llm.generate(prompt, prepared, request_id, options=options)
        del prompt
        _drop_content(fields)
        self.capacity.enter(request_id, reservation)
        try:
            async with aclosing(generating) as outputs:
                async for output in outputs:
                    if output.finished:
                        for tell in self._parts.on_output:
                            tell(output, params)
                    yield output
        except RequestFailedError as error:
            raise _blame_limits(error, params) from None
        finally:
            self.capacity.leave(request_id)

    def note_pooled(
        self, request_id: str, params: PoolingParams, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]
    ) -> None:
        """The vectors of a request are here."""
        for tell in self._parts.on_pooled:
            tell(request_id, params, outputs)

    def run_beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something that goes on without a connection; the server's end waits for it."""
        return self._parts.run(work)

    def stream(
        self,
        events: AsyncGenerator[bytes, None],
        request_id: str,
        encode_failure: Callable[[Exception], bytes] | None = None,
        form: StreamForm = SSE,
    ) -> EventStream:
        """The response that streams `events`."""
        limits = self.options.limits
        return EventStream(events, limits, encode_failure, request_id, lambda: self.llm.is_recovering, form)


def _drop_content(fields: msgspec.Struct) -> None:
    for name in _list_dropped_fields(type(fields)):
        setattr(fields, name, None)


@functools.cache
def _list_dropped_fields(kind: type[msgspec.Struct]) -> list[str]:
    return [name for name in kind.__struct_fields__ if name not in _KEPT_FIELDS]


def _blame_limits(error: RequestFailedError, params: SamplingParams) -> Exception:
    """A 400 in place of the error when the request itself may have left no token to choose."""
    names = ("allowed_token_ids", "bad_words", "min_tokens")
    field = next((name for name in names if getattr(params, name)), None)
    if error.code != "bad_logits" or field is None:
        return error
    return ApiError(HTTPStatus.BAD_REQUEST, f"{field}: {error}", param=field, code=error.code)


def make_id(prefix: str) -> str:
    """A new id such as 'chatcmpl-5c0f...'."""
    return f"{prefix}-{os.urandom(16).hex()}"
