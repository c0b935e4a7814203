"""PoolingParams: what a request that answers with a vector computes. Names and defaults are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..errors import PoolingParamsError
from .absent_arguments import PARAMS_FIELDS, drop_absent
from .param_fields import MAX_INT, bounds, make_plain, read_fields
from .sampling_params import TruncationSide

FLOAT_BYTES = 4  # of a vector's numbers, which are float32, little-endian, wherever they travel
PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
TOKEN_WISE: tuple[PoolingTask, ...] = ("token_embed", "token_classify")  # a vector for each token
EMBEDDING: tuple[PoolingTask, ...] = ("embed", "token_embed")


_OLD_NAMES = ("normalize", "softmax", "activation")  # of use_activation, in vLLM over time


class _TakesOldNames(msgspec.StructMeta):
    if not TYPE_CHECKING:  # a type checker goes by the class' own fields

        def __call__(cls, **values: Any) -> Any:
            for name in _OLD_NAMES:
                if (value := values.pop(name, None)) is not None:
                    values["use_activation"] = value
            return super().__call__(**drop_absent(values, PARAMS_FIELDS, PoolingParamsError))


class PoolingParams(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    metaclass=_TakesOldNames,
):
    """What is computed of one prompt; what a field means is its description.

    task: None takes that of the call (`LLM.embed`: "embed"); a request that is sent has one.
    truncate_prompt_tokens, truncation_side: the prompt is cut before it is sent, and nobody else reads them.

    Raises PoolingParamsError (a ValueError) on construction.
    """

    task: Annotated[PoolingTask, Meta(description="what is computed")] | None = None
    dimensions: (
        Annotated[int, bounds(1, MAX_INT, "keep so many of an embedding's numbers (Matryoshka models)")]
        | None
    ) = None
    use_activation: (
        Annotated[bool, Meta(description="normalise an embedding, apply a classifier's activation; default")]
        | None
    ) = None
    skip_reading_prefix_cache: (
        Annotated[bool, Meta(description="compute the whole prompt; default: with token-wise tasks")] | None
    ) = None
    truncate_prompt_tokens: (
        Annotated[int, bounds(-1, MAX_INT, "cut the prompt to so many tokens; -1: to what fits")] | None
    ) = None
    truncation_side: Annotated[
        TruncationSide, Meta(description="right: the prompt's first tokens are kept")
    ] = "right"

    def __post_init__(self) -> None:
        for name, default, check in _CHECKS:
            value = getattr(self, name)
            if value is not default:
                msgspec.structs.force_setattr(self, name, check(make_plain(value)))
        if self.dimensions is not None and self.task not in (None, *EMBEDDING):
            allowed = f"absent with task={self.task!r}, whose vector is not an embedding"
            raise PoolingParamsError("dimensions", self.dimensions, allowed)
        if self.is_token_wise and self.skip_reading_prefix_cache is False:
            allowed = f"absent or True with task={self.task!r}, which needs every position"
            raise PoolingParamsError("skip_reading_prefix_cache", False, allowed)

    def clone(self) -> PoolingParams:
        """A copy."""
        return msgspec.structs.replace(self)

    @property
    def is_token_wise(self) -> bool:
        """True if each token of the prompt has a vector."""
        return self.task in TOKEN_WISE

    @property
    def is_activated(self) -> bool:
        """True if an embedding is normalised, or a classifier's activation applied."""
        return self.use_activation is not False

    @property
    def reads_prefix_cache(self) -> bool:
        """True if blocks that the prefix cache holds may stand for a part of the prompt."""
        skips = self.skip_reading_prefix_cache
        return not self.is_token_wise if skips is None else not skips


def describe_bad_dimensions(
    size: int | None, width: int, is_matryoshka: bool, listed: Sequence[int]
) -> str | None:
    """What `dimensions` may be instead of `size`, where embeddings have `width` numbers; None: `size` may be.

    listed: the only sizes that a Matryoshka model was trained for; if empty, any.
    """
    if size is None or size == width:
        return None
    if not is_matryoshka:
        return f"absent or {width}: this model's embeddings cannot be cut (it is no Matryoshka model)"
    if listed:
        each = ", ".join(map(str, listed))
        return None if size in listed else f"absent or one of {each}, which this model was trained for"
    return None if size < width else f"absent or an integer from 1 to {width}, the width of its embeddings"


POOLING_FIELDS = read_fields(PoolingParams, PoolingParamsError)

# (field, default, its check): a value that is the default itself needs none.
_CHECKS = [
    (name, default, field.check_truncation if name == "truncate_prompt_tokens" else field.check)
    for (name, field), default in zip(POOLING_FIELDS.items(), PoolingParams.__struct_defaults__, strict=True)
]
