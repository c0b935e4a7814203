"""What a user gets back of a call that computes vectors. Names are vLLM's.

The numbers stay the worker's bytes (float32, little-endian) until they are asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar, overload

from ....ipc.errors import RequestFailedError
from ....ipc.params.pooling_params import FLOAT_BYTES
from ...outputs import RequestMetrics

Output = TypeVar("Output")


class TokenVectors(Sequence["memoryview[float]"]):
    """A vector for each token. numpy takes all of them without a copy, as it does one."""

    __slots__ = ("_flat", "shape")

    def __init__(self, flat: memoryview[float], num_rows: int) -> None:
        self._flat = flat
        self.shape = num_rows, len(flat) // num_rows

    def __len__(self) -> int:
        return self.shape[0]

    @overload
    def __getitem__(self, place: int) -> memoryview[float]: ...
    @overload
    def __getitem__(self, place: slice) -> list[memoryview[float]]: ...
    def __getitem__(self, place: int | slice) -> memoryview[float] | list[memoryview[float]]:
        if isinstance(place, slice):
            return [self[row] for row in range(len(self))[place]]
        start = range(len(self))[place] * self.shape[1]
        return self._flat[start : start + self.shape[1]]

    def tolist(self) -> list[list[float]]:
        """A list for each token."""
        return [list(row) for row in self]

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """numpy's protocol for memory that it does not own."""
        return {"version": 3, "shape": self.shape, "typestr": "<f4", "data": self._flat}

    def __repr__(self) -> str:
        return f"TokenVectors(shape={self.shape})"


@dataclass(slots=True)
class PoolingOutput:
    """One vector, or of a token-wise task `num_rows` of them. `raw`: b"" when the request failed."""

    raw: bytes
    num_rows: int | None = None

    @property
    def data(self) -> memoryview[float] | TokenVectors:
        """The numbers, not copied: [width], or [tokens, width]. numpy takes it, `tolist` makes lists."""
        flat = memoryview(self.raw).cast("f")
        return TokenVectors(flat, self.num_rows) if self.num_rows and self.raw else flat

    def __repr__(self) -> str:
        return f"PoolingOutput(shape={tuple(self.data.shape or ())})"


@dataclass(slots=True)
class _Vector:
    """`raw`: float32, little-endian; b"" when the request failed. A list is made when it is asked for."""

    raw: bytes = field(repr=False)
    _list: list[float] | None = field(default=None, init=False, repr=False, compare=False)

    def _make_list(self) -> list[float]:
        if self._list is None:
            self._list = array("f", self.raw).tolist()
        return self._list


class EmbeddingOutput(_Vector):
    """An embedding."""

    __slots__ = ()

    @property
    def embedding(self) -> list[float]:
        """The numbers; [] when the request failed."""
        return self._make_list()

    @property
    def hidden_size(self) -> int:
        """How many numbers there are."""
        return len(self.raw) // FLOAT_BYTES

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


class ClassificationOutput(_Vector):
    """What a classifier makes of a text."""

    __slots__ = ()

    @property
    def probs(self) -> list[float]:
        """A number for each of the model's classes, in their order; [] when the request failed."""
        return self._make_list()

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.raw) // FLOAT_BYTES

    def __repr__(self) -> str:
        return f"ClassificationOutput(num_classes={self.num_classes})"


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts fit, higher is better; NaN when the request failed."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Output]):
    """The result of one request.

    num_cached_tokens: prompt tokens that the prefix cache already held. finish_reason: 'stop'; 'abort' or
    'error' when there is no vector, with the cause in `error` and its ErrorCode's name in `error_code`.
    """

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True
    finish_reason: str = "stop"
    error: str | None = None
    error_code: str | None = None
    metrics: RequestMetrics | None = None

    def check(self) -> Self:
        """Itself. Raises RequestFailedError if the engine has failed the request, or somebody aborted it."""
        if self.error is not None:
            raise RequestFailedError(self.error, self.error_code)
        return self


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Of `LLM.embed`."""

    __slots__ = ()


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Of `LLM.classify`."""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Of `LLM.score`."""

    __slots__ = ()


def to_embedding(output: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
    """The vector as an embedding."""
    return EmbeddingRequestOutput(output.request_id, EmbeddingOutput(output.outputs.raw), *_rest_of(output))


def to_classification(output: PoolingRequestOutput[PoolingOutput]) -> ClassificationRequestOutput:
    """The vector as the numbers of classes."""
    classification = ClassificationOutput(output.outputs.raw)
    return ClassificationRequestOutput(output.request_id, classification, *_rest_of(output))


def to_score(output: PoolingRequestOutput[PoolingOutput]) -> ScoringRequestOutput:
    """The one number of a classifier of pairs."""
    raw = output.outputs.raw
    score = ScoringOutput(memoryview(raw).cast("f")[0] if raw else float("nan"))
    return ScoringRequestOutput(output.request_id, score, *_rest_of(output))


def _rest_of(
    output: PoolingRequestOutput[PoolingOutput],
) -> tuple[list[int], int, bool, str, str | None, str | None, RequestMetrics | None]:
    return (
        output.prompt_token_ids,
        output.num_cached_tokens,
        output.finished,
        output.finish_reason,
        output.error,
        output.error_code,
        output.metrics,
    )
