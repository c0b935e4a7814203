"""Why a prefix was not found: nobody has had it, it was evicted, or it has another salt."""

from __future__ import annotations

from typing import Any

from fakes import FakeEngine, make_request
from fakes import make_engine as make_any_engine
from quire.core.stats.stats_collector import CoreProcessInfo
from quire.ipc.protocol.engine_views import ClientView, RequestView

PROMPT = list(range(33))  # two blocks of 16, and a token that is computed in any case


def make_engine(num_blocks: int = 64, **config: Any) -> FakeEngine:
    return make_any_engine(num_blocks, block_size=16, **config)


def see(engine: FakeEngine, prompt: list[int], client: bytes = b"client", **fields: Any) -> RequestView:
    """Run a request; how it was shown when it had begun."""
    name = f"r{len(engine.tokens)}"
    engine.add(make_request(name, prompt, max_tokens=3, **fields), client)
    engine.turn()
    attached = {client: ClientView(kind="llm", pid=1, weight=1.0, num_unsent=0, connected_s=1.0)}
    views = engine.core.snapshot(CoreProcessInfo("epoch", 0.0, attached)).requests
    engine.run()
    return next(view for view in views if view.request_id == name)


def count_misses(engine: FakeEngine) -> tuple[int, int, int]:
    stats = engine.core.stats()
    evicted, other_salt = stats.prefix_misses_evicted_total, stats.prefix_misses_other_salt_total
    return stats.prefix_misses_unknown_total, evicted, other_salt


def test_what_nobody_has_had_is_no_such_prefix_and_what_is_found_needs_no_reason() -> None:
    engine = make_engine()
    first, second = see(engine, PROMPT), see(engine, PROMPT)
    assert (first.num_cached_tokens, first.prefix_miss) == (0, "no such prefix")
    assert (second.num_cached_tokens, second.prefix_miss) == (32, "")
    longer = see(engine, PROMPT[:16] + list(range(50, 80)))
    assert (longer.num_cached_tokens, longer.prefix_miss) == (16, "no such prefix")
    short = see(engine, [1, 2, 3])
    assert (short.num_cached_tokens, short.prefix_miss) == (0, "")  # there is no whole block to find
    assert count_misses(engine) == (32 + 16, 0, 0)


def test_what_gave_way_to_others_was_evicted() -> None:
    engine = make_engine(num_blocks=4)
    see(engine, PROMPT)
    see(engine, list(range(40, 90)))  # takes all blocks
    again = see(engine, PROMPT)
    assert (again.num_cached_tokens, again.prefix_miss) == (0, "evicted")
    assert count_misses(engine)[1] == 32
    engine.lose_worker()
    assert see(engine, PROMPT).prefix_miss == "evicted"


def test_a_tenants_own_other_salt_is_named_and_anothers_is_not() -> None:
    engine = make_engine()
    see(engine, PROMPT, cache_salt="a", tenant="one")
    assert see(engine, PROMPT, cache_salt="b", tenant="one").prefix_miss == "other salt"
    assert see(engine, PROMPT, cache_salt="b", tenant="one").prefix_miss == ""
    assert see(engine, PROMPT, cache_salt="c", tenant="two").prefix_miss == "no such prefix"
    assert count_misses(engine) == (64, 0, 32)


def test_a_request_that_must_be_computed_whole_is_not_looked_up() -> None:
    engine = make_engine()
    assert see(engine, PROMPT, prompt_logprobs=0).prefix_miss == "not looked up"
    assert count_misses(engine) == (0, 0, 0)
