"""Pooler: the pools of all rows, and what is answered of a step's hidden states.

`pool` queues its work on the device; the LaunchedVectors that it returns are packed once on the host.
Legend: T tokens and R rows with pooling params of a step, P complete ones, Q tokens of token-wise tasks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.params.pooling_params import PoolingParams
from ...ipc.protocol.step import RowPooled, SchedulerOutput
from ...ipc.spec.model_spec import ModelSpec, PoolingSpec
from ...kernels.choice import choose_kernel, native_library
from ...kernels.sampling.pool_rows import find_divisors, launch_pool_rows, pool_rows_reference
from ..steps.staging import HostCopies, to_device
from .head import PoolingHead, activate_array

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]

_LEAST_NORM = np.float32(1e-12)  # as sentence-transformers': a vector of zeros stays one
_PoolRows = Callable[[Tensor, Int64s, Int64s, Int64s, Sequence[str], Tensor], None]


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The rows of a step that have pooling params, in the step's order."""

    rows: Int64s  # [R]
    starts: Int64s  # [R] first of its tokens among the step's
    num_tokens: Int64s  # [R] of them
    firsts: Int64s  # [R] its position in the prompt
    is_complete: NDArray[np.bool_]  # [R]
    params: list[PoolingParams]  # [R]


def find_pooled_rows(
    step: SchedulerOutput, num_tokens: Int64s, firsts: Int64s, pooling: Mapping[int, PoolingParams]
) -> PooledRows:
    """Those of a step whose rows begin at positions `firsts`; `pooling`: row -> its params."""
    places = [place for place, row in enumerate(step.rows) if row in pooling]
    rows, complete = [step.rows[place] for place in places], set(step.pooled_rows)
    return PooledRows(
        rows=np.array(rows, dtype=np.int64),
        starts=(np.cumsum(num_tokens) - num_tokens)[places],
        num_tokens=num_tokens[places],
        firsts=firsts[places],
        is_complete=np.array([row in complete for row in rows], dtype=np.bool_),
        params=[pooling[row] for row in rows],
    )


@dataclass(slots=True)
class LaunchedVectors:
    """What a step pools, on its way to the host."""

    rows: list[int]  # with one answer each: those of one vector, then those of a vector a token
    counts: list[int]  # vectors of each
    params: list[PoolingParams]
    spec: PoolingSpec
    copies: HostCopies  # [P, width] and [Q, width], as far as there are some

    def collect(self) -> tuple[list[RowPooled], list[int]]:
        """Wait; the answers, and the rows whose vectors are not finite."""
        parts = self.copies.wait()
        vectors = parts[0] if len(parts) == 1 else np.concatenate(parts)
        answers = finish_vectors(vectors, self.params, self.counts, self.spec)
        pairs = list(zip(self.rows, answers, strict=True))
        bad_rows = [row for row, data in pairs if data is None]
        return [RowPooled(row, data) for row, data in pairs if data is not None], bad_rows


