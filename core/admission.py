"""What the engine refuses at once: requests that could never run here, with the numbers in the text.

The frontend has checked requests with more knowledge; this is the core's own line, so that no client can make
a step fail or wait for ever. Pure functions of a request and the engine's limits.
"""

from __future__ import annotations

import itertools

from ..ipc.config import EngineConfig
from ..ipc.messages import EngineCoreRequest
from ..ipc.token_ids import TOKEN_SIZE_BYTES, count_token_ids


def find_refusal(request: EngineCoreRequest, config: EngineConfig, num_blocks: int) -> str | None:
    """Why this request can never run on a cache of `num_blocks` blocks, None if it can."""
    vocab_size = config.model.shape.vocab_size
    return (
        _find_bad_token("prompt_token_ids", request.prompt_token_ids, vocab_size)
        or _find_bad_token("output_token_ids", request.output_token_ids, vocab_size)
        or _find_bad_parameter(request, vocab_size)
        or _find_bad_length(request, config.model.max_model_len)
        or _find_lack_of_blocks(request, config, num_blocks)
    )


def _find_bad_token(field: str, packed: bytes, vocab_size: int) -> str | None:
    if len(packed) % TOKEN_SIZE_BYTES:
        return f"{field}: {len(packed)} bytes, not a whole number of int32"
    # As unsigned numbers negative ids are the largest: one pass finds both kinds.
    largest = max(memoryview(packed).cast("I"), default=0)
    if largest < vocab_size:
        return None
    bad = largest if largest < 2**31 else largest - 2**32
    return f"{field}: token id {bad} is not in 0..{vocab_size - 1}"


def _find_bad_parameter(request: EngineCoreRequest, vocab_size: int) -> str | None:
    """A token id outside the vocabulary would be an index outside the logits, in everybody's step."""
    params = request.sampling_params
    ids_of = {
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "stop_token_ids": params.stop_token_ids or (),
        "eos_token_ids": request.eos_token_ids,
        "bad_words": itertools.chain.from_iterable(request.bad_words_token_ids),
    }
    for field, ids in ids_of.items():
        bad = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
        if bad is not None:
            return f"{field}: token id {bad} is not in 0..{vocab_size - 1}"
    if not all(request.bad_words_token_ids):
        return "bad_words: an empty list of token ids"
    return None


def _find_bad_length(request: EngineCoreRequest, max_model_len: int) -> str | None:
    num_prompt = count_token_ids(request.prompt_token_ids)
    num_output = count_token_ids(request.output_token_ids)
    if num_prompt == 0:
        return "prompt_token_ids: empty, at least one token is needed"
    if num_prompt >= max_model_len:
        return (
            f"the prompt has {num_prompt} tokens, and with at least 1 to generate that is more than "
            f"max_model_len={max_model_len}"
        )
    if num_prompt + num_output > max_model_len:
        return (
            f"the prompt has {num_prompt} tokens and {num_output} are generated, more than "
            f"max_model_len={max_model_len}"
        )
    return None


def _find_lack_of_blocks(request: EngineCoreRequest, config: EngineConfig, num_blocks: int) -> str | None:
    num_prompt = count_token_ids(request.prompt_token_ids)
    longest = config.model.max_model_len
    max_tokens = request.sampling_params.max_tokens
    if max_tokens is not None:
        longest = min(num_prompt + max_tokens, longest)
    longest = max(longest, num_prompt + count_token_ids(request.output_token_ids))
    block_size = config.cache.block_size
    num_needed = -(
        -(longest - 1) // block_size
    )  # nothing follows the last token: its K and V are not computed
    if num_needed <= num_blocks:
        return None
    return (
        f"the request may grow to {longest} tokens, which takes {num_needed} KV blocks of {block_size}, and "
        f"there are {num_blocks}: lower max_tokens, or raise kv_cache_memory_bytes, gpu_memory_utilization "
        "or num_gpu_blocks_override"
    )
