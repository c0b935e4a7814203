"""What answers cost a step, logprobs and vectors, and what that bounds. Pure.

Logprobs of a whole vocabulary of 151,936 tokens are 1.2 MB at each position. A worker answers a step in one
message, and so is a client told of it: `codec.MAX_BODY_BYTES` bounds both.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...ipc.params.pooling_params import FLOAT_BYTES, describe_bad_dimensions
from ...ipc.protocol.messages import EngineCoreRequest
from ...ipc.protocol.token_ids import count_token_ids
from ...ipc.spec.config import EngineConfig
from ...ipc.spec.model_spec import ModelSpec, PoolingSpec
from .request import Request

# A prompt's token with a logprob, in those without: a row of logits is computed for it, and ranked (1 ms of a
# core at a vocabulary of 152,000).
SCORED_TOKEN_PRICE = 4
_ENTRIES_OF_A_TOKEN = 512  # logprobs, 8 bytes each, that cost as much as a token without
_MANY_ENTRIES = 4096  # of a sampled token: requests with fewer are bounded by max_num_seqs
_ENTRIES_OF_A_US = 16
_MAX_SAMPLED_ENTRIES = 2 * 1024 * 1024  # 16 MB a step
_MAX_WHOLE_ENTRIES = 8 * 1024 * 1024  # 64 MB, of a prompt that is computed in one step


def find_token_price(request: Request) -> int:
    """What a token of its prompt takes of a step's budget for long prompts."""
    num_others = request.sampling_params.prompt_logprobs
    return 1 if num_others is None else max(SCORED_TOKEN_PRICE, (1 + num_others) // _ENTRIES_OF_A_TOKEN)


def may_run_beside(request: Request, running: Iterable[Request]) -> bool:
    """False if the logprobs of a step that samples all of them would be too many."""
    own = _count_sampled_entries(request)
    if own < _MANY_ENTRIES:
        return True
    others = sum(count for one in running if (count := _count_sampled_entries(one)) >= _MANY_ENTRIES)
    return own + others <= max(own, _MAX_SAMPLED_ENTRIES)


def find_logprobs_work_us(request: Request) -> int:
    """What the logprobs of one of its tokens are reckoned to take: 10 ms of a core for 152,000 of them."""
    num_entries = _count_sampled_entries(request)
    return num_entries // _ENTRIES_OF_A_US if num_entries >= _MANY_ENTRIES else 0


def find_bad_logprobs(request: EngineCoreRequest, config: EngineConfig) -> str | None:
    """Why the engine refuses what the request asks for, None if it does not."""
    params, vocab_size = request.sampling_params, config.model.spec.vocab_size
    for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if asked is not None and not 0 <= asked <= vocab_size:
            return f"{name}: {asked} alternatives are not in 0..{vocab_size}"
    if params.prompt_logprobs is None or config.scheduler.enable_chunked_prefill:
        return None
    num_entries = count_token_ids(request.prompt_token_ids) * (1 + params.prompt_logprobs)
    if num_entries > _MAX_WHOLE_ENTRIES:
        return (
            f"prompt_logprobs: {num_entries} of them in one step, and at most {_MAX_WHOLE_ENTRIES} may be "
            "without enable_chunked_prefill"
        )
    return None


def _count_sampled_entries(request: Request) -> int:
    num_others = request.sampling_params.logprobs
    return 0 if num_others is None else 1 + num_others


# Of the token-wise answers of a step, beyond that of the first request.
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
    if request.output_token_ids or request.grammar:
        return "pooling_params: neither output_token_ids nor a grammar"
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
