"""What requests that answer with a vector may ask for, and what their answers take. Pure."""

from __future__ import annotations

from ...ipc.messages import EngineCoreRequest
from ...ipc.model_spec import ModelSpec, PoolingSpec
from ...ipc.pooling_params import FLOAT_BYTES, describe_bad_dimensions
from ...ipc.token_ids import count_token_ids

# Of the token-wise answers of a step, beyond that of the first request: the worker sends a step's in one
# message, and so does the core a client's (`codec.MAX_BODY_BYTES`).
MAX_STEP_ANSWER_BYTES = 16 * 1024 * 1024
_MAX_WHOLE_ANSWER_BYTES = 64 * 1024 * 1024  # of one whose prompt is computed in one step


def find_bad_pooling(request: EngineCoreRequest, spec: ModelSpec, can_split: bool) -> str | None:
    """Why the model cannot do what the request asks for, None if it can.

    `can_split`: whether a prompt may be computed in parts.
    """
    params, pooling = request.pooling_params, spec.pooling
    if params is None:
        return None if spec.has_logits else f"it generates nothing; its tasks: {', '.join(spec.tasks)}"
    if pooling is None or params.task not in pooling.tasks:
        return f"task: {params.task!r}, and the model's are {', '.join(spec.tasks)}"
    if request.output_token_ids or request.grammar or request.beam_search is not None:
        return "pooling_params: neither output_token_ids nor a grammar nor a beam search"
    start, num_prompt = request.type_start, count_token_ids(request.prompt_token_ids)
    if start is not None and not (start <= num_prompt and spec.embedding.num_types > 1):
        allowed = f"0..{num_prompt}, the prompt's length" if spec.embedding.num_types > 1 else "no types"
        return f"type_start: {start}, and there are {allowed}"
    size_bytes = find_answer_bytes(request, spec)
    if not can_split and size_bytes > _MAX_WHOLE_ANSWER_BYTES:
        return f"task: an answer of {size_bytes} bytes, and at most {_MAX_WHOLE_ANSWER_BYTES} come at once"
    width = pooling.count_width(spec.hidden_size)
    allowed = describe_bad_dimensions(
        params.dimensions, width, pooling.is_matryoshka, pooling.matryoshka_dimensions
    )
    return None if allowed is None else f"dimensions: {params.dimensions}, allowed: {allowed}"


def find_answer_bytes(request: EngineCoreRequest, spec: ModelSpec) -> int:
    """What is pooled of a request comes to so many bytes; 0 of one that generates."""
    params = request.pooling_params
    if params is None or spec.pooling is None:
        return 0
    width = params.dimensions or spec.pooling.count_width(spec.hidden_size)
    num_vectors = count_token_ids(request.prompt_token_ids) if params.is_token_wise else 1
    return num_vectors * width * FLOAT_BYTES


def needs_cached_tokens(pooling: PoolingSpec | None) -> bool:
    """Whether a vector is made of hidden states that a token found in the prefix cache does not have."""
    return pooling is not None and pooling.pools != ("last",)
