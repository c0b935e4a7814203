"""KVCacheManager: which blocks a request holds, and which of them others may share.

A request holds blocks of each KV group (ipc/spec/kv_groups.py), whose ids come from one pool. Of a group
that keeps everything it gets the blocks of all its known tokens when it is admitted and one more whenever
decoding fills the last, and they stay until it ends. Of a group with a window it gets as many as a step has
room for, and more as it goes on; those behind the window are released when it is next scheduled (`make_room`,
`grow`): the steps that read them are in flight by then, and the worker computes steps in order.

A prefix hit is the longest beginning of which each group still has what the next token sees: all blocks, or
those that the window reaches. A group with a window may have lost or never shared the ones before.
Every block is found by its content's name and its group.

A model with recurrent layers has states beside: each running request a slot, and snapshots, which are found
by the name of the block that ends where they do (state_slots.py). A hit needs a snapshot at its end too. A
preempted request leaves its blocks, the last one in part, and its states to itself.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ...ipc.protocol.token_ids import TOKEN_SIZE_BYTES
from ...ipc.spec.kv_groups import find_first_kept, find_max_held
from ...ipc.spec.model_spec import ModelSpec, has_dynamic_rope
from ..scheduling.request import NEVER, HeldBlocks, Request
from .block_pool import BlockPool
from .prefix_misses import PrefixMiss, PrefixMisses
from .state_slots import Snapshot, StateSlots

HASH_SIZE_BYTES = 16
SEED_SIZE_BYTES = 32
# Tokens between states of a long prompt that are saved where slots are free.
SAVE_INTERVAL = 2048
MIN_AWAITED_TOKENS = 64  # for which a request waits a step
# The last tokens of a chat's prompt may open a thought, which the next turn's prompt does not have.
MAX_DROPPED_TOKENS = 4


class BlockHasher:
    """Names full KV blocks by content, each block once in a request's life.

    Equal names mean equal K and V: a block's hash covers its token ids and its parent's hash, hence all
    tokens before it, and the root covers whatever else K and V depend on. Hashes are keyed per process, so
    that nobody outside can construct two prompts that collide.
    """

    def __init__(self, block_size: int, spec: ModelSpec, seed: bytes | None = None) -> None:
        self._block_size = block_size
        self._block_size_bytes = block_size * TOKEN_SIZE_BYTES
        self._key = os.urandom(SEED_SIZE_BYTES) if seed is None else seed[: hashlib.blake2b.MAX_KEY_SIZE]
        self._has_dynamic_rope = has_dynamic_rope(spec)
        self._original_length = spec.max_position_embeddings
        self._hash_prompt = lru_cache(maxsize=8)(self._hash)  # keeps prompts: few

    def extend(self, request: Request) -> list[bytes]:
        """Extend `request.block_hashes` to all full blocks of its known tokens, and return it."""
        hashes = request.block_hashes
        num_full = request.num_tokens // self._block_size
        if num_full <= len(hashes):
            return hashes
        if request.is_continued and not hashes:  # others come with the same prompt
            size_bytes = len(request.prompt_token_ids) // self._block_size_bytes * self._block_size_bytes
            hashes += self._hash_prompt(self._root_of(request), request.prompt_token_ids[:size_bytes])
        parent = hashes[-1] if hashes else self._root_of(request)
        start = len(hashes) * self._block_size
        hashes += self._hash(parent, request.packed_tokens(start, num_full * self._block_size))
        return hashes

    def _hash(self, parent: bytes, packed: bytes) -> list[bytes]:
        """The names of full blocks that follow `parent`."""
        hashes: list[bytes] = []
        step, key, blake2b = self._block_size_bytes, self._key, hashlib.blake2b
        for offset in range(0, len(packed), step):
            data = parent + packed[offset : offset + step]
            parent = blake2b(data, digest_size=HASH_SIZE_BYTES, key=key).digest()
            hashes.append(parent)
        return hashes

    def name_tail(self, request: Request, num_tokens: int) -> bytes | None:
        """The name of the block that its first `num_tokens` tokens fill in part; None if there is none."""
        num_full, num_rest = divmod(num_tokens, self._block_size)
        if not num_rest:
            return None
        hashes = self.extend(request)
        parent = hashes[num_full - 1] if num_full else self._root_of(request)
        data = parent + request.packed_tokens(num_full * self._block_size, num_tokens)
        return hashlib.blake2b(data, digest_size=HASH_SIZE_BYTES, key=self._key).digest()

    def _root_of(self, request: Request) -> bytes:
        """The parent of a request's first block: what K and V depend on beside the tokens before them."""
        length = request.num_prompt_tokens
        # Dynamic rope takes its base from the prompt's length once that exceeds the trained one.
        rope_length = length if self._has_dynamic_rope and length > self._original_length else 0
        data = rope_length.to_bytes(8, "little") + request.options.cache_salt.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, digest_size=HASH_SIZE_BYTES, key=self._key, person=b"root").digest()


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached beginning of a request: so many whole blocks of its sequence, and the ids in each group.

    `tail`: the block after them in each group, of which it can use the first tokens; empty: none.
    """

    num_blocks: int
    groups: list[HeldBlocks]
    num_tokens: int
    tail: list[int] = field(default_factory=list[int])
    state: Snapshot | None = None  # after its last token, of a model with recurrent layers
    num_kv_blocks: int = 0  # of the longest hit that there would be without these

    @property
    def block_ids(self) -> Collection[int]:
        """Of all groups."""
        if len(self.groups) == 1:
            return self.groups[0].ids
        return {block_id for held in self.groups for block_id in held.ids}


class KVCacheManager:
    """Allocates blocks of a BlockPool to requests and keeps the prefix index."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        hasher: BlockHasher | None,
        misses: PrefixMisses | None = None,
        *,
        has_kv: bool = True,
        can_pool_hits: bool = True,
        windows: Sequence[int | None] = (None,),
        max_step_tokens: int = 1,
        states: StateSlots | None = None,
    ) -> None:
        """`hasher` None turns prefix caching off. `misses` explains why a prefix was not found.

        has_kv: False for a model whose requests need no blocks. can_pool_hits: whether a prompt with a prefix
        hit can be pooled. windows: of the KV groups, as `ModelSpec.kv_windows`. max_step_tokens: the most of
        one request in a step. states: of a model with recurrent layers.
        """
        self.pool = pool
        self.block_size = block_size
        self._hasher = hasher
        self._misses = misses or PrefixMisses(block_size)
        self.has_kv = has_kv
        self._can_pool_hits = can_pool_hits
        self.states = states
        self._windows = windows
        self.num_groups = len(windows)
        # (group, window, the most blocks that a request holds of it)
        self._windowed = [
            (group, window, find_max_held(window, block_size, max_step_tokens))
            for group, window in enumerate(windows)
            if window is not None
        ]
        self._whole = [group for group, window in enumerate(windows) if window is None] if has_kv else []
        self._tags = [b"", *(bytes((group,)) for group in range(1, len(windows)))]

    def count_blocks(self, num_tokens: int) -> int:
        """Blocks of a sequence of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size) if self.has_kv else 0

    def reads_cache(self, request: Request) -> bool:
        """False if every token must be computed: caching is off, or the request asks for it."""
        if self._hasher is None:
            return False
        if request.pooling_params is not None:
            return self._can_pool_hits and request.pooling_params.reads_prefix_cache
        return request.sampling_params.reads_prefix_cache

    def find_prefix(self, request: Request, max_blocks: int | None = None) -> PrefixHit:
        """The longest cached prefix, of at most `max_blocks`. The last token is never in it: it is computed,
        to sample the next one or to be pooled.

        Without a bound it may end within a block: of a request that `is_continued` says, which may find all
        but its last token as an earlier one has left it (`index_tail`), or that was preempted.
        """
        if self._hasher is None or not self.reads_cache(request):
            return PrefixHit(0, [HeldBlocks() for _ in self._windows], 0)
        most = self._max_hits(request) if max_blocks is None else max_blocks
        hit = self._find_whole_blocks(request, most)
        return hit if max_blocks is not None else self._find_tail(request, hit) or hit

    def _find_whole_blocks(self, request: Request, num_blocks: int) -> PrefixHit:
        """The longest hit of at most so many blocks and nothing after them."""
        assert self._hasher is not None
        hashes, find = self._hasher.extend(request), self.pool.find
        found: dict[int, list[int]] = {}
        for group in self._whole:
            tag, ids = self._tags[group], found.setdefault(group, [])
            for block_hash in hashes[:num_blocks]:
                block_id = find(block_hash + tag)
                if block_id is None:
                    break
                ids.append(block_id)
            num_blocks = len(ids)
        num_kv_blocks = num_blocks = self._find_seen_by_all(hashes, num_blocks)
        state = None
        while self.states is not None and num_blocks and state is None:
            # The longest with a state may be too long or too short for a window.
            state = self.states.find(hashes[num_blocks - 1])
            if state is None:
                num_blocks = self._find_seen_by_all(hashes, num_blocks - 1)
        return self._make_hit(hashes, num_blocks, found, state, num_kv_blocks)

    def _find_seen_by_all(self, hashes: list[bytes], num_blocks: int) -> int:
        """The longest prefix, of at most `num_blocks`, of which each windowed group has what it sees next."""
        before = None
        while num_blocks != before:  # what is shorter for one window may be too long for another
            before = num_blocks
            for group, window, _ in self._windowed:
                num_blocks = self._find_seen(hashes, group, window, num_blocks)
        return num_blocks

    def _make_hit(
        self,
        hashes: list[bytes],
        num_blocks: int,
        found: dict[int, list[int]],
        state: Snapshot | None,
        num_kv_blocks: int,
    ) -> PrefixHit:
        """`found`: the ids of groups that keep everything, `num_blocks` or more of them."""
        find = self.pool.find
        groups = [
            HeldBlocks(found[group][:num_blocks] if group in found else [])
            for group in range(self.num_groups)
        ]
        for group, window, _ in self._windowed:
            first, tag = (
                find_first_kept(num_blocks * self.block_size, window, self.block_size),
                self._tags[group],
            )
            ids = [find(block_hash + tag) for block_hash in hashes[first:num_blocks]]
            groups[group] = HeldBlocks([block_id for block_id in ids if block_id is not None], first)
        return PrefixHit(
            num_blocks, groups, num_blocks * self.block_size, state=state, num_kv_blocks=num_kv_blocks
        )

    def _find_seen(self, hashes: list[bytes], group: int, window: int, num_blocks: int) -> int:
        """The longest prefix, of at most `num_blocks`, of which the group has what the next token sees."""
        find, tag = self.pool.find, self._tags[group]
        index = num_blocks - 1
        while num_blocks:
            first = find_first_kept(num_blocks * self.block_size, window, self.block_size)
            while index >= first and find(hashes[index] + tag) is not None:
                index -= 1
            if index < first:
                break
            num_blocks = index  # every longer one sees the missing block too
            index -= 1
        return num_blocks

    def _find_tail(self, request: Request, hit: PrefixHit) -> PrefixHit | None:
        """The hit that ends within the block after those that KV is found of; None if there is none."""
        assert self._hasher is not None
        num_tokens = request.num_tokens - 1 if request.is_continued else request.num_kept_tokens
        num_blocks = num_tokens // self.block_size
        if not hit.num_tokens < num_tokens < request.num_tokens or hit.num_kv_blocks < num_blocks:
            return None
        name = self._hasher.name_tail(request, num_tokens)
        if name is None:
            return None
        state = None
        if self.states is not None and (state := self.states.find(name)) is None:
            return None
        tails = [self.pool.find(name + tag) for tag in self._tags] if self.has_kv else []
        tail = [block_id for block_id in tails if block_id is not None]
        if len(tail) < len(tails):
            return None
        if num_blocks != hit.num_blocks:
            hashes, find = request.block_hashes, self.pool.find
            if self._find_seen_by_all(hashes, num_blocks) < num_blocks:
                return None
            found = {
                group: [
                    block_id
                    for name in hashes[:num_blocks]
                    if (block_id := find(name + self._tags[group])) is not None
                ]
                for group in self._whole
            }
            hit = self._make_hit(hashes, num_blocks, found, state, hit.num_kv_blocks)
        return replace(hit, num_tokens=num_tokens, tail=tail, state=state)

    def hash_prompt(self, request: Request) -> list[bytes]:
        """The hashes of its full blocks, by which other requests find them; none if it reads no cache."""
        return self._hasher.extend(request) if self._hasher is not None and self.reads_cache(request) else []

    def explain_miss(self, request: Request, hit: PrefixHit) -> Iterator[tuple[PrefixMiss, int]]:
        """Why a request that was admitted with `hit` was not found whole: reasons, and how many tokens for
        each were not.
        """
        num_hits, max_hits = hit.num_kv_blocks, self._max_hits(request)
        if (lost := num_hits * self.block_size - hit.num_tokens) > 0:
            yield PrefixMiss.NO_STATE, lost
        # What one block more would take: that block in each group, and the ones before that its window sees.
        names = [request.block_hashes[num_hits] + tag for tag in self._tags] if num_hits < max_hits else []
        for group, window, _ in self._windowed if names else ():
            first = find_first_kept((num_hits + 1) * self.block_size, window, self.block_size)
            names += [name + self._tags[group] for name in request.block_hashes[first:num_hits]]
        reason = self._misses.explain(request, num_hits, max_hits, names)
        if reason is not None:
            yield reason, (max_hits - num_hits) * self.block_size

    def _find_ends(self, num_tokens: int, num_computed: int) -> list[int]:
        """Up to which block of its sequence a request with so many known tokens is given blocks, by group."""
        whole = self.count_blocks(num_tokens)
        ends = [whole] * self.num_groups
        for group, window, most in self._windowed:
            ends[group] = min(whole, find_first_kept(num_computed, window, self.block_size) + most)
        return ends

    def count_taken(self, request: Request, hit: PrefixHit) -> int:
        """By how much `allocate` lowers `num_free`. A hit may be a free block, which stops being free."""
        is_free = self.pool.is_free
        ends = self._find_ends(request.num_tokens, hit.num_blocks * self.block_size)
        return sum(
            [end - held.end + sum(map(is_free, held.ids)) for end, held in zip(ends, hit.groups, strict=True)]
        )

    def count_freed(self, request: Request, wanted: Container[int]) -> int:
        """By how much `free` would raise `num_free`, not counting the blocks in `wanted`."""
        is_held_once = self.pool.is_held_once
        return sum(
            is_held_once(block_id)
            for held in request.blocks
            for block_id in held.ids
            if block_id not in wanted
        )

    def count_growth(self, request: Request) -> int:
        """By how much `grow` would lower `num_free`; negative if it frees more than it takes."""
        count = sum([held.end * self.block_size == request.num_slots for held in request.blocks])
        for group, window, _ in self._windowed:
            held = request.blocks[group]
            first = find_first_kept(request.num_computed_tokens, window, self.block_size)
            count -= sum(map(self.pool.is_held_once, held.ids[: max(0, first - held.first)]))
        return count

    def allocate(self, request: Request, hit: PrefixHit, reserve: int) -> bool:
        """Give an admitted request blocks for what it knows, those of its prefix hit first.

        If nobody holds the hit's tail the request has it from now on, else a block into which it is to be
        copied. False, with nothing changed, if fewer than `reserve` blocks would be left free.
        """
        if self.count_taken(request, hit) + reserve > self.pool.num_free:
            return False
        blocks = [HeldBlocks(held.ids.copy(), held.first) for held in hit.groups]
        for held, block_id in zip(blocks, hit.tail, strict=False):
            if self.pool.is_free(block_id):
                held.ids.append(block_id)
        for held in blocks:  # first: taking a block could evict a hit, or have its states forgotten
            for block_id in held.ids:
                self.pool.acquire(block_id)
        if self.states is not None:
            self._give_state(request, hit)
        ends = self._find_ends(request.num_tokens, hit.num_blocks * self.block_size)
        for held, end in zip(blocks, ends, strict=True):
            held.ids += self.pool.take(end - held.end)
        request.blocks, request.num_slots = blocks, min(ends) * self.block_size
        request.num_computed_tokens = hit.num_tokens
        request.num_indexed_blocks = hit.num_blocks
        if self._hasher is not None:
            # A tail keeps its name for others that look for it in this step, also when this one fills it.
            keeps_name = bool(hit.tail) and request.is_continued
            request.next_index_at = NEVER if keeps_name else (hit.num_blocks + 1) * self.block_size
        return True

    def _give_state(self, request: Request, hit: PrefixHit) -> None:
        """Give an admitted request a state slot, and note after which of its known tokens states are to be
        saved as they are computed.

        Those at the last border before its last token, so that the same prompt and what goes on from it are
        found, also without its last few tokens; at the end of the KV that was found, so that the next one
        with this beginning has more of it; and here and there between, where nobody else wants the slot.
        """
        assert self.states is not None
        is_left = bool(hit.tail) and not request.is_continued  # by itself, for nobody else
        request.state_slot = self.states.take(hit.state, moves=is_left)
        request.entered_at, request.num_kept_tokens = self.states.num_admitted, 0
        if self._hasher is not None:
            size, start = self.block_size, hit.num_tokens
            last, junction = self._max_hits(request) * size, hit.num_kv_blocks * size
            between = range(start // SAVE_INTERVAL * SAVE_INTERVAL, last, SAVE_INTERVAL)
            wanted = {last, junction}
            if request.num_tokens - last <= MAX_DROPPED_TOKENS:
                wanted.add(last - size)
            points = sorted(wanted.union(between), reverse=True)
            request.save_points = [(n, n in wanted) for n in points if n > start]
            request.next_save_at = request.save_points[-1][0] if request.save_points else start + 1
        source = hit.state
        request.copied_slot = None if source is None or source.slot == request.state_slot else source.slot

    def awaits_state(self, request: Request, hit: PrefixHit, others: Iterable[Request]) -> bool:
        """Whether the step that computes `others` is to save states with which a waiting request's hit would
        be much longer in the next step. Once: it does not wait for others again.
        """
        size, end = self.block_size, hit.num_kv_blocks * self.block_size
        if end - hit.num_tokens < MIN_AWAITED_TOKENS or request.has_awaited:
            return False
        for other in others:
            for n, evicts in reversed(other.save_points):
                place = n // size - 1
                if n > min(end, other.num_computed_tokens):
                    break
                if evicts and n > hit.num_tokens and self._has_same(other, request, place):
                    request.has_awaited = True
                    return True
        return False

    def _has_same(self, other: Request, request: Request, place: int) -> bool:
        """Whether the block at this place of their sequences, and all before it, have the same content."""
        assert self._hasher is not None
        return self._hasher.extend(other)[place] == self._hasher.extend(request)[place]

    def choose_saves(self, request: Request, num_tokens: int, saved: list[Snapshot]) -> list[tuple[int, int]]:
        """(n, slot): after the first n tokens of its sequence its states are to be saved there.

        Called when a step is put together that computes `num_tokens` of it, which are counted already.
        `saved`: the step's snapshots; it gets the new ones. They are found from the next step on.
        """
        assert self.states is not None
        assert self._hasher is not None
        size, end = self.block_size, request.num_computed_tokens
        passed, points, num_before = end - num_tokens, request.save_points, len(saved)
        while points and points[-1][0] <= end:
            n, evicts = points.pop()
            passed = n
            name = self._hasher.extend(request)[n // size - 1]
            if (known := self.states.find(name)) is not None:
                self.states.use(known)
            else:
                since = self.states.num_admitted + 1 if evicts else 0
                self.states.save(n, name, since, saved)
        border = end // size * size
        if not points and border > passed:
            self._save_trailing(request, border, saved)
        request.next_save_at = points[-1][0] if points else (end // size + 1) * size
        return [(snapshot.num_tokens, snapshot.slot) for snapshot in saved[num_before:]]

    def _save_trailing(self, request: Request, border: int, saved: list[Snapshot]) -> None:
        """The snapshot that goes with a request while it decodes, for what goes on from its answer."""
        assert self.states is not None
        trailing = request.trailing
        if trailing is not None and trailing.is_kept:
            self.states.move(trailing, border)
            saved.append(trailing)
        else:
            request.trailing = self.states.save(border, None, request.entered_at, saved)
        self._name_trailing(request)

    def _name_trailing(self, request: Request) -> None:
        """Once the tokens are known that its trailing snapshot is after, it can be found."""
        trailing = request.trailing
        if trailing is None or not trailing.is_kept or trailing.num_tokens > request.num_tokens:
            return
        assert self.states is not None
        assert self._hasher is not None
        if trailing.name is None:
            self.states.name(
                trailing, self._hasher.extend(request)[trailing.num_tokens // self.block_size - 1]
            )

    def keep_progress(self, request: Request, indexed: list[int], saved: list[Snapshot]) -> None:
        """Before a preempted request is freed: let it find what it has computed, up to its last token, for as
        long as nobody else takes it. `indexed` and `saved` get what steps in flight still write.
        """
        num_computed = request.num_computed_tokens
        if self.states is None or self._hasher is None or not 0 < num_computed <= request.num_tokens:
            return
        self._leave_tail(request, num_computed, indexed, saved)
        request.num_kept_tokens = num_computed

    def _leave_tail(
        self, request: Request, num_tokens: int, indexed: list[int], saved: list[Snapshot]
    ) -> None:
        """Make findable what was computed of the request's first `num_tokens` tokens, states included."""
        assert self._hasher is not None
        self.index_full_blocks(request, indexed)
        name = self._hasher.name_tail(request, num_tokens)
        if name is not None and self.has_kv:
            for held, tag in zip(request.blocks, self._tags, strict=True):
                block_id = held.ids[num_tokens // self.block_size - held.first]
                if self.pool.register(block_id, name + tag):
                    indexed.append(block_id)
        if self.states is not None and request.state_slot is not None:
            name = name or request.block_hashes[num_tokens // self.block_size - 1]
            snapshot = self.states.keep(request.state_slot, num_tokens, name)
            request.state_slot = None
            if snapshot is not None:
                saved.append(snapshot)

    def grow(self, request: Request) -> list[tuple[int, list[int]]] | None:
        """Give a request that has filled its last block one more, in each group that lacks it.

        Returns the new ids by group; None, with no block taken, if too few are free.
        """
        if not self._windowed:  # one group, the way of most models
            if not self.pool.num_free:
                return None
            ids = self.pool.take(1)
            request.blocks[0].ids += ids
            request.num_slots += self.block_size
            return [(0, ids)]
        self._release_behind(request)
        index = request.num_slots // self.block_size
        lacking = [group for group, held in enumerate(request.blocks) if held.end == index]
        if len(lacking) > self.pool.num_free:
            return None
        new = [
            (group, [block_id]) for group, block_id in zip(lacking, self.pool.take(len(lacking)), strict=True)
        ]
        for group, ids in new:
            request.blocks[group].ids += ids
        request.num_slots += self.block_size
        return new

    def make_room(self, request: Request, num_tokens: int) -> list[tuple[int, list[int]]]:
        """Give a request that goes on with its prompt the blocks of a step, or as many as are free.

        Returns the new ids by group; `num_slots` says for how many of the next `num_tokens` there is room.
        """
        self._release_behind(request)
        ends, num_free = self._find_ends(request.num_tokens, request.num_computed_tokens), self.pool.num_free
        held_ends = [held.end for held in request.blocks]
        if sum(ends) - sum(held_ends) > num_free:  # no more than this step takes, and alike in all groups
            needed = self.count_blocks(request.num_computed_tokens + num_tokens)
            each = num_free // len(self._windowed)
            ends = [
                max(held, min(end, needed, held + each)) for end, held in zip(ends, held_ends, strict=True)
            ]
        new: list[tuple[int, list[int]]] = []
        for group, held in enumerate(request.blocks):
            if ends[group] > held.end:
                new.append((group, self.pool.take(ends[group] - held.end)))
                held.ids += new[-1][1]
        request.num_slots = min(ends) * self.block_size
        return new

    def _release_behind(self, request: Request) -> None:
        """Release blocks that no step sees from the next one on."""
        for group, window, _ in self._windowed:
            held = request.blocks[group]
            count = find_first_kept(request.num_computed_tokens, window, self.block_size) - held.first
            if count > 0:
                self.pool.release(reversed(held.ids[:count]))
                del held.ids[:count]
                held.first += count

    def index_full_blocks(self, request: Request, indexed: list[int]) -> None:
        """Make blocks findable that are full of known tokens, and add the ids of the new ones to `indexed`.

        "Computed" includes steps in flight: whoever finds such a block runs in the same step or a later one,
        and a step writes all its K and V before it reads any. If the step that fills them fails, the caller
        gives `indexed` to `forget`. A block with a placeholder is not findable: its content has no name yet.
        """
        assert self._hasher is not None
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if num_full <= request.num_indexed_blocks:
            return
        hashes = self._hasher.extend(request)
        for held, tag in zip(request.blocks, self._tags, strict=True) if self.has_kv else ():
            for i in range(max(request.num_indexed_blocks, held.first), num_full):
                block_id = held.ids[i - held.first]
                if self.pool.register(block_id, hashes[i] + tag):
                    indexed.append(block_id)
        request.num_indexed_blocks = num_full
        request.next_index_at = (num_full + 1) * self.block_size
        if request.trailing is not None:
            self._name_trailing(request)

    def index_tail(self, request: Request) -> None:
        """Make findable all that a request which ends well leaves, also what does not fill its last block."""
        if self._hasher is None or request.pooling_params is not None:
            return
        num_computed = request.num_tokens - 1  # its last token need not be
        if self.states is not None and request.num_computed_tokens != num_computed:
            return  # its states are after that one
        request.num_computed_tokens = num_computed
        self._leave_tail(request, num_computed, [], [])

    def free(self, request: Request) -> None:
        """Release all blocks, the last one first: a prefix is then evicted from its end, the least useful."""
        for held in request.blocks:
            self.pool.release(reversed(held.ids))
        request.blocks, request.num_slots = [], 0
        if self.states is not None:
            self._free_states(request)
        request.num_computed_tokens = 0
        request.num_indexed_blocks = 0
        request.next_index_at = NEVER

    def _free_states(self, request: Request) -> None:
        assert self.states is not None
        if request.state_slot is not None:
            self.states.release(request.state_slot)
            request.state_slot = None
        if (trailing := request.trailing) is not None:
            self._name_trailing(request)
            if trailing.name is None:
                self.states.drop(trailing)
            request.trailing = None
        request.save_points, request.next_save_at = [], NEVER

    def forget(self, block_ids: Iterable[int], saved: Iterable[Snapshot] = ()) -> None:
        """Make these blocks and states unfindable: they are not what their names say."""
        for block_id in block_ids:
            self.pool.unregister(block_id)
        for snapshot in saved:
            assert self.states is not None
            self.states.drop(snapshot)

    def forget_all(self) -> None:
        """Make everything unfindable: what the worker had is lost, or is to be."""
        self.pool.unregister_all()
        if self.states is not None:
            self.states.forget_all()

    def forget_contents(self, request: Request) -> None:
        """Make what this request has computed unfindable, whichever blocks hold it now."""
        block_ids = [self.pool.find(name + tag) for name in request.block_hashes for tag in self._tags]
        self.forget(block_id for block_id in block_ids if block_id is not None)
        if self.states is not None:
            for name in request.block_hashes:
                self.states.forget(name)
            if request.trailing is not None:
                self.states.drop(request.trailing)

    def _max_hits(self, request: Request) -> int:
        """How many blocks may be hits: the last token is always computed."""
        return (request.num_tokens - 1) // self.block_size

    def check(self, requests: Iterable[Request]) -> list[str]:
        """The problems found between the pool and the requests that hold blocks."""
        requests = list(requests)
        owners: dict[int, list[tuple[Request, int, int]]] = {}
        problems: list[str] = []
        for request in requests:
            problems += self._check_blocks(request)
            for group, held in enumerate(request.blocks):
                for place, block_id in enumerate(held.ids, held.first):
                    owners.setdefault(block_id, []).append((request, group, place))
        if self.states is not None:
            problems += self._check_states(requests)
        problems += self.pool.check(Counter({block_id: len(holders) for block_id, holders in owners.items()}))
        size = self.block_size
        for block_id, holders in owners.items():
            contents = {
                (group, at, request.packed_tokens(at * size, (at + 1) * size))
                for request, group, at in holders
            }
            if len(holders) > 1 and len(contents) > 1:
                ids = ", ".join(request.request_id for request, _, _ in holders)
                problems.append(f"block {block_id}: shared by {ids} with different contents")
        return problems

    def _check_states(self, requests: Iterable[Request]) -> list[str]:
        """What is wrong with the state slots of live requests and with snapshots."""
        assert self.states is not None
        slots = [request.state_slot for request in requests if request.state_slot is not None]
        problems = self.states.check(slots)
        for request in requests:
            if (request.row is None) != (request.state_slot is None):
                problems.append(f"{request.request_id}: row {request.row}, state slot {request.state_slot}")
        return problems

    def _check_blocks(self, request: Request) -> list[str]:
        """What is wrong with the blocks that a running request holds of each group, but for their owners."""
        name, size = request.request_id, self.block_size
        if request.blocks and request.num_slots != min(held.end for held in request.blocks) * size:
            return [f"{name}: {request.num_slots} slots are not what its blocks have"]
        problems: list[str] = []
        for group, window, most in self._windowed if request.blocks else ():
            held = request.blocks[group]
            if held.first > find_first_kept(request.num_computed_tokens, window, size):
                problems.append(f"{name}: group {group} lacks what the next token sees, before {held.first}")
            if len(held.ids) > most:
                problems.append(f"{name}: {len(held.ids)} blocks of group {group}, {most} are the most")
        if request.blocks and any(request.blocks[group].first for group in self._whole):
            problems.append(f"{name}: a group that keeps everything lacks its first blocks")
        return problems
