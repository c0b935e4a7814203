"""Where requests go: to what an engine has, to what it has to do, and never for ever to the same."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest
from fakes import make_config, make_request
from quire.core.kv.block_pool import BlockPool
from quire.core.kv.kv_cache_manager import BlockHasher, KVCacheManager
from quire.core.scheduling.request import Request
from quire.core.scheduling.tenant import Tenant
from quire.frontend.client.engine_router import EngineRouter
from quire.ipc.protocol.messages import EngineCoreRequest
from quire.ipc.protocol.prefix_digest import (
    HASH_SIZE_BYTES,
    EngineDigest,
    hash_prefixes,
    list_coarse_depths,
    list_depths,
)
from quire.ipc.protocol.token_ids import encode_token_ids

BLOCK = 16


def make_router(num_engines: int = 2, block_size: int = BLOCK) -> EngineRouter:
    router = EngineRouter(block_size)
    for index in range(num_engines):
        router.add_engine(index)
    return router


@pytest.fixture
def router() -> EngineRouter:
    return make_router()


def ask(name: str, prompt: list[int], salt: str = "") -> EngineCoreRequest:
    return make_request(name, prompt, cache_salt=salt)


def text(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1, 1000), k=num_tokens)


def make_digest(prompt: list[int], salt: str = "", num_requests: int = 0, pending: int = 0) -> EngineDigest:
    depths = list_coarse_depths(len(prompt) // BLOCK)
    names = hash_prefixes(encode_token_ids(prompt), salt, BLOCK, depths)
    packed = b"".join(name.to_bytes(HASH_SIZE_BYTES, "little") for name in names)
    return EngineDigest(packed, num_requests, pending)


def test_a_prefix_has_one_name_for_each_length_and_salt() -> None:
    prompt = encode_token_ids(text(1, 2000 * BLOCK))
    depths = list_depths(2000)
    assert depths[:66] == [*range(1, 65), 72, 80]
    assert depths[-1] == 1024
    names = hash_prefixes(prompt, "", BLOCK, depths)
    assert len(set(names)) == len(depths)
    assert hash_prefixes(prompt[: 80 * BLOCK * 4], "", BLOCK, [3, 80])[1] == names[65]
    assert not set(names) & set(hash_prefixes(prompt, "salt", BLOCK, depths))
    assert list_coarse_depths(77) == [1, 2, 4, 8, 16, 32, 64, 72]
    assert list_coarse_depths(0) == []


def test_requests_without_anything_in_common_go_round() -> None:
    router = make_router(3)
    places: list[int] = []
    for number in range(9):
        places.append(router.place(ask(f"r{number}", text(number, 40))))
        router.remove(f"r{number}")
    assert places == [0, 1, 2] * 3


def test_a_conversation_stays_where_its_beginning_is(router: EngineRouter) -> None:
    history = text(1, 200)
    first = router.place(ask("turn 0", history))
    for turn in range(1, 6):
        router.note_output(f"turn {turn - 1}")
        router.remove(f"turn {turn - 1}")
        router.remove(f"other {turn - 1}")
        router.place(ask(f"other {turn}", text(turn + 10, 30)))  # which moves where ties go
        history = history + text(turn, 50)
        assert router.place(ask(f"turn {turn}", history)) == first


def test_the_longest_prefix_wins_over_a_shorter_one(router: EngineRouter) -> None:
    system, own = text(1, 64), text(2, 320)
    router.take_digest(0, make_digest(system))
    router.take_digest(1, make_digest(system + own))
    assert router.place(ask("a", system + own + [7] * 20)) == 1


def test_a_prefix_is_worth_as_much_as_it_saves_and_no_more(router: EngineRouter) -> None:
    shared = text(1, 512)
    first = router.place(ask("r0", shared))
    router.note_output("r0")
    places: list[int] = []
    for number in range(1, 60):
        places.append(router.place(ask(f"r{number}", [*shared, number])))
        router.note_output(f"r{number}")
    assert places[:31] == [first] * 31
    assert 1 - first in places  # 512 tokens are computed again rather than waited for behind 32 others


def test_prompts_that_wait_count_until_their_first_output(router: EngineRouter) -> None:
    assert router.place(ask("long", text(1, 1000))) == 0
    assert [router.place(ask(f"r{number}", text(number + 2, 100))) for number in range(3)] == [1, 1, 1]
    router.note_output("long")
    assert router.place(ask("next", text(9, 100))) == 0


def test_one_that_takes_nothing_new_gets_nothing_while_there_is_another(router: EngineRouter) -> None:
    shared = text(1, 512)
    at = router.place(ask("a", shared))
    router.set_takes_new(at, False)
    assert router.place(ask("b", shared)) == 1 - at
    router.set_takes_new(1 - at, False)
    assert router.place(ask("c", shared)) == at, "it goes round, as if both did"


def test_an_engine_that_was_lost_knows_nothing_until_it_says_so(router: EngineRouter) -> None:
    shared = text(1, 512)
    at = router.place(ask("a", shared))
    router.remove("a")
    router.add_engine(at)  # it is back
    router.take_digest(1 - at, make_digest(shared))
    assert router.place(ask("b", [*shared, 5])) == 1 - at
    router.take_digest(at, make_digest(shared))
    assert {router.place(ask(f"c{number}", [*shared, 6])) for number in range(2)} == {0, 1}


def test_what_other_clients_have_running_counts(router: EngineRouter) -> None:
    router.take_digest(0, EngineDigest(b"", num_requests=5, num_pending_tokens=0))
    router.take_digest(1, EngineDigest(b"", num_requests=0, num_pending_tokens=100))
    assert router.place(ask("a", text(1, 10))) == 1
    assert router.place(ask("b", text(2, 10))) == 1
    assert router.place(ask("c", text(3, 10))) == 0


def test_a_salt_is_part_of_what_is_known(router: EngineRouter) -> None:
    shared = text(1, 512)
    router.take_digest(1, make_digest(shared, "theirs"))
    assert router.place(ask("a", shared, "mine")) == 0
    assert router.place(ask("b", shared, "theirs")) == 1


def test_requests_that_read_no_cache_go_by_load() -> None:
    router = make_router(2, block_size=0)
    assert [router.place(ask(f"r{number}", text(1, 512))) for number in range(4)] == [0, 1, 0, 1]


def test_what_is_remembered_is_bounded() -> None:
    router = EngineRouter(BLOCK, max_prefixes=10)
    for index in range(2):
        router.add_engine(index)
    for number in range(5):
        router.place(ask(f"r{number}", text(number, 20 * BLOCK)))
    assert len(router._prefixes) <= 10


def test_a_whole_digest_refutes_what_it_does_not_name_but_not_what_is_on_its_way(
    router: EngineRouter,
) -> None:
    told, gone, live = text(1, 512), text(2, 512), text(3, 512)
    router.set_takes_new(1, False)
    for name, prompt in (("told", told), ("gone", gone), ("live", live)):
        assert router.place(ask(name, prompt)) == 0
        router.note_output(name)
    for name in ("told", "gone"):
        router.remove(name)
    router.set_takes_new(1, True)

    def find_where(prompt: list[int]) -> int:
        place = router.place(ask("where", prompt))
        router.remove("where")
        return place

    router.take_digest(0, msgspec.structs.replace(make_digest(told), is_whole=False))
    assert [find_where(prompt) for prompt in (told, gone, live)] == [0, 0, 0]
    router.take_digest(0, make_digest(told))
    assert [find_where(prompt) for prompt in (told, gone, live)] == [0, 1, 0]


# The figures that were asked for, with the engines' real block pools.

STEP_TOKENS, DECODE_COST, NUM_OUTPUTS = 256, 4, 8


class PlayedEngine:
    """Computes prompts one after the other, beside decodes, a budget of tokens a step."""

    def __init__(self, num_blocks: int) -> None:
        hasher = BlockHasher(BLOCK, make_config().model.spec, b"seed")
        self._manager = KVCacheManager(BlockPool(num_blocks), BLOCK, hasher)
        self.queue: deque[EngineCoreRequest] = deque()
        self._decoding: dict[str, tuple[int, Request]] = {}  # id -> steps left
        self._prompt: tuple[int, Request] | None = None  # tokens left
        self.num_cached = 0

    def step(self, router: EngineRouter) -> list[str]:
        """The requests that have ended."""
        budget = STEP_TOKENS - DECODE_COST * len(self._decoding)
        ended = [name for name, (left, _) in self._decoding.items() if left == 1]
        for name in ended:
            self._manager.free(self._decoding.pop(name)[1])
        self._decoding = {name: (left - 1, one) for name, (left, one) in self._decoding.items()}
        while budget > 0 and (self._prompt or self._admit()):
            assert self._prompt is not None
            left, request = self._prompt
            num_tokens = min(budget, left)
            budget, left = budget - num_tokens, left - num_tokens
            self._prompt = (left, request) if left else None
            if not left:
                router.note_output(request.request_id)
                self._decoding[request.request_id] = NUM_OUTPUTS, request
        return ended

    def _admit(self) -> bool:
        if not self.queue:
            return False
        tenant = Tenant(b"client", 1.0)
        request = Request.from_message(self.queue[0], b"client", tenant, (0, 0.0, 0), 4096, 0.0)
        if not self._manager.allocate(request, self._manager.find_prefix(request), 0):
            return False
        self.queue.popleft()
        self.num_cached += request.num_computed_tokens
        self._prompt = request.num_tokens - request.num_computed_tokens, request
        request.num_computed_tokens = request.num_tokens
        self._manager.index_full_blocks(request, [])
        return True


def run(
    requests: list[EngineCoreRequest], num_blocks: int, num_at_once: int, *, by_turns: bool = False
) -> tuple[int, int]:
    """Play them over two engines, so many at a time: prompt tokens that were cached, and steps."""
    engines, router = [PlayedEngine(num_blocks) for _ in range(2)], make_router(2)
    waiting, num_live, num_steps = deque(enumerate(requests)), 0, 0
    while waiting or num_live:
        while waiting and num_live < num_at_once:
            number, request = waiting.popleft()
            index = router.place(request)
            engines[number % 2 if by_turns else index].queue.append(request)
            num_live += 1
        num_steps += 1
        for engine in engines:
            for name in engine.step(router):
                router.remove(name)
                num_live -= 1
    return sum(engine.num_cached for engine in engines), num_steps


@pytest.mark.parametrize("seed", range(1))
def test_conversations_over_shared_prefixes_find_far_more_than_by_turns(seed: int) -> None:
    rng = random.Random(seed)
    prefixes = [text(1000 + number, 512) for number in range(16)]
    conversations = [(prefixes[number % 16], text(2000 + number, 24)) for number in range(64)]
    asked = [
        ask(f"{turn}/{number}", prefix + own + [turn + 1] * 8)
        for turn in range(5)
        for number, (prefix, own) in enumerate(rng.sample(conversations, 64))
    ]
    num_blocks = 8 * 512 // BLOCK + 8 * 5  # half of the prefixes, and what runs
    cached, num_steps = run(asked, num_blocks, 12)
    by_turns, slower = run(asked, num_blocks, 12, by_turns=True)
    assert cached >= 1.8 * by_turns
    assert num_steps < slower


@pytest.mark.parametrize("num_at_once", [4, 24])
def test_random_prompts_get_on_as_fast_as_by_turns(num_at_once: int) -> None:
    rng = random.Random(1)
    asked = [ask(str(number), text(number, rng.randint(20, 600))) for number in range(300)]
    _, num_steps = run(asked, 2000, num_at_once)
    _, by_turns = run(asked, 2000, num_at_once, by_turns=True)
    assert num_steps <= 1.03 * by_turns


def test_a_request_that_is_placed_twice_counts_once(router: EngineRouter) -> None:
    for _ in range(2):
        router.place(ask("again", [1]))
    router.remove("again")
    assert [router.place(ask(name, [1])) for name in ("a", "b")] == [0, 1]
