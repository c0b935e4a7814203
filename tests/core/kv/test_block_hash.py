"""BlockHasher: what must give the same name to a block, and what must not."""

from __future__ import annotations

from fakes import make_config, make_live
from quire.core.kv.kv_cache_manager import BlockHasher
from quire.ipc.spec.model_spec import RopeConfig

BLOCK_SIZE = 8


def make_hasher(seed: bytes | None = b"seed", rope: RopeConfig | None = None) -> BlockHasher:
    return BlockHasher(BLOCK_SIZE, make_config(rope=rope, max_position_embeddings=32).model.spec, seed)


def test_only_full_blocks_of_known_tokens_have_a_hash():
    hasher = make_hasher()
    assert [len(hasher.extend(make_live(list(range(n))))) for n in (1, 7, 8, 15, 16)] == [0, 0, 1, 1, 2]


def test_a_block_is_named_by_everything_before_it():
    hasher = make_hasher()
    a = hasher.extend(make_live([1] * 8 + [2] * 8))
    b = hasher.extend(make_live([3] * 8 + [2] * 8))
    c = hasher.extend(make_live([1] * 8 + [2] * 7 + [4]))
    assert a[0] == c[0]
    assert len({*a, *b, *c}) == 5


def test_prompt_and_output_tokens_hash_alike_and_growing_equals_hashing_at_once():
    tokens = list(range(40))
    at_once = make_hasher().extend(make_live(tokens))
    for num_prompt in (1, 7, 8, 11, 39):
        hasher = make_hasher()
        request = make_live(tokens[:num_prompt])
        for token_id in tokens[num_prompt:]:
            hasher.extend(request)
            request.output_token_ids.append(token_id)
            request.num_tokens += 1
        assert hasher.extend(request) == at_once
        assert make_hasher().extend(make_live(tokens[:num_prompt], output=tokens[num_prompt:])) == at_once


def test_a_cache_salt_and_a_seed_separate_equal_prompts():
    prompt = list(range(16))
    plain = make_hasher().extend(make_live(prompt))
    salted = make_hasher().extend(make_live(prompt, cache_salt="tenant"))
    other_process = make_hasher(None).extend(make_live(prompt))
    assert not set(plain) & set(salted)
    assert not set(plain) & set(other_process)


def test_dynamic_rope_separates_prompts_by_length_beyond_the_trained_length_only():
    dynamic = make_hasher(rope=RopeConfig(type="dynamic", factor=2.0))
    tokens = list(range(48))

    def first_of(hasher: BlockHasher, length: int) -> bytes:
        return hasher.extend(make_live(tokens[:length]))[0]

    assert first_of(dynamic, 16) == first_of(dynamic, 32)
    assert len({first_of(dynamic, length) for length in (32, 33, 34)}) == 3
    assert first_of(make_hasher(), 32) == first_of(make_hasher(), 34)
