"""RepetitionDetectionParams: when an output that repeats itself is ended. Names are vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from ..errors import SamplingParamsError
from .param_fields import read_fields

_NAME = "repetition_detection"
MAX_PATTERN_SIZE = 64  # the core looks at so many tokens for each new one
MAX_REPEATED_TOKENS = 4096  # which it looks at again when a request comes back


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End an output whose last tokens are `min_count` times the same min_ to max_pattern_size tokens.

    Checked with the SamplingParams that it is part of.
    """

    max_pattern_size: Annotated[int, Meta(ge=1, le=MAX_PATTERN_SIZE)]
    min_count: Annotated[int, Meta(ge=2, le=MAX_REPEATED_TOKENS)]
    min_pattern_size: Annotated[int, Meta(ge=1, le=MAX_PATTERN_SIZE)] = 1

    def verify(self) -> None:
        """Raise SamplingParamsError for what is out of range."""
        for name, field in _FIELDS.items():
            field.check(getattr(self, name))
        if self.min_pattern_size > (most := self.max_pattern_size):
            field = _FIELDS["min_pattern_size"].name
            raise SamplingParamsError(field, self.min_pattern_size, f"an integer from 1 to {most}")
        num_tokens = self.max_pattern_size * self.min_count
        if num_tokens > MAX_REPEATED_TOKENS:
            allowed = f"at most {MAX_REPEATED_TOKENS} tokens, max_pattern_size times min_count"
            raise SamplingParamsError(_NAME, f"{num_tokens} tokens", allowed)


_FIELDS = read_fields(RepetitionDetectionParams, SamplingParamsError, f"{_NAME}.")


def check_repetition_detection(value: Any) -> RepetitionDetectionParams | None:
    """The parameters, which may be given as a dict of them. Raises SamplingParamsError."""
    if value is None:
        return None
    params = value if isinstance(value, RepetitionDetectionParams) else _convert(value)
    params.verify()
    return params


def _convert(value: Any) -> RepetitionDetectionParams:
    names = RepetitionDetectionParams.__struct_fields__
    fields = cast(dict[Any, Any], value) if isinstance(value, dict) else {None: None}
    if not {"max_pattern_size", "min_count"} <= fields.keys() <= set(names):
        allowed = f"a RepetitionDetectionParams with {', '.join(names)}, or a dict of these"
        raise SamplingParamsError(_NAME, value, allowed)
    return RepetitionDetectionParams(**cast(dict[str, Any], fields))
