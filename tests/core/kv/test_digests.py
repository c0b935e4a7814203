"""What an engine tells frontends that choose: once asked, of what is there, by names that they know."""

from __future__ import annotations

import pytest
from fakes import FakeEngine, make_config, make_request
from quire.core.kv import digests as digests_module
from quire.ipc.protocol.prefix_digest import HASH_SIZE_BYTES, EngineDigest, hash_prefixes, list_coarse_depths
from quire.ipc.protocol.token_ids import encode_token_ids

BLOCK = 8


def names_in(digest: EngineDigest) -> list[int]:
    data, size = digest.prefixes, HASH_SIZE_BYTES
    return [int.from_bytes(data[start : start + size], "little") for start in range(0, len(data), size)]


def names_of(prompt: list[int], salt: str = "") -> list[int]:
    depths = list_coarse_depths(len(prompt) // BLOCK)
    return hash_prefixes(encode_token_ids(prompt), salt, BLOCK, depths)


def make_engine(num_blocks: int = 12) -> FakeEngine:
    return FakeEngine(make_config(max_model_len=48, block_size=BLOCK), num_blocks)


def test_prompts_are_noted_from_the_first_digest_on() -> None:
    engine = make_engine()
    engine.add(make_request("before", [1] * 20, max_tokens=1))
    assert names_in(engine.core.digests.make()) == []
    engine.run()
    engine.add(make_request("after", [2] * 27, max_tokens=1))
    digest = engine.core.digests.make()
    assert (names_in(digest), digest.num_requests, digest.num_pending_tokens) == ([], 1, 27)
    engine.run()
    digest = engine.core.digests.make()
    assert names_in(digest) == names_of([2] * 27)
    assert (len(names_in(digest)), digest.num_requests, digest.num_pending_tokens) == (3, 0, 0)


def test_a_salted_prompt_is_known_by_its_salt_and_no_other() -> None:
    engine = make_engine()
    engine.core.digests.make()
    engine.add(make_request("a", [1] * 20, max_tokens=1, cache_salt="mine"))
    engine.run()
    found = names_in(engine.core.digests.make())
    assert found == names_of([1] * 20, "mine")
    assert not set(found) & set(names_of([1] * 20))


def test_what_was_evicted_is_not_told() -> None:
    engine = make_engine(num_blocks=6)
    engine.core.digests.make()
    for number in range(4):
        engine.add(make_request(f"r{number}", [number] * 30, max_tokens=1))
        engine.run()
    found, last = set(names_in(engine.core.digests.make())), set(names_of([3] * 30))
    assert last <= found <= last | set(names_of([2] * 30))
    assert engine.core.reset_prefix_cache()
    assert names_in(engine.core.digests.make()) == []


def test_without_a_cache_there_is_only_load_to_tell() -> None:
    engine = FakeEngine(make_config(max_model_len=48, block_size=BLOCK, enable_prefix_caching=False), 12)
    engine.core.digests.make()
    engine.add(make_request("a", [1] * 20, max_tokens=1))
    assert engine.core.digests.make() == EngineDigest(b"", 1, 20)


def test_what_is_noted_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests_module, "MAX_PREFIXES", 5)
    engine = make_engine()
    engine.core.digests.make()
    for number in range(9):
        engine.add(make_request(f"r{number}", [number] * 8, max_tokens=1))
        engine.run()
    assert names_in(engine.core.digests.make()) == [names_of([number] * 8)[0] for number in range(4, 9)]


def test_a_digest_says_whether_it_names_all_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests_module, "MAX_PREFIXES", 6)
    engine, late = make_engine(num_blocks=24), make_engine()
    assert engine.core.digests.make().is_whole
    for number in range(4):
        engine.add(make_request(f"r{number}", [number] * 30, max_tokens=1))
        engine.run()
    assert not engine.core.digests.make().is_whole
    engine.core.reset_prefix_cache()
    engine.add(make_request("new", [9] * 30, max_tokens=1))  # in the place of one that is gone
    assert engine.core.digests.make().is_whole
    late.add(make_request("before", [1] * 20, max_tokens=1))
    late.run()
    assert not late.core.digests.make().is_whole
