"""Beam search: what a user asks for, and what of it the core needs. Names and defaults are vLLM's.

Scores, and when a search ends, are those of transformers' `generate(num_beams=...)`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..errors import SamplingParamsError
from .param_fields import MAX_INT, make_plain
from .sampling_params import MAX_N

# Beyond these a length to this power leaves float32.
MAX_LENGTH_PENALTY = 5.0

BeamWidth = Annotated[int, Meta(ge=1, le=MAX_N)]
LengthPenalty = Annotated[float, Meta(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)]
EarlyStopping = bool | Literal["never"]


class BeamSearch(msgspec.Struct, array_like=True, frozen=True):
    """How the core searches. A score is a sequence's logprob over (its number of tokens) ** length_penalty.

    early_stopping: True ends as soon as `width` sequences have ended; False, when the best beam's score at
    its present length is no better than the worst of those; "never", when no length could make it better.
    """

    width: BeamWidth
    length_penalty: LengthPenalty = 1.0
    early_stopping: EarlyStopping = False

    def count_candidates(self, num_eos_token_ids: int) -> int:
        """The likeliest tokens of a beam that are looked at: each may be the end, and `width` must go on."""
        return max(2, 1 + num_eos_token_ids) * self.width


class BeamSearchParams(msgspec.Struct, forbid_unknown_fields=True):
    """A beam search of one prompt, which ends with the `beam_width` best sequences.

    temperature changes nothing, as in vLLM: beams are ranked by the model's own logprobs.
    include_stop_str_in_output: leave the end-of-sequence token in tokens and text. early_stopping: as in
    transformers. Raises SamplingParamsError (a ValueError) on construction.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Check every field; called again when a search begins, since fields can be assigned."""
        for name in self.__struct_fields__:
            setattr(self, name, make_plain(getattr(self, name)))
        self.beam_width = _check_int("beam_width", self.beam_width, MAX_N)
        self.max_tokens = _check_int("max_tokens", self.max_tokens, MAX_INT)
        self.temperature = _check_float("temperature", self.temperature, 0.0, 2.0)
        self.length_penalty = _check_float(
            "length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        )
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise SamplingParamsError(name, getattr(self, name), "True or False")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise SamplingParamsError("early_stopping", self.early_stopping, "True, False or 'never'")

    def to_search(self) -> BeamSearch:
        """What the core is told."""
        stopping: EarlyStopping = "never" if self.early_stopping == "never" else self.early_stopping is True
        return BeamSearch(self.beam_width, self.length_penalty, stopping)


def _check_int(name: str, value: Any, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise SamplingParamsError(name, value, f"an integer from 1 to {most}")
    return value


def _check_float(name: str, value: Any, low: float, high: float) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # NaN is neither
        raise SamplingParamsError(name, value, f"a number from {low:g} to {high:g}")
    return float(value)
