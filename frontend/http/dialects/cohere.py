"""POST /v2/embed, as Cohere's clients ask."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from ....ipc.params.request_options import Priority
from ..caller import Caller
from ..errors import FieldError, missing_field
from ..serving import Serving, make_id
from ..stream import JsonResponse
from .route import PostRoute, is_off
from .vector_request import (
    Format,
    Inputs,
    Name,
    Positive,
    VectorRequest,
    Write,
    ask,
    find_prompt,
    join_list,
    list_names,
    make_meta,
    make_params,
    write_base64,
    write_beside,
    write_floats,
)

_WRITERS: dict[str, Write] = {"float": write_floats, "base64": write_base64}
_SIDES = {"START": "left", "END": "right"}
_encode = msgspec.json.Encoder().encode


class CohereEmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v2/embed, as Cohere's clients ask."""

    CHOICES: ClassVar = {"truncate": '"NONE", "START" or "END"'}
    model: str | None = None
    texts: Annotated[list[str], Meta(description="required; what is embedded")] | None = None
    input_type: Name | None = None
    embedding_types: Annotated[list[str], Meta(min_length=1, max_length=8)] | None = None
    truncate: (
        Annotated[
            Literal["NONE", "START", "END"],
            Meta(description="which end of a text that is too long is cut; NONE: refuse it; default END"),
        ]
        | None
    ) = None
    output_dimension: Positive | None = None
    max_tokens: (
        Annotated[Positive, Meta(description="cut each text to so many tokens; default: to what fits")] | None
    ) = None
    priority: Priority | None = None
    images: Any = None
    inputs: Any = None


async def create_cohere_embedding(serving: Serving, request: CohereEmbedRequest, caller: Caller) -> Response:
    """Embed texts, in each of the asked forms. Raises InputErrors and ApiErrors."""
    forms = _read_forms(request.embedding_types)
    form: Format = "float" if "float" in forms else "base64"
    if request.texts is None:
        raise missing_field("texts")
    names = list_names("texts", len(request.texts), serving.options.limits.max_inputs)
    param_fields = _find_truncation(request)
    param_fields["dimensions"] = "output_dimension", request.output_dimension
    params = make_params(serving, request, "embed", **param_fields)
    inputs = Inputs(request.texts, names, find_prompt(serving.model_texts, None, request.input_type))
    answer_id = make_id("embd")
    vectors = await ask(serving, caller, VectorRequest(answer_id, inputs, params, request, form))
    meta, texts = _encode(make_meta(vectors.num_tokens)), _encode(request.texts)

    def make() -> bytes:
        lists = (b'"%b":%b' % (kind.encode(), join_list(map(_WRITERS[kind], vectors.data))) for kind in forms)
        return b'{"id":"%b","response_type":"embeddings_by_type","embeddings":{%b},"texts":%b,"meta":%b}' % (
            answer_id.encode(),
            b",".join(lists),
            texts,
            meta,
        )

    return JsonResponse(await write_beside(vectors.data, form, make), answer_id)


def _read_forms(names: list[str] | None) -> list[str]:
    """The forms of vectors, each once."""
    forms = list(dict.fromkeys(names or ["float"]))
    for place, form in enumerate(names or ()):
        if form not in _WRITERS:
            raise FieldError(f"embedding_types[{place}]", form, "'float' or 'base64'")
    return forms


def _find_truncation(request: CohereEmbedRequest) -> dict[str, tuple[str, Any]]:
    """As make_params takes it. Cohere cuts what is too long unless it is told otherwise."""
    side = _SIDES.get(request.truncate or "END")
    if side is None:
        return {}
    most = request.max_tokens or -1
    return {"truncate_prompt_tokens": ("max_tokens", most), "truncation_side": ("truncate", side)}


ROUTES = [
    PostRoute(
        "/v2/embed",
        CohereEmbedRequest,
        create_cohere_embedding,
        task="embed",
        refused={"images": ("none: only text is supported", is_off), "inputs": ("none: use texts", is_off)},
    )
]
