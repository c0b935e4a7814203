"""Beam search: what a user asks for, and what of it the core needs. Names and defaults are vLLM's.

Scores, and when a search ends, are those of transformers' `generate(num_beams=...)`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..errors import SamplingParamsError
from .param_fields import MAX_INT, make_plain, read_fields
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

    beam_width: BeamWidth
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)]
    ignore_eos: bool = False
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 0.0
    length_penalty: LengthPenalty = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Check every field; called again when a search begins, since fields can be assigned."""
        for name, field in _FIELDS.items():
            setattr(self, name, field.check(make_plain(getattr(self, name))))
        stopping = self.early_stopping = make_plain(self.early_stopping)
        if not isinstance(stopping, bool) and stopping != "never":
            raise SamplingParamsError("early_stopping", stopping, "True, False or 'never'")

    def to_search(self) -> BeamSearch:
        """What the core is told."""
        return BeamSearch(self.beam_width, self.length_penalty, self.early_stopping)


_FIELDS = read_fields(BeamSearchParams, SamplingParamsError)
del _FIELDS["early_stopping"]  # of more than one type
