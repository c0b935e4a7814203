"""Follows a grammar with random bytes, as a model without sense would, and judges what came of it."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

_END = 256
_MAX_LENGTH = 5000


class _Bytes:
    """A vocabulary of all bytes and an end of sequence."""

    bos_token_id = None
    eos_token_id = _END
    special_token_ids = (_END,)

    def __init__(self) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257)


def write(grammar: str, seed: object) -> bytes | None:
    """A random text that follows the grammar, None if it did not end in time."""
    chance = random.Random(str(seed))
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    written = bytearray()
    while len(written) < _MAX_LENGTH:
        assert not matcher.is_error(), matcher.get_error()
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        tokens = [token for token in range(_END) if allowed >> token & 1]
        if not tokens or (allowed >> _END & 1 and chance.random() < 0.5):
            return bytes(written)
        token = chance.choice(tokens)
        assert matcher.consume_token(token)
        written.append(token)
    return None


def accepts(grammar: str, text: str) -> bool:
    """Whether all of a text follows the grammar."""
    return follows(grammar, text, is_whole=True)


def follows(grammar: str, text: str, is_whole: bool) -> bool:
    """Whether a text follows the grammar as far as it goes, and comes to an end of it if it `is_whole`."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    tokens = list(text.encode())
    is_prefix = matcher.try_consume_tokens(tokens) == len(tokens)
    return is_prefix and (matcher.is_accepting() or not is_whole)


def find_faults(schema: dict[str, Any], value: object) -> list[str]:
    """What jsonschema says against a value; a list of `items` is one of the drafts before 2020-12."""
    kind: Any = jsonschema.Draft202012Validator
    if isinstance(schema.get("items"), list) or "additionalItems" in str(schema):
        kind = jsonschema.Draft7Validator
    judge = kind(schema, format_checker=kind.FORMAT_CHECKER)
    return [error.message for error in judge.iter_errors(value)]
