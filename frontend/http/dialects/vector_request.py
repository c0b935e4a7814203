"""What pooling dialects share: a request's inputs, what the engine is asked, its answer."""

from __future__ import annotations

import asyncio
import functools
import struct
import time
from array import array
from binascii import b2a_base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from ....ipc.errors import PoolingParamsError, RequestFailedError
from ....ipc.params.param_fields import MAX_INT
from ....ipc.params.pooling_params import FLOAT_BYTES, PoolingParams, PoolingTask
from ....ipc.protocol.messages import EngineFacts
from ....ipc.protocol.token_ids import decode_token_ids
from ...requests.prompts import Truncation
from ...requests.vectors.encoder import DOCUMENT_PROMPTS, QUERY_PROMPTS, EncodedText, ModelTexts, TextPair
from ...requests.vectors.processor import PoolingPrompt
from ..bodies.schema import SchedulingFields, TokenId, TruncationSide
from ..caller import Caller
from ..errors import ApiError, FieldError
from ..serving import PromptInput, Reservation, Serving
from ..stream import Json
from ..text_process.jobs import PoolingJob, TokenIds
from .prompts import MAX_INLINE_LENGTH

# A worker's vectors -> JSON. A vector is bytes: float32, little-endian. As base64 its numbers are never
# looked at. As numbers they are decoded and encoded a vector at a time, and a large answer is made in a
# thread, so that the event loop waits for one vector at most.

_MAX_INLINE_FLOATS = 4096  # written in the event loop: 0.9 ms
_MAX_INLINE_BYTES = 1 << 20  # likewise as base64: 1 ms
# What a number costs until the answer has been sent: its bytes, and twice its text.
_PRICES = {"float": 48, "base64": 16}

Format = Literal["float", "base64"]
Write = Callable[[bytes], bytes]

_read_float = struct.Struct("<f").unpack


Texts = str | list[str | int | list[TokenId]]  # a text, texts, token ids, or lists of token ids


Positive = Annotated[int, Meta(ge=1, le=MAX_INT)]


Cuts = Annotated[bool, Meta(description="true: cut texts that are too long; default: refuse them")]


Name = Annotated[str, Meta(max_length=256)]


TruncationDirection = Literal["left", "right", "Left", "Right"]


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A text, as some clients wrap it."""

    text: str


DocumentText = str | Document


class PoolingFields(SchedulingFields, kw_only=True, forbid_unknown_fields=True):
    """What any of these requests may say, by vLLM's names; None: it does not say."""

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    truncation_side: TruncationSide | None = None
    use_activation: bool | None = None


def read_floats(data: bytes) -> list[float]:
    """The numbers of a vector."""
    return array("f", data).tolist()


def read_score(data: bytes) -> float:
    """The number of a vector of one."""
    return _read_float(data)[0]


def write_base64(data: bytes) -> bytes:
    """A JSON string of a vector, or of several one behind the other."""
    return b'"%b"' % b2a_base64(data, newline=False)


def write_floats(data: bytes) -> bytes:
    """A JSON list of a vector's numbers. What is not finite becomes null, for which JSON has no number."""
    return _encode(read_floats(data))


def make_row_writer(width: int) -> Write:
    """Writes vectors of so many numbers, one behind the other, as a JSON list of lists."""
    size = width * FLOAT_BYTES

    def write(data: bytes) -> bytes:
        return join_list(write_floats(data[start : start + size]) for start in range(0, len(data), size))

    return write


def join_list(items: Iterable[bytes]) -> bytes:
    """A JSON list."""
    return b"[%b]" % b",".join(items)


def find_price(num_floats: int, form: Format) -> int:
    """Bytes that so many numbers of an answer take in this process."""
    return num_floats * _PRICES[form]


async def write_beside(vectors: list[bytes], form: Format, make: Callable[[], bytes]) -> bytes:
    """`make()`, which writes these vectors in this form: in a thread if there is much to write."""
    size = sum(map(len, vectors))
    is_short = size <= (_MAX_INLINE_BYTES if form == "base64" else _MAX_INLINE_FLOATS * FLOAT_BYTES)
    return make() if is_short else await asyncio.to_thread(make)


# Inputs -> what the engine takes: few short texts as they are, others as token ids of a text process. One
# job tokenizes all texts of a request.

_MAX_INLINE_TEXTS = 8
_DECODED_A_TURN = 64  # texts whose token ids are unpacked in a turn of the event loop