class Pooler:
    """Pools, and makes answers of them, for the rows of one runner."""

    def __init__(self, spec: ModelSpec, head: PoolingHead, max_num_seqs: int, device: torch.device) -> None:
        assert spec.pooling is not None
        self._spec = spec.pooling
        self._head = head
        self._kinds = () if spec.pooling.pools == ("all",) else spec.pooling.pools
        shape = (max_num_seqs, len(self._kinds), spec.hidden_size)
        self._pools = torch.zeros(shape, dtype=torch.float32, device=device)
        self._device = device
        self._pool_rows: _PoolRows | None = None  # chosen with the first step, which says the type

    def pool(self, hidden: Tensor, step: PooledRows) -> LaunchedVectors | None:
        """Take in the hidden states [T, H] of a step; None if nothing is to be answered yet."""
        token_wise = np.array([params.is_token_wise for params in step.params], dtype=np.bool_)
        tensors: list[Tensor] = []
        whole, each = (~token_wise).nonzero()[0], token_wise.nonzero()[0]
        complete = whole[step.is_complete[whole]]
        if len(whole):
            self._take(hidden, step, whole)
        if len(complete):
            ends = step.firsts[complete] + step.num_tokens[complete]
            tensors.append(self._head(self._finish_pools(step.rows[complete], ends)))
        if len(each):
            tensors.append(self._project_tokens(hidden, step, each))
        if not tensors:
            return None
        places = [*complete.tolist(), *each.tolist()]
        return LaunchedVectors(
            rows=step.rows[places].tolist(),
            counts=[1] * len(complete) + step.num_tokens[each].tolist(),
            params=[step.params[place] for place in places],
            spec=self._spec,
            copies=HostCopies(tensors),
        )

    def _take(self, hidden: Tensor, step: PooledRows, places: Int64s) -> None:
        """Take the tokens of some rows into their pools."""
        if self._pool_rows is None:
            self._pool_rows = _choose_kernel(hidden)
        starts, counts = step.starts[places], step.num_tokens[places]
        bounds = np.zeros(len(counts) + 1, dtype=np.int64)
        counts.cumsum(out=bounds[1:])
        if starts[-1] + counts[-1] - starts[0] == bounds[-1]:
            bounds += starts[0]
        else:  # other rows' tokens lie between theirs
            hidden = hidden[to_device(_find_tokens(starts, counts), self._device)]
        self._pool_rows(
            hidden.contiguous(), step.rows[places], bounds, step.firsts[places], self._kinds, self._pools
        )

    def _finish_pools(self, rows: Int64s, num_tokens: Int64s) -> Tensor:
        """float32 [P, pools of hidden size] of prompts that are complete."""
        divisors = find_divisors(self._kinds, num_tokens)
        if self._device.type == "cpu":  # torch would wake its threads for it
            finished = self._pools.numpy()[rows] / divisors[:, :, None]
            return torch.from_numpy(finished).flatten(1)
        pools = self._pools[to_device(rows, self._device)]
        return (pools / to_device(divisors, self._device)[:, :, None]).flatten(1)

    def _project_tokens(self, hidden: Tensor, step: PooledRows, places: Int64s) -> Tensor:
        """float32 [Q, width]."""
        tokens = _find_tokens(step.starts[places], step.num_tokens[places])
        return self._head(hidden[to_device(tokens, self._device)].float())


def _find_tokens(starts: Int64s, counts: Int64s) -> Int64s:
    """The indexes starts[i] to starts[i] + counts[i], of all i."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)


def _choose_kernel(hidden: Tensor) -> _PoolRows:
    chosen = choose_kernel("pool_rows", hidden.dtype, hidden.device)
    if chosen == "native":
        library = native_library()
        return functools.partial(launch_pool_rows, library)
    if chosen == "triton":
        return _launch_triton
    return _pool_by_reference


def _launch_triton(
    hidden: Tensor, rows: Int64s, starts: Int64s, firsts: Int64s, kinds: Sequence[str], pools: Tensor
) -> None:
    from ...kernels.sampling.pool_rows_triton import launch_pool_rows as launch

    device = hidden.device
    launch(
        hidden, to_device(rows, device), to_device(starts, device), to_device(firsts, device), kinds, pools
    )


def _pool_by_reference(
    hidden: Tensor, rows: Int64s, starts: Int64s, firsts: Int64s, kinds: Sequence[str], pools: Tensor
) -> None:
    """On the host, wherever the tensors are."""
    on_host = pools.cpu()
    pool_rows_reference(hidden.cpu(), rows, starts, firsts, kinds, on_host)
    if on_host is not pools:
        pools.copy_(on_host)


def finish_vectors(
    vectors: Float32s, params: Sequence[PoolingParams], counts: Sequence[int], spec: PoolingSpec
) -> list[bytes | None]:
    """What is sent of `vectors` [P, width]: `counts[i]` of them belong to `params[i]`. None: not finite.

    They are cut, normalised or activated, in float32 and row by row, so that neither the number of vectors
    nor those beside one change a bit.
    """
    if not params:
        return []
    options = [(each.dimensions, each.use_activation) for each in params]
    if len(set(options)) == 1:  # as good as always: all at once
        vectors = _finish(vectors, params[0], spec)
        is_finite = np.isfinite(vectors)
        are_finite = bool(is_finite.all())
        size_bytes = vectors.itemsize * vectors.shape[1]
        data, ends = vectors.tobytes(), accumulate(counts)
        bounds = [(end - count, end) for count, end in zip(counts, ends, strict=True)]
        return [
            data[start * size_bytes : end * size_bytes] if are_finite or is_finite[start:end].all() else None
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
