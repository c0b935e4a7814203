"""Truncation: a prompt that is longer than its request allows is cut (vLLM's truncate_prompt_tokens)."""

from __future__ import annotations

import msgspec

from ...ipc.errors import SamplingParamsError
from ...ipc.messages import EngineFacts
from ...ipc.sampling_params import SamplingParams


class Truncation(msgspec.Struct, frozen=True):
    """Keep `max_tokens` tokens of a prompt: its last ones, or its first ones (`keeps_start`)."""

    max_tokens: int
    keeps_start: bool = False

    def apply(self, token_ids: list[int]) -> list[int]:
        """What is kept; the list itself if that is all."""
        if len(token_ids) <= self.max_tokens:
            return token_ids
        return token_ids[: self.max_tokens] if self.keeps_start else token_ids[-self.max_tokens :]


def find_truncation(params: SamplingParams, facts: EngineFacts) -> Truncation | None:
    """What checked parameters say; None if a prompt that is too long is to be refused.

    -1 leaves room for max_tokens, or for one token if there is no such limit. Raises SamplingParamsError for
    what this engine has no room for.
    """
    asked = params.truncate_prompt_tokens
    if asked is None:
        return None
    room = min(facts.max_model_len, facts.num_gpu_blocks * facts.block_size)
    max_tokens = params.max_tokens or 1
    kept = room - max_tokens if asked == -1 else asked
    if kept < 1:
        allowed = f"max_tokens below {room}, the most tokens of a request here: it is {max_tokens}"
        raise SamplingParamsError("truncate_prompt_tokens", asked, allowed)
    if kept >= room:
        allowed = f"-1, or from 1 to {room - 1}: a request has at most {room} tokens here, one to generate"
        raise SamplingParamsError("truncate_prompt_tokens", asked, allowed)
    return Truncation(kept, params.truncation_side == "right")
