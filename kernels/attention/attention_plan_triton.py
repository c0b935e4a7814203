"""Which program attends to which keys of requests of one token: decided once a step, for all layers.

The host says how many programs a launch has; what each of them takes follows from the lengths and is decided
on the device, so a captured step stays right for any lengths. The kernels are in paged_attention_triton.py.
Legend: R requests.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..triton.dependent_launch_triton import launch_options, wait_for_inputs
from ..triton.launch_sizes import ceil_div

_jit: typing.Any = triton.jit

# Keys of a split in strict mode. Smaller ones fill the device at short lengths, larger ones need fewer sums.
STRICT_SPLIT_KEYS = 1024
MAX_SPLITS = 32  # of a request, if they are not strict
_MIN_SPLIT_KEYS = 128
# Programs that a launch should have for each processor of the device before splitting stops to pay.
_PROGRAMS_PER_PROCESSOR = 2
_REQUESTS = 256  # of a launch, and four times as many, and so on
_UNSPLIT = 1 << 30
ITEM_SIZE = tl.constexpr(4)  # of numbers: request, which of its splits, their count, keys of one
_TILE = 1 << 14  # items of a program of `_plan_kernel` times requests: more leave the registers


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What the host decides about a step's launches, once for all layers."""

    num_singles: int  # requests with one token
    num_chunks: int  # requests with more
    num_items: int  # programs over the keys of single-token requests, for each kv head
    num_split: int  # most requests whose keys several programs have
    split_keys: int  # keys of a split in strict mode, 0: as many as fill the device evenly
    shared_bytes: int  # that a program may have


@dataclass(frozen=True, slots=True)
class SplitWork:
    """What the device decides, once for all layers of a window: see `launch_plan`."""

    items: Tensor  # int32 [num_items, ITEM_SIZE]; a request that is no request is past the end
    split_items: Tensor  # int32 [num_split]: the first item of each request that has several, then -1


def plan_attention(
    num_singles: int,
    num_chunks: int,
    num_requests: int,
    num_kv_heads: int,
    max_seq_len: int,
    num_processors: int,
    is_strict: bool,
    strict_split_keys: int = STRICT_SPLIT_KEYS,
    shared_bytes: int = 227 << 10,
) -> AttentionPlan:
    """The plan of a step. `max_seq_len` bounds its requests' tokens in the cache, the new ones included.

    `num_requests` may be more than those with tokens: a captured step's are padded.
    """
    wanted = -(-_PROGRAMS_PER_PROCESSOR * num_processors // num_kv_heads)
    if is_strict:
        is_split = num_singles < wanted
        splits = -(-max_seq_len // strict_split_keys) if is_split else 1
        items, split, split_keys = num_requests * splits, num_requests if is_split else 0, strict_split_keys
    else:
        # No request that fits one split is cut, and cut ones have more keys than one: at most `wanted`.
        items, split, split_keys = num_requests + wanted, min(num_requests, wanted), 0
    return AttentionPlan(num_singles, num_chunks, items, split, split_keys, shared_bytes)


def launch_plan(
    plan: AttentionPlan, query_starts: Tensor, seq_lens: Tensor, window: int | None
) -> SplitWork | None:
    """The work of single-token requests as items, None without such requests. Waits for nothing.

    A request's items follow each other. Without strict mode all splits have about the same number of keys,
    so that one long request beside many short ones has as many programs as its length is worth.
    """
    if not plan.num_singles:
        return None
    num_requests = seq_lens.shape[0]
    items = seq_lens.new_empty((plan.num_items, ITEM_SIZE.value))
    split_items = seq_lens.new_empty(max(1, plan.num_split))
    block = _REQUESTS
    while block < num_requests:  # few sizes, for each is compiled
        block *= 4
    block_items = max(1, _TILE // block)
    _plan_kernel[(ceil_div(plan.num_items, block_items),)](
        query_starts, seq_lens, items, split_items, num_requests, plan.num_items, plan.num_split,
        max(1, plan.num_items - num_requests), plan.split_keys if plan.num_split else _UNSPLIT,
        IS_STRICT=plan.split_keys > 0, WINDOW=window or 0,
        MIN_KEYS=_MIN_SPLIT_KEYS, MAX_SPLITS=MAX_SPLITS, REQUESTS=block, ITEMS=block_items,
        num_warps=8, **launch_options(seq_lens.device),
    )  # fmt: skip
    return SplitWork(items, split_items)


@_jit(do_not_specialize=["num_requests", "num_items", "num_split", "target", "strict_keys"])
def _plan_kernel(
    query_starts: typing.Any, seq_lens: typing.Any, items: typing.Any, split_items: typing.Any,
    num_requests: typing.Any, num_items: typing.Any, num_split: typing.Any, target: typing.Any,
    strict_keys: typing.Any, IS_STRICT: tl.constexpr, WINDOW: tl.constexpr,
    MIN_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr, REQUESTS: tl.constexpr, ITEMS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """Each program makes some items of the plan, the first also the list of split requests."""
    wait_for_inputs(USE_PDL)
    requests = tl.arange(0, REQUESTS)
    is_request = requests < num_requests
    begin = tl.load(query_starts + requests, mask=is_request, other=0)
    is_single = tl.load(query_starts + requests + 1, mask=is_request, other=0) - begin == 1
    seq_len = tl.load(seq_lens + requests, mask=is_single, other=0)
    keys = seq_len
    if WINDOW > 0:
        keys = tl.minimum(keys, WINDOW + MIN_KEYS)  # some more, for the first tile is whole
    if IS_STRICT:
        split_size = strict_keys
        count = tl.cdiv(seq_len, split_size)
        if WINDOW > 0:
            count -= tl.maximum(0, seq_len - WINDOW) // split_size
    else:
        split_size = tl.cdiv(tl.sum(keys.to(tl.int64), 0), target).to(tl.int32)
        split_size = tl.maximum(split_size, tl.cdiv(tl.max(keys, 0), MAX_SPLITS))
        split_size = tl.cdiv(tl.maximum(split_size, MIN_KEYS), MIN_KEYS) * MIN_KEYS
        count = tl.cdiv(keys, split_size)
    count = tl.where(is_single, tl.maximum(count, 1), 0)
    end = tl.cumsum(count, 0)
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    is_before = end[None, :] <= item[:, None]
    request = tl.sum((is_before & is_request[None, :]).to(tl.int32), 1)
    split = item - tl.max(tl.where(is_before, end[None, :], 0), 1)
    is_own = requests[None, :] == request[:, None]  # pyright: ignore[reportArgumentType]
    own_count = tl.sum(tl.where(is_own, count[None, :], 0), 1)
    at = items + item * ITEM_SIZE
    is_item = item < num_items
    tl.store(at, request, mask=is_item)
    tl.store(at + 1, split, mask=is_item)
    tl.store(at + 2, own_count, mask=is_item)
    tl.store(at + 3, tl.zeros_like(item) + split_size, mask=is_item)
    if tl.program_id(0) == 0:
        is_split = count > 1
        place = tl.cumsum(is_split.to(tl.int32), 0) - 1
        tl.store(split_items + place, end - count, mask=is_split)
        num_found = tl.sum(is_split.to(tl.int32), 0)
        is_rest = (requests >= num_found) & (requests < num_split)
        tl.store(split_items + requests, tl.zeros_like(requests) - 1, mask=is_rest)