async def tokenize_inputs(
    serving: Serving, caller: Caller, inputs: Inputs, params: PoolingParams
) -> list[PoolingPrompt]:
    """Each input as it is where the engine's own tokenizing does, else its token ids."""
    places = [place for place, value in enumerate(inputs.prompts) if isinstance(value, str)]
    texts = [str(inputs.prompts[place]) for place in places]
    queries = None if inputs.queries is None else list(inputs.queries)
    if not texts:
        return list(inputs.prompts)
    is_cut = inputs.max_tokens_per_text is not None or inputs.truncation is not None
    if not is_cut and _can_inline(serving, texts, queries or [inputs.prompt]):
        if queries is None:
            return list(inputs.prompts)
        return [TextPair(queries[place % len(queries)], text) for place, text in enumerate(texts)]
    requested = serving.llm.pooling.processor.find_truncation(params)
    job = PoolingJob(
        texts=texts,
        names=[inputs.names[place] for place in places],
        max_tokens=serving.llm.facts.max_model_len,
        model=serving.model_texts,
        prompt=inputs.prompt,
        queries=queries,
        truncation=requested or inputs.truncation,
        max_tokens_per_text=inputs.max_tokens_per_text,
        num_whole=0 if requested else inputs.num_queries,
    )
    answer = await serving.text.run(job, caller.tenant)
    assert isinstance(answer, TokenIds)
    prompts: list[PoolingPrompt] = list(inputs.prompts)
    for number, (place, packed, type_start) in enumerate(
        zip(places, answer.packed, answer.type_starts, strict=True)
    ):
        prompts[place] = EncodedText(decode_token_ids(packed), type_start)
        if number % _DECODED_A_TURN == _DECODED_A_TURN - 1:
            await asyncio.sleep(0)
    return prompts


def _can_inline(serving: Serving, texts: list[str], others: list[str]) -> bool:
    """Whether texts, each of them behind one of `others`, may be tokenized in the event loop."""
    size = sum(map(len, texts)) + len(texts) * max(map(len, others))
    return size <= MAX_INLINE_LENGTH and len(texts) <= _MAX_INLINE_TEXTS and serving.tokenizer.is_predictable


# Inputs: the texts or token ids of a request, with the names that it has for them.

# What a caller says of its texts -> names that models have for the prompt of such texts.
_QUERY, _DOCUMENT = (*QUERY_PROMPTS, "search_query"), (*DOCUMENT_PROMPTS, "search_document")
_PROMPTS_OF_TYPES = {
    "query": _QUERY,
    "search_query": _QUERY,
    "document": _DOCUMENT,
    "passage": _DOCUMENT,
    "search_document": _DOCUMENT,
    "classification": ("classification",),
    "clustering": ("clustering",),
}
_ALLOWED = "a text, texts, token ids, or lists of token ids"


@dataclass(frozen=True, slots=True)
class Inputs:
    """What vectors are made of. `names`: of each, for errors. prompt: goes before each text.

    queries: then `prompts` are documents, each read together with its query or with the only one.
    num_queries: how many of `prompts`, the first ones, are queries, and the others documents of their own.
    max_tokens_per_text: longer documents are cut. truncation: then what is still too long of a document and
    what goes with it, where the request has no truncation of its own.
    """

    prompts: Sequence[PromptInput]
    names: Sequence[str]
    prompt: str = ""
    queries: Sequence[str] | None = None
    num_queries: int = 0
    max_tokens_per_text: int | None = None
    truncation: Truncation | None = None


def read_inputs(field: str, value: Texts, max_inputs: int, prompt: str = "") -> Inputs:
    """One input or many, each a text or token ids. Raises FieldError."""
    if isinstance(value, str):
        return Inputs([value], [field], prompt)
    kinds = set(map(type, value))
    if kinds == {int}:
        return Inputs([cast(list[int], value)], [field], prompt)
    if value and kinds not in ({str}, {list}):
        raise FieldError(field, value, _ALLOWED)
    return Inputs(cast(list[PromptInput], value), list_names(field, len(value), max_inputs), prompt)


def find_prompt(texts: ModelTexts, prompt_name: str | None, input_type: str | None) -> str:
    """What a request wants before its texts. Raises InputError for a prompt that the model does not have.

    input_type: what kind of texts they are; its prompt is the model's default where it has none of that kind.
    """
    if prompt_name is not None or input_type is None:
        return texts.find_prompt(prompt_name)
    if input_type not in _PROMPTS_OF_TYPES:
        raise FieldError("input_type", input_type, f"one of {', '.join(map(repr, _PROMPTS_OF_TYPES))}")
    return texts.find_named_prompt(_PROMPTS_OF_TYPES[input_type])


def read_texts(
    field: str, value: str | Sequence[DocumentText], max_inputs: int
) -> tuple[list[str], list[str]]:
    """Texts and their names. Raises FieldError."""
    if isinstance(value, str):
        return [value], [field]
    names = list_names(field, len(value), max_inputs)
    return [text if isinstance(text, str) else text.text for text in value], names


def list_names(field: str, count: int, max_inputs: int) -> list[str]:
    """What a list's items are called. Raises FieldError for none, or too many."""
    if not count:
        raise FieldError(field, [], "at least one")
    if count > max_inputs:
        raise FieldError(field, f"a list of {count}", f"at most {max_inputs} (max_inputs)")
    return [f"{field}[{place}]" for place in range(count)]


