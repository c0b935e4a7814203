"""POST /embed and /similarity, GET /info: what clients of text-embeddings-inference (TEI) ask for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from starlette.responses import Response

from ..bodies.openapi import Routes
from ..caller import Caller
from ..engines.served_models import ServedModels
from ..errors import ErrorResponse
from ..serving import Serving, make_id
from ..stream import Json, JsonResponse, respond
from .route import PostRoute
from .scores import compare
from .vector_request import (
    Cuts,
    Inputs,
    Name,
    Positive,
    Texts,
    TruncationDirection,
    VectorRequest,
    ask,
    join_list,
    make_params,
    read_inputs,
    read_texts,
    write_beside,
    write_floats,
)


class TextParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What TEI's clients say of texts."""

    CHOICES: ClassVar = {"truncation_direction": '"left" or "right"'}
    truncate: Cuts | None = None
    truncation_direction: TruncationDirection | None = None
    prompt_name: Name | None = None


class TeiEmbedRequest(TextParameters, kw_only=True, forbid_unknown_fields=True):
    """POST /embed, as TEI's clients ask."""

    inputs: Texts
    normalize: bool | None = None
    dimensions: Positive | None = None
    model: str | None = None


class SimilarityInputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One sentence, and those that it is compared with."""

    source_sentence: str
    sentences: Annotated[list[str], Meta(min_length=1)]


class SimilarityRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /similarity, as TEI's clients ask."""

    CHOICES: ClassVar = {"parameters.truncation_direction": '"left" or "right"'}
    inputs: SimilarityInputs
    parameters: TextParameters | None = None
    model: str | None = None


async def create_tei_embedding(serving: Serving, request: TeiEmbedRequest, caller: Caller) -> Response:
    """Embed texts; the answer is the bare list of their vectors."""
    param_fields = find_truncation(request.truncate, request.truncation_direction)
    param_fields["use_activation"] = "normalize", request.normalize
    params = make_params(serving, request, "embed", **param_fields)
    prompt = serving.model_texts.find_prompt(request.prompt_name)
    inputs = read_inputs("inputs", request.inputs, serving.options.limits.max_inputs, prompt)
    answer_id = make_id("embd")
    vectors = await ask(serving, caller, VectorRequest(answer_id, inputs, params, request))
    body = await write_beside(vectors.data, "float", lambda: join_list(map(write_floats, vectors.data)))
    return JsonResponse(body, answer_id)


async def create_similarity(serving: Serving, request: SimilarityRequest, caller: Caller) -> Response:
    """The cosine of one sentence and each of others; the answer is the bare list of them."""
    compared, parameters = request.inputs, request.parameters or TextParameters()
    params = make_params(
        serving, parameters, "embed", **find_truncation(parameters.truncate, parameters.truncation_direction)
    )
    texts, names = read_texts("inputs.sentences", list(compared.sentences), serving.options.limits.max_inputs)
    prompt = serving.model_texts.find_prompt(parameters.prompt_name)
    inputs = Inputs([compared.source_sentence, *texts], ["inputs.source_sentence", *names], prompt)
    answer_id = make_id("similarity")
    vectors = await ask(serving, caller, VectorRequest(answer_id, inputs, params, parameters))
    return JsonResponse(msgspec.json.encode(await compare(vectors.data[:1], vectors.data[1:])), answer_id)


def find_truncation(truncates: bool | None, direction: str | None) -> dict[str, tuple[str, Any]]:
    """As make_params takes it. Without `truncates` a text that is too long is refused."""
    if not truncates:
        return {}
    side = (direction or "right").lower()
    return {"truncate_prompt_tokens": ("truncate", -1), "truncation_side": ("truncation_direction", side)}


def add_routes(routes: Routes, models: ServedModels) -> None:
    """Serve /info; beside others a model is named by the query's `model`."""

    async def show_info(model: str | None = None) -> Response:
        models.check_open()
        return respond(make_info(models.find(model, "embed").serving))

    routes.add("/info", show_info, "The model and its limits, as TEI says them.", more={404: ErrorResponse})


def make_info(serving: Serving) -> Json:
    """What TEI's clients look at before they ask, by its names."""
    facts, options = serving.llm.facts, serving.options
    return {
        "model_id": facts.served_model_name,
        "model_sha": None,
        "model_dtype": facts.dtype,
        "model_type": _describe_type(facts.tasks, serving.model_texts.labels),
        "tasks": facts.tasks,
        "max_concurrent_requests": serving.max_sequences,
        "max_input_length": facts.max_model_len,
        "max_batch_tokens": facts.max_num_batched_tokens,
        "max_batch_requests": facts.max_num_seqs,
        "max_client_batch_size": options.limits.max_inputs,
        "auto_truncate": False,
        "tokenization_workers": 2,
        "version": version("quire"),
    }


def _describe_type(tasks: Sequence[str], labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """TEI's names: a reranker is a classifier of pairs with one class."""
    named: dict[str, Any] = {"id2label": {str(place): label for place, label in enumerate(labels)}}
    named["label2id"] = {label: place for place, label in enumerate(labels)}
    if "classify" in tasks:
        return {"reranker" if "score" in tasks else "classifier": named}
    return {"embedding": {}} if "embed" in tasks else {}


ROUTES = [
    PostRoute("/embed", TeiEmbedRequest, create_tei_embedding, task="embed"),
    PostRoute("/similarity", SimilarityRequest, create_similarity, task="embed"),
]
