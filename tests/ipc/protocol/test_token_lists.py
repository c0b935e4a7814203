"""TokenLists: what is packed comes out again, each list has a cap, ids are counted before they are read."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.ipc.errors import ProtocolError, SamplingParamsError
from quire.ipc.params.sampling_params import MAX_ALLOWED_TOKEN_IDS, SamplingParams
from quire.ipc.protocol.codec import make_client_codec
from quire.ipc.protocol.messages import EngineCoreRequest
from quire.ipc.protocol.token_ids import decode_token_ids, encode_token_ids
from quire.ipc.protocol.token_lists import (
    MAX_BAD_WORD_TOKENS,
    TokenLists,
    drop_packed,
    encode_token_set,
    has_unpacked,
    is_token_mask,
    pack_token_lists,
    unpack_bad_words,
)

CODEC = make_client_codec()


@given(vocab_size=st.integers(1, 300), data=st.data())
def test_a_token_set_is_the_shorter_of_ids_and_a_bit_a_token(vocab_size: int, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, unique=True))
    packed = encode_token_set(ids, vocab_size)
    assert len(packed) == min(4 * len(ids), (vocab_size + 7) // 8)
    if is_token_mask(packed, vocab_size):
        found = {bit for bit in range(8 * len(packed)) if packed[bit // 8] >> bit % 8 & 1}
    else:
        found = set(decode_token_ids(packed))
    assert found == set(ids)


@given(words=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), max_size=8))
def test_bad_words_survive_packing(words: list[list[int]]) -> None:
    lists = pack_token_lists(SamplingParams(), words, 100)
    assert unpack_bad_words(lists) == [encode_token_ids(word) for word in words]


def test_what_travels_packed_is_left_out_of_the_params() -> None:
    params = SamplingParams(
        stop="x",
        stop_token_ids=[1],
        logit_bias={1: 2.0},
        allowed_token_ids=[1, 2],
        bad_words=["x"],
        logprob_token_ids=[3, 1],
    )
    lists = pack_token_lists(params, [[7]], 100)
    drop_packed(params)
    assert not has_unpacked(params)
    assert decode_token_ids(lists.stop) == [1]
    assert decode_token_ids(lists.logprobs) == [3, 1]
    assert decode_token_ids(lists.bias_ids) == [1]


def test_ids_are_counted_before_they_are_looked_at() -> None:
    looked_at = itertools.count()
    with pytest.raises(SamplingParamsError, match=f"at most {MAX_ALLOWED_TOKEN_IDS} token ids"):
        SamplingParams(allowed_token_ids=looked_at)  # type: ignore[arg-type]
    assert next(looked_at) <= MAX_ALLOWED_TOKEN_IDS + 1
    with pytest.raises(SamplingParamsError, match="4000000 ids"):
        SamplingParams(allowed_token_ids=range(4_000_000))  # type: ignore[arg-type]


def test_the_same_allowed_id_many_times_is_one() -> None:
    assert SamplingParams(allowed_token_ids=[7, 5, 7]).allowed_token_ids == [7, 5]


def test_lists_over_their_caps_do_not_decode() -> None:
    lists = TokenLists(bad_words=bytes(4 * MAX_BAD_WORD_TOKENS + 4))
    request = EngineCoreRequest("r", bytes(4), SamplingParams(), 0.0, token_lists=lists)
    with pytest.raises(ProtocolError, match="length"):
        CODEC.decode(CODEC.encode(request))


def test_a_list_that_should_have_been_packed_is_counted_before_it_is_decoded() -> None:
    (frame,) = CODEC.encode(EngineCoreRequest("r", bytes(4), SamplingParams(), 0.0))
    head, tail = frame.split(msgspec.msgpack.encode(SamplingParams()))
    junk = b"\x81" + msgspec.msgpack.encode("bad_words") + b"\xdd\x00\x0f\xff\xff"  # and no element follows
    with pytest.raises(ProtocolError, match="length <= 128"):
        CODEC.decode((head + junk + tail,))
