"""From vectors on the host to what is sent of them: cut, normalised or activated, and checked to be finite.

All in float32 and row by row, so that neither the number of vectors nor those beside one change a bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...ipc.model_spec import PoolingSpec
from ...ipc.pooling_params import PoolingParams
from .head import activate_array

_LEAST_NORM = np.float32(1e-12)  # as sentence-transformers': a vector of zeros stays one

Float32s = NDArray[np.float32]


def finish_vectors(
    vectors: Float32s, params: Sequence[PoolingParams], counts: Sequence[int], spec: PoolingSpec
) -> list[bytes | None]:
    """What is sent of `vectors` [P, width]: `counts[i]` of them belong to `params[i]`. None: not finite."""
    if not params:
        return []
    asked = [(each.dimensions, each.use_activation) for each in params]
    if len(set(asked)) == 1:  # as good as always: all at once
        vectors = _finish(vectors, params[0], spec)
        is_finite: NDArray[np.bool_] = np.asarray(np.isfinite(vectors).all(axis=1))
        size_bytes = vectors.itemsize * vectors.shape[1]
        data, ends = vectors.tobytes(), np.cumsum(counts).tolist()
        bounds = [(end - count, end) for count, end in zip(counts, ends, strict=True)]
        return [
            data[start * size_bytes : end * size_bytes] if is_finite[start:end].all() else None
            for start, end in bounds
        ]
    answers: list[bytes | None] = []
    start = 0
    for each, count in zip(params, counts, strict=True):
        answers += finish_vectors(vectors[start : start + count], [each], [count], spec)
        start += count
    return answers


def _finish(vectors: Float32s, params: PoolingParams, spec: PoolingSpec) -> Float32s:
    """Contiguous, in the order dimensions, normalise or activate."""
    if params.dimensions is not None:
        vectors = vectors[:, : params.dimensions]
    vectors = np.ascontiguousarray(vectors)
    if spec.num_labels:
        return activate_array(vectors, spec.activation) if params.is_activated else vectors
    wants_norm = spec.normalize if params.use_activation is None else params.use_activation
    return _normalize(vectors) if wants_norm else vectors


def _normalize(vectors: Float32s) -> Float32s:
    norms = np.sqrt((vectors * vectors).sum(axis=1, keepdims=True))
    return vectors / np.maximum(norms, _LEAST_NORM)
