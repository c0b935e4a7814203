"""KV groups: layers that keep K and V of the same tokens share a list of blocks in each request.

A group keeps all tokens, or those that the next token sees through a window: its blocks behind that are freed
while the request runs. All groups draw ids from one pool, so a block has the same bytes in each: layers are
dealt out so that every group fills the same places of a block as well as it can (vLLM's hybrid KV cache
manager does the same). What a group leaves empty of a block is the price, hence `assign_kv_groups` counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from msgspec.structs import replace

from .model_spec import KV_SCALE_BYTES, AttentionSpec, KVCacheDtype, LayerSpec, ModelSpec

_MAX_GROUPS = 8  # each has a block table in every row
_LEAST_GAIN = 0.9  # of what one group takes for the longest request: for less it is not worth several


def find_first_kept(num_computed: int, window: int | None, block_size: int) -> int:
    """The first block of a sequence that the token after `num_computed` others sees, or a later one."""
    return 0 if window is None else max(0, num_computed - window + 1) // block_size


def find_max_held(window: int, block_size: int, max_step_tokens: int) -> int:
    """The most blocks that a request holds of a group with a window: what the first token of a step sees, and
    the step's own tokens.
    """
    return -(-(window - 1 + max_step_tokens) // block_size) + 1


def assign_kv_groups(
    spec: ModelSpec, block_size: int, max_model_len: int, kv_dtype: KVCacheDtype = "auto"
) -> ModelSpec:
    """The spec of a whole model with its layers dealt out into groups, `kv_windows` and `kv_group`.

    One group that keeps everything, unless freeing saves a tenth of the longest request's KV.
    """
    windows = _find_windows(spec, max_model_len)
    if not spec.is_causal or not windows:
        return spec
    kinds: dict[tuple[int | None, int], list[int]] = {}
    for index, window in windows.items():
        kind = window, _count_numbers(spec.layers[index].attention, kv_dtype)
        kinds.setdefault(kind, []).append(index)
    whole = -(-max_model_len // block_size)
    total = whole * sum(size * len(layers) for (_, size), layers in kinds.items())
    if len(set(windows.values())) == 1:  # all blocks of a request are kept equally long, whatever they hold
        (window,) = set(windows.values())
        is_worth = _count_kept(window, whole, block_size) < _LEAST_GAIN * whole
        return replace(spec, kv_windows=(window,)) if is_worth else spec
    if any(layer.attention.latent for layer in spec.layers):  # which has no V of its own
        return spec
    place = math.lcm(*(size for _, size in kinds))  # numbers of K in a place
    num_places = {kind: -(-len(layers) * kind[1] // place) for kind, layers in kinds.items()}
    best: tuple[int, int] | None = None
    for places in range(1, max(num_places.values()) + 1):
        counts = {kind: -(-count // places) for kind, count in num_places.items()}
        blocks = sum(count * _count_kept(window, whole, block_size) for (window, _), count in counts.items())
        cost = blocks * places * place
        if sum(counts.values()) <= _MAX_GROUPS and (best is None or cost <= best[0]):
            best = cost, places
    if best is None or best[0] >= _LEAST_GAIN * total:
        return spec
    kv_windows: list[int | None] = []
    groups: dict[int, int] = {}  # layer -> group
    for kind in sorted(kinds, key=lambda kind: (kind[0] is not None, kind)):  # what keeps all comes first
        count = -(-num_places[kind] // best[1])
        for number, layer in enumerate(kinds[kind]):  # in turns, so that stages have a share of each group
            groups[layer] = len(kv_windows) + number % count
        kv_windows += [kind[0]] * count
    layers = [
        replace(layer, attention=replace(layer.attention, kv_group=groups.get(_find_source(layer, index), 0)))
        for index, layer in enumerate(spec.layers)
    ]
    return replace(spec, layers=tuple(layers), kv_windows=tuple(kv_windows))


def _count_kept(window: int | None, whole: int, block_size: int) -> int:
    """Blocks that a request of `whole` blocks holds while it decodes."""
    return whole if window is None else min(whole, -(-window // block_size) + 1)


def _find_source(layer: LayerSpec, index: int) -> int:
    """The layer whose K and V a layer reads."""
    return index if layer.attention.kv_layer is None else layer.attention.kv_layer


def _find_windows(spec: ModelSpec, max_model_len: int) -> dict[int, int | None]:
    """Of each layer that keeps K and V, the widest window through which it is read; None: all of it."""
    windows: dict[int, int | None] = {}
    for index, layer in enumerate(spec.layers):
        if layer.attention.num_heads == 0:
            continue
        window, source = layer.attention.window, _find_source(layer, index)
        before = windows.get(source, 0)
        if window is None or window >= max_model_len or before is None:
            windows[source] = None
        else:
            windows[source] = max(window, before)
    return windows


@dataclass(frozen=True, slots=True)
class BlockPlaces:
    """How a block is divided if layers are in several groups: `count` places of `size` numbers of K a token.

    `shares[group]` of a group's layers are in one place: layer j in place j // that, as its part j % that.
    """

    count: int
    size: int
    shares: tuple[int, ...]


def find_places(spec: ModelSpec, kv_dtype: KVCacheDtype) -> BlockPlaces:
    """The places of a block for a model, or for what a stage or rank has of it."""
    sizes: list[list[int]] = [[] for _ in spec.kv_windows]
    for layer in filter(lambda layer: layer.attention.keeps_kv, spec.layers):
        sizes[layer.attention.kv_group].append(_count_numbers(layer.attention, kv_dtype))
    size = math.lcm(*(each[0] for each in sizes if each))
    shares = tuple(size // each[0] if each else 1 for each in sizes)
    count = max(-(-len(each) // share) for each, share in zip(sizes, shares, strict=True))
    return BlockPlaces(count, size, shares)


def _count_numbers(attention: AttentionSpec, kv_dtype: KVCacheDtype) -> int:
    """What a token has in a layer's cache of keys, in numbers of the cache's type."""
    return attention.kv_size + (0 if kv_dtype == "auto" else attention.num_kv_heads * KV_SCALE_BYTES)
