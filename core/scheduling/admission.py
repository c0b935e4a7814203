"""What the engine refuses at once: requests that could never run here, or find the queue full; and why.

The frontend has checked requests with more knowledge; this is the core's own line, so that no client can make
a step fail or wait for ever. Pure functions, which take nothing on.
"""

from __future__ import annotations

import math
from array import array
from functools import lru_cache

from ...ipc.protocol.fair_share import has_room
from ...ipc.protocol.messages import EngineCoreRequest
from ...ipc.protocol.token_ids import TOKEN_SIZE_BYTES, count_token_ids, decode_token_ids
from ...ipc.protocol.token_lists import TokenLists, has_unpacked, is_token_mask
from ...ipc.spec.config import EngineConfig, SchedulerConfig
from .answer_cost import find_bad_logprobs, find_bad_pooling
from .scheduler import Scheduler
from .tenant import Tenant, TenantLedger


def find_refusal(request: EngineCoreRequest, config: EngineConfig, num_blocks: int) -> str | None:
    """Why this request can never run on a cache of `num_blocks` blocks, None if it can.

    Lengths come first: they bound what the checks of ids cost.
    """
    vocab_size = config.model.spec.vocab_size
    return (
        _find_odd_size("prompt_token_ids", request.prompt_token_ids)
        or _find_odd_size("output_token_ids", request.output_token_ids)
        or _find_bad_length(request, config.model.max_model_len)
        or _find_bad_token("prompt_token_ids", request.prompt_token_ids, vocab_size)
        or _find_bad_token("output_token_ids", request.output_token_ids, vocab_size)
        or _find_bad_parameter(request, vocab_size)
        or find_bad_pooling(request, config.model.spec, config.scheduler.enable_chunked_prefill)
        or find_bad_logprobs(request, config)
        or _find_lack_of_blocks(request, config, num_blocks)
    )


def _find_odd_size(field: str, packed: bytes) -> str | None:
    if len(packed) % TOKEN_SIZE_BYTES:
        return f"{field}: {len(packed)} bytes, not a whole number of int32"
    return None


def _find_bad_token(field: str, packed: bytes, vocab_size: int) -> str | None:
    if odd := _find_odd_size(field, packed):
        return odd
    # As unsigned numbers negative ids are the largest: one pass finds both kinds.
    largest = max(array("I", packed), default=0)
    if largest < vocab_size:
        return None
    bad = largest if largest < 2**31 else largest - 2**32
    return f"{field}: token id {bad} is not in 0..{vocab_size - 1}"


def _find_bad_parameter(request: EngineCoreRequest, vocab_size: int) -> str | None:
    """A token id outside the vocabulary would be an index outside the logits, in everybody's step."""
    options = request.options
    shown = {"request_id": [request.request_id], "tenant": [options.tenant], "names": options.names}
    for field, texts in shown.items():  # in logs and terminals
        if not all(text.isprintable() for text in texts):
            return f"{field}: only printable characters"
    if has_unpacked(request.sampling_params):
        return "sampling_params: lists of token ids and texts do not travel in it"
    for token_id in request.eos_token_ids:
        if not 0 <= token_id < vocab_size:
            return f"eos_token_ids: token id {token_id} is not in 0..{vocab_size - 1}"
    lists = request.token_lists
    return _find_bad_lists(lists, vocab_size) if lists.size_bytes else None


@lru_cache(maxsize=16)
def _find_bad_lists(lists: TokenLists, vocab_size: int) -> str | None:
    """The longest take 0.5 ms, and all sequences of a request have the same."""
    return (
        _find_bad_set("allowed_token_ids", lists.allowed, vocab_size)
        or _find_bad_token("logit_bias", lists.bias_ids, vocab_size)
        or _find_bad_token("stop_token_ids", lists.stop, vocab_size)
        or _find_bad_token("bad_words", lists.bad_words, vocab_size)
        or _find_bad_token("logprob_token_ids", lists.logprobs, vocab_size)
        or _find_bad_counts(lists)
    )


