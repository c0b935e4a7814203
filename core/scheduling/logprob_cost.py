"""What logprobs cost a step, and what that bounds.

Those of a whole vocabulary of 151,936 tokens are 1.2 MB at each position. A worker answers a step in one
message, and so is a client told of it: `codec.MAX_BODY_BYTES` bounds both.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...ipc.config import EngineConfig
from ...ipc.messages import EngineCoreRequest
from ...ipc.token_ids import count_token_ids
from .request import Request

# A prompt's token with a logprob, in those without: a row of logits is computed for it, and ranked (1 ms of a
# core at a vocabulary of 152,000).
SCORED_TOKEN_PRICE = 4
_ENTRIES_OF_A_TOKEN = 512  # logprobs, 8 bytes each, that cost as much as a token without
_MANY_ENTRIES = 4096  # of a sampled token: requests with fewer are bounded by max_num_seqs
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