_INPUTS_A_PLACE = 16  # a vector takes one step, where a text takes one a token
_KNOWN_PARAMS = 64  # of earlier requests: most requests ask for the same
_OF_PARAMS = ("dimensions", "use_activation", "truncate_prompt_tokens", "truncation_side")


@dataclass(frozen=True, slots=True)
class VectorRequest:
    """`fields`: the request, of which priority and the like count. form: of the answer."""

    answer_id: str
    inputs: Inputs
    params: PoolingParams
    fields: Any
    form: Format = "float"


@dataclass(frozen=True, slots=True)
class Vectors:
    """What was made of each input, and how many tokens they had together."""

    data: list[bytes]
    num_tokens: int


def make_params(
    serving: Serving, fields: Any, task: PoolingTask, **param_fields: tuple[str, Any]
) -> PoolingParams:
    """The checked parameters of a request. `own`: by field, what the request calls it and its value there.

    Raises PoolingParamsError, in the request's words.
    """
    named = {field: (field, getattr(fields, field, None)) for field in _OF_PARAMS} | param_fields
    values = tuple((field, value) for field, (_, value) in named.items() if value is not None)
    try:
        return serving.llm.pooling.processor.check_params(_make_params(task, values), task)
    except PoolingParamsError as error:
        name, value = named.get(error.field, (error.field, error.value))
        raise PoolingParamsError(name, value, error.allowed) from None


@functools.lru_cache(_KNOWN_PARAMS)
def _make_params(task: PoolingTask, values: tuple[tuple[str, Any], ...]) -> PoolingParams:
    return PoolingParams(task=task, **dict(values))


async def ask(serving: Serving, caller: Caller, vector_request: VectorRequest) -> Vectors:
    """The engine's answer. Raises InputErrors and ApiErrors; the first input that fails ends the others."""
    reservation = _find_reservation(serving, caller, vector_request)
    inputs, fields, answer_id = vector_request.inputs, vector_request.fields, vector_request.answer_id
    # Before it waits for its token ids: others look for room meanwhile.
    serving.capacity.enter(answer_id, reservation)
    try:
        prompts = await tokenize_inputs(serving, caller, inputs, vector_request.params)
        serving.check_open()
        outputs = await serving.llm.pooling.encode_many(
            prompts,
            vector_request.params,
            answer_id,
            fields=inputs.names,
            prompt=inputs.prompt,
            options=caller.make_options(fields, answer_id),
        )
    except RequestFailedError as error:
        raise _explain(error) from None
    finally:
        serving.capacity.leave(answer_id)
    serving.note_pooled(answer_id, vector_request.params, outputs)
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return Vectors([output.outputs.raw for output in outputs], num_tokens)


def _explain(error: RequestFailedError) -> Exception:
    """A 408 for what was aborted or out of time, which another try does not help."""
    if error.code is not None:
        return error
    headers = {"x-should-retry": "false"}
    return ApiError(HTTPStatus.REQUEST_TIMEOUT, str(error), code="aborted", headers=headers)


def find_width(facts: EngineFacts, params: PoolingParams) -> int:
    """Numbers of a vector, or of a classifier's answer."""
    return params.dimensions or facts.embedding_size or facts.num_labels or 1


def _find_reservation(serving: Serving, caller: Caller, vector_request: VectorRequest) -> Reservation:
    """What the request takes, for which there is room now; else ApiError 413 or 429."""
    facts, limits, prompts = serving.llm.facts, serving.options.limits, vector_request.inputs.prompts
    num_vectors = len(prompts)
    if vector_request.params.is_token_wise:  # a text has about as many tokens as characters, or fewer
        num_vectors = sum(min(len(prompt), facts.max_model_len) for prompt in prompts)
    price = find_price(num_vectors * find_width(facts, vector_request.params), vector_request.form)
    if price > limits.max_result_bytes:
        raise ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the answer may come to {price} bytes and may have {limits.max_result_bytes} "
            "(max_result_bytes): ask for fewer inputs, or for base64",
            code="answer_too_large",
        )
    reservation = Reservation(caller.tenant, -(-len(prompts) // _INPUTS_A_PLACE), price)
    serving.capacity.check(reservation, serving.max_sequences)
    return reservation


# Answers of the pooling routes as JSON, around vectors that are JSON already.

_encode = msgspec.json.Encoder().encode


def write_list(answer_id: str, model: str, items: Iterable[bytes], num_tokens: int) -> bytes:
    """OpenAI's list of results, each of which is JSON."""
    return b'{"id":%b,"object":"list","created":%d,"model":%b,"data":%b,"usage":%b}' % (
        _encode(answer_id),
        int(time.time()),
        _encode(model),
        join_list(items),
        _encode(make_usage(num_tokens)),
    )


def make_usage(num_tokens: int) -> Json:
    """Of a request that generates nothing."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def make_meta(num_tokens: int) -> Json:
    """The usage as Cohere's clients look for it."""
    return {"api_version": {"version": "2"}, "billed_units": {"input_tokens": num_tokens}}