def _find_bad_set(field: str, packed: bytes, vocab_size: int) -> str | None:
    if not is_token_mask(packed, vocab_size):
        return _find_bad_token(field, packed, vocab_size)
    if int.from_bytes(packed, "little").bit_length() > vocab_size:
        return f"{field}: a bit beyond token id {vocab_size - 1}"
    return None


def _find_bad_counts(lists: TokenLists) -> str | None:
    """Lists that belong together and do not fit each other."""
    if len(lists.bias_ids) != len(lists.bias_values):
        return "logit_bias: as many ids as values"
    if not all(map(math.isfinite, memoryview(lists.bias_values).cast("f"))):
        return "logit_bias: finite values"
    if odd := _find_odd_size("bad_words: lengths", lists.bad_word_lengths):
        return odd
    counts = decode_token_ids(lists.bad_word_lengths)
    if min(counts, default=1) < 1:
        return "bad_words: an empty list of token ids"
    if sum(counts) != count_token_ids(lists.bad_words):
        return f"bad_words: {count_token_ids(lists.bad_words)} token ids, and lengths of {sum(counts)}"
    return None


def _find_bad_length(request: EngineCoreRequest, max_model_len: int) -> str | None:
    num_prompt = count_token_ids(request.prompt_token_ids)
    num_output = count_token_ids(request.output_token_ids)
    if num_prompt == 0:
        return "prompt_token_ids: empty, at least one token is needed"
    if request.pooling_params is not None:
        if num_prompt > max_model_len:
            return f"the prompt has {num_prompt} tokens, more than max_model_len={max_model_len}"
        return None
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
    if request.pooling_params is not None:
        longest = num_prompt + 1
    block_size = config.cache.block_size
    num_needed = config.count_blocks(longest - 1)  # the last generated token's K and V are not computed
    if num_needed <= num_blocks or not config.block_size_bytes:
        return None
    return (
        f"the request may grow to {longest} tokens, which takes {num_needed} KV blocks of {block_size}, and "
        f"there are {num_blocks}: lower max_tokens, or raise kv_cache_memory_bytes, gpu_memory_utilization "
        "or num_gpu_blocks_override"
    )


def find_overload(
    request: EngineCoreRequest,
    tenant: Tenant,
    held_bytes: int,
    config: SchedulerConfig,
    scheduler: Scheduler,
    tenants: TenantLedger,
    *,
    is_bounded: bool = False,
) -> str | None:
    """Why this request may not wait, None if it may. The tenant's account has it and its bytes already.

    Under the fair policy a tenant has its share of both bounds. A resumed request was taken on before, so
    it finds a place; its bytes do while there are twice as many, which is as far as shares reach. Of a client
    that is not simply believed (`is_bounded`) so do places, with those that can run.
    """
    was_taken_on = request.is_resumed or bool(request.output_token_ids)
    policy = scheduler.policy
    part = tenant.weight / tenants.active_weight if policy.shares_bounds else 0.0
    bound = config.max_num_queued_reqs
    if bound is not None and was_taken_on:
        bound = 2 * (bound + config.max_num_seqs) if is_bounded else None
    if bound is not None:
        taken = scheduler.num_queued + max(0, len(policy.parked) - config.max_num_seqs)
        if not has_room(1, taken, tenant.num_live - 1 - tenant.num_rows, bound, part):
            return f"{taken} requests wait already, and max_num_queued_reqs={bound}: try again later"
    bound = config.max_queued_bytes
    if bound is not None:
        taken, own = tenants.held_bytes - held_bytes, tenant.held_bytes - held_bytes
        if not has_room(held_bytes, taken, own, 2 * bound if was_taken_on else bound, part):
            return (
                f"it takes {held_bytes} bytes, live requests hold {taken} ({own} of them this tenant's), "
                f"and max_queued_bytes={bound}: try again later"
            )
    return None
