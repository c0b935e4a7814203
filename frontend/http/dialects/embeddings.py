"""POST /v1/embeddings, /pooling and /classify: texts, token ids or a conversation to vectors."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from msgspec import Meta
from starlette.responses import Response

from ....ipc.params.pooling_params import EMBEDDING, FLOAT_BYTES, PoolingParams, PoolingTask
from ....ipc.protocol.messages import EngineFacts
from ..bodies.schema import KNOWN_TYPES_OF_CHATS, ChatMessage
from ..caller import Caller
from ..errors import FieldError, missing_field
from ..serving import Serving, make_id
from ..stream import Json, JsonResponse
from ..text_process.jobs import Conversation
from .prompts import render_chat
from .route import PostRoute
from .vector_request import (
    Inputs,
    Name,
    PoolingFields,
    Positive,
    Texts,
    VectorRequest,
    Vectors,
    Write,
    ask,
    find_prompt,
    make_params,
    make_row_writer,
    read_floats,
    read_inputs,
    write_base64,
    write_beside,
    write_floats,
    write_list,
)

_TASKS: tuple[PoolingTask, ...] = ("embed", "classify", "token_embed", "token_classify")
_FORMATS = '"float" or "base64"'
_EMBEDDING = b'{"object":"embedding","index":%d,"embedding":%b}'
_POOLED = b'{"object":"pooling","index":%d,"data":%b}'

_encode = msgspec.json.Encoder().encode


EncodingFormat = Literal["float", "base64"]


class InputFields(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """Either texts or a conversation. prompt_name, input_type: which of the model's prompts goes before."""

    KNOWN_TYPES: ClassVar = KNOWN_TYPES_OF_CHATS
    input: Texts | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_name: Name | None = None
    input_type: Name | None = None


class EmbeddingRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings."""

    CHOICES: ClassVar = {"encoding_format": _FORMATS}
    encoding_format: EncodingFormat | None = None
    dimensions: Positive | None = None


class PoolingRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """POST /pooling. task: None takes the first that the model can do, as vLLM orders them."""

    CHOICES: ClassVar = {
        "encoding_format": _FORMATS,
        "task": ", ".join(f'"{task}"' for task in get_args(PoolingTask)),
    }
    task: PoolingTask | None = None
    encoding_format: EncodingFormat | None = None
    dimensions: Positive | None = None


class ClassifyRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """POST /classify."""


async def create_embedding(serving: Serving, request: EmbeddingRequest, caller: Caller) -> Response:
    """Embed texts, token ids or a conversation. Raises InputErrors and ApiErrors."""
    vector_request = await _make_vector_request(serving, caller, request, "embed", "embd")
    vectors = await ask(serving, caller, vector_request)
    return await _respond(serving, vector_request, vectors, _EMBEDDING)


async def create_pooling(serving: Serving, request: PoolingRequest, caller: Caller) -> Response:
    """What is pooled of texts, token ids or a conversation, for any task of the model."""
    task = _choose_task(serving.llm.facts, request)
    vector_request = await _make_vector_request(serving, caller, request, task, "pool")
    vectors = await ask(serving, caller, vector_request)
    return await _respond(serving, vector_request, vectors, _POOLED)


def _choose_task(facts: EngineFacts, request: PoolingRequest) -> PoolingTask:
    """The one that is asked for, or the first that the model can do."""
    able: list[PoolingTask] = [task for task in _TASKS if facts.tasks.count(task)]
    return request.task or (able[0] if able else _TASKS[0])


async def create_classification(serving: Serving, request: ClassifyRequest, caller: Caller) -> Response:
    """Say how likely each class is, and which one is likeliest."""
    vector_request = await _make_vector_request(serving, caller, request, "classify", "classify")
    vectors = await ask(serving, caller, vector_request)
    labels = serving.model_texts.labels

    def make() -> bytes:
        items = (
            _encode(_classify(index, read_floats(data), labels)) for index, data in enumerate(vectors.data)
        )
        model = serving.find_name(vector_request.fields.model)
        return write_list(vector_request.answer_id, model, items, vectors.num_tokens)

    return JsonResponse(await write_beside(vectors.data, "float", make), vector_request.answer_id)


def _classify(index: int, probs: list[float], labels: tuple[str, ...]) -> Json:
    best = max(range(len(probs)), key=probs.__getitem__)
    label = labels[best] if len(labels) == len(probs) else None
    return {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}


async def _make_vector_request(
    serving: Serving, caller: Caller, request: InputFields, task: PoolingTask, prefix: str
) -> VectorRequest:
    params = make_params(serving, request, task)
    inputs = await _find_inputs(serving, caller, request, params)
    form = getattr(request, "encoding_format", None) or "float"
    return VectorRequest(make_id(prefix), inputs, params, request, form)


async def _find_inputs(
    serving: Serving, caller: Caller, request: InputFields, params: PoolingParams
) -> Inputs:
    """What vectors are made of: texts behind the model's prompt, token ids, or a conversation's."""
    if request.input is None and request.messages is None:
        raise missing_field("input", "a text, texts or token ids; or 'messages' instead")
    if request.input is not None and request.messages is not None:
        raise FieldError("input", request.input, "absent with 'messages'")
    prompt = ""
    if params.task in EMBEDDING or request.prompt_name is not None:
        prompt = find_prompt(serving.model_texts, request.prompt_name, request.input_type)
    if request.input is not None:
        return read_inputs("input", request.input, serving.options.limits.max_inputs, prompt)
    job = Conversation(
        messages=request.messages or [],
        add_generation_prompt=False,
        variables=request.chat_template_kwargs,
        max_model_len=serving.llm.facts.max_model_len,
        truncation=serving.llm.pooling.processor.find_truncation(params),
        num_generated=0,
    )
    return Inputs([await render_chat(serving, job, caller)], ["messages"])


async def _respond(
    serving: Serving, vector_request: VectorRequest, vectors: Vectors, item: bytes
) -> Response:
    """A list of results, each an `item` with its index and its vector."""
    write = _choose_writer(vector_request, vectors)

    def make() -> bytes:
        items = [item % (index, write(data)) for index, data in enumerate(vectors.data)]
        model = serving.find_name(vector_request.fields.model)
        return write_list(vector_request.answer_id, model, items, vectors.num_tokens)

    return JsonResponse(await write_beside(vectors.data, vector_request.form, make), vector_request.answer_id)


def _choose_writer(vector_request: VectorRequest, vectors: Vectors) -> Write:
    if vector_request.form == "base64":
        return write_base64
    if vector_request.params.is_token_wise:
        return make_row_writer(sum(map(len, vectors.data)) // (FLOAT_BYTES * vectors.num_tokens))
    return write_floats


POOLING_PATH = "/pooling"
ROUTES = [
    PostRoute("/v1/embeddings", EmbeddingRequest, create_embedding, task="embed"),
    PostRoute("/classify", ClassifyRequest, create_classification, task="classify"),
    PostRoute(POOLING_PATH, PoolingRequest, create_pooling, task=_choose_task),
]
