"""RepetitionDetectionParams: when an output that repeats itself is ended. Names are vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from ..errors import SamplingParamsError

_FIELD = "repetition_detection"
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
        _check_int("max_pattern_size", self.max_pattern_size, 1, MAX_PATTERN_SIZE)
        _check_int("min_count", self.min_count, 2, MAX_REPEATED_TOKENS)
        _check_int("min_pattern_size", self.min_pattern_size, 1, self.max_pattern_size)
        num_tokens = self.max_pattern_size * self.min_count
        if num_tokens > MAX_REPEATED_TOKENS:
            allowed = f"at most {MAX_REPEATED_TOKENS} tokens, max_pattern_size times min_count"
            raise SamplingParamsError(_FIELD, f"{num_tokens} tokens", allowed)


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
        raise SamplingParamsError(_FIELD, value, allowed)
    return RepetitionDetectionParams(**cast(dict[str, Any], fields))


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise SamplingParamsError(f"{_FIELD}.{name}", value, f"an integer from {low} to {high}")
