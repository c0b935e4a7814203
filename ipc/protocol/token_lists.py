"""TokenLists: a request's lists of token ids in the form in which they travel and are held: packed bytes.

As Python lists these ids cost a core 40 bytes and the check of each 0.2 us, and every sequence of a request
brings them again: 4 million allowed ids with n=8 kept a core decoding for 10 s. Packed they cost a copy, are
checked in C, and sequences that say the same share them. Every list has a cap, so a frame has one.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from ..params.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from .token_ids import TOKEN_SIZE_BYTES, decode_token_ids, encode_token_ids

MAX_VOCAB_SIZE = 2**20  # of a model; the largest vocabularies have 262,144
MAX_BAD_WORD_TOKENS = 8192  # of all bad words of a request, in both of their forms
MAX_BAD_WORD_FORMS = 2 * MAX_BAD_WORDS  # at a text's beginning, and after a space
MAX_LISTS_BYTES = MAX_VOCAB_SIZE // 8 + TOKEN_SIZE_BYTES * (
    MAX_BAD_WORD_TOKENS + MAX_BAD_WORD_FORMS + 2 * MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + MAX_LOGPROB_TOKEN_IDS
)
_UNPACKED = (
    *("allowed_token_ids", "stop_token_ids", "logit_bias", "logprob_token_ids", "bad_words", "stop"),
    *("extra_args", "structured_outputs"),
)


class TokenLists(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What SamplingParams says of token ids, packed as little-endian int32 (`bias_values`: float32).

    allowed: a token set (`encode_token_set`); empty: every token. bad_words: the ids of all words one after
    the other, of which the first `bad_word_lengths[0]` are the first word, and so on.
    """

    allowed: Annotated[bytes, Meta(max_length=MAX_VOCAB_SIZE // 8)] = b""
    bad_words: Annotated[bytes, Meta(max_length=MAX_BAD_WORD_TOKENS * TOKEN_SIZE_BYTES)] = b""
    bad_word_lengths: Annotated[bytes, Meta(max_length=MAX_BAD_WORD_FORMS * TOKEN_SIZE_BYTES)] = b""
    bias_ids: Annotated[bytes, Meta(max_length=MAX_LOGIT_BIAS * TOKEN_SIZE_BYTES)] = b""
    bias_values: Annotated[bytes, Meta(max_length=MAX_LOGIT_BIAS * TOKEN_SIZE_BYTES)] = b""
    stop: Annotated[bytes, Meta(max_length=MAX_STOP_TOKEN_IDS * TOKEN_SIZE_BYTES)] = b""
    logprobs: Annotated[bytes, Meta(max_length=MAX_LOGPROB_TOKEN_IDS * TOKEN_SIZE_BYTES)] = b""

    @property
    def size_bytes(self) -> int:
        """Bytes of all lists."""
        bad_words_bytes = len(self.bad_words) + len(self.bad_word_lengths)
        bias_bytes = len(self.bias_ids) + len(self.bias_values)
        return len(self.allowed) + bad_words_bytes + bias_bytes + len(self.stop) + len(self.logprobs)


NO_LISTS = TokenLists()


def pack_token_lists(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], vocab_size: int
) -> TokenLists:
    """The lists of `params`, whose `bad_words` texts have become ids."""
    bias = params.logit_bias or {}
    return TokenLists(
        allowed=encode_token_set(params.allowed_token_ids or (), vocab_size),
        bad_words=encode_token_ids(itertools.chain.from_iterable(bad_words)),
        bad_word_lengths=encode_token_ids(map(len, bad_words)),
        bias_ids=encode_token_ids(bias),
        bias_values=array("f", bias.values()).tobytes(),
        stop=encode_token_ids(params.stop_token_ids or ()),
        logprobs=encode_token_ids(params.logprob_token_ids or ()),
    )


def drop_packed(params: SamplingParams) -> None:
    """Leave out of `params` what travels beside it, and the texts that only a frontend knows."""
    for name in _UNPACKED:
        setattr(params, name, None)


def has_unpacked(params: SamplingParams) -> bool:
    """Whether `params` holds what `drop_packed` leaves out."""
    return any(getattr(params, name) for name in _UNPACKED)


def unpack_bad_words(lists: TokenLists) -> list[bytes]:
    """The packed ids of each bad word. Lengths must add up (`core/scheduling/admission.py` sees to it)."""
    words: list[bytes] = []
    start = 0
    for length in decode_token_ids(lists.bad_word_lengths):
        end = start + length * TOKEN_SIZE_BYTES
        words.append(lists.bad_words[start:end])
        start = end
    return words


# A set of tokens is packed as int32 ids, or as a bit a token of the vocabulary (the lowest bit of the first
# byte is token 0) where that is no longer. So its length says which it is.


def encode_token_set(token_ids: Collection[int], vocab_size: int) -> bytes:
    """The shorter form of distinct ids; 262,144 ids take 9 ms. An id beyond the vocabulary stays an id."""
    mask_size_bytes = -(-vocab_size // 8)
    if len(token_ids) * TOKEN_SIZE_BYTES < mask_size_bytes or max(token_ids, default=0) >= vocab_size:
        return encode_token_ids(token_ids)
    digits = bytearray(b"0") * vocab_size
    for token_id in token_ids:
        digits[token_id] = 49  # "1"
    digits.reverse()
    return int(bytes(digits), 2).to_bytes(mask_size_bytes, "little")


def is_token_mask(packed: bytes, vocab_size: int) -> bool:
    """Whether a token set that is not empty has the form of a bit a token."""
    return len(packed) == -(-vocab_size // 8)
