"""Parsed prompts -> token ids that an engine takes, after every check that needs its limits."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from ...ipc.errors import InputError, PromptError
from ...ipc.protocol.messages import EngineFacts
from ...ipc.protocol.token_ids import TOKEN_SIZE_BYTES, decode_token_ids, encode_token_ids
from ..text.tokenizer import Tokenizer
from .prompts import RawPrompt, check_encodable, describe_length, describe_token_ids

if TYPE_CHECKING:
    from tokenizers import Encoding


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A checked prompt. `text` is None for one given as token ids; `packed` is `token_ids` for the wire."""

    name: str  # of the argument, for errors
    text: str | None
    token_ids: list[int]
    packed: bytes
    cache_salt: str
    type_start: int | None = None  # as in EngineCoreRequest

    def without_trailing(self, token_id: int) -> Self:
        """The prompt without this token at its end, however often; of nothing else, one is left."""
        count = len(self.token_ids)
        while count > 1 and self.token_ids[count - 1] == token_id:
            count -= 1
        packed = self.packed[: count * TOKEN_SIZE_BYTES]
        return replace(self, token_ids=self.token_ids[:count], packed=packed)


class PromptTokenizer:
    """Tokenizes and checks prompts against one engine's facts. `tokenizer` None: token ids only.

    num_generated: the least tokens that a prompt leaves room for. id_hint: what callers who send ids that the
    model does not have may have overlooked.
    """

    def __init__(
        self, facts: EngineFacts, tokenizer: Tokenizer | None, num_generated: int, id_hint: str = ""
    ) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._num_generated = num_generated
        self._id_hint = id_hint

    def tokenize(
        self, prompts: Sequence[RawPrompt], add_special_tokens: bool = True
    ) -> list[TokenizedPrompt]:
        """Turn texts into token ids, many at once on all cores, and check all. Raises PromptError."""
        texts = [one for one in prompts if one.token_ids is None]
        encodings = self._encode(texts, add_special_tokens)
        for one, encoding in zip(texts, encodings, strict=True):
            if one.truncation is None:
                self._check_length(one.name, len(encoding))
            one.token_ids, one.is_encoded = encoding.ids, True
        return [self.check(one) for one in prompts]

    def _encode(self, prompts: Sequence[RawPrompt], add_special_tokens: bool) -> list[Encoding]:
        if not prompts:
            return []
        names, texts = [one.name for one in prompts], [one.text or "" for one in prompts]
        tokenizer = require_tokenizer(self._tokenizer, names, texts)
        with refusing_texts(names, texts):
            return tokenizer.encode_texts(texts, add_special_tokens)

    def check(self, raw: RawPrompt) -> TokenizedPrompt:
        """Cut the token ids as `raw.truncation` says and check them. Raises PromptError."""
        if raw.truncation is not None:
            raw.token_ids = raw.truncation.apply(list(raw.token_ids))
        self._check_length(raw.name, len(raw.token_ids))  # before anything that takes longer for more of them
        if not raw.is_encoded and bool in set(map(type, raw.token_ids)):  # they would be packed as 0 and 1
            wrong = next(one for one in raw.token_ids if isinstance(one, bool))
            raise PromptError(raw.ids_name, wrong, "integers as token ids")
        vocab_size = self._facts.vocab_size
        try:
            packed = encode_token_ids(raw.token_ids)
        except (TypeError, OverflowError):
            wrong = next((one for one in raw.token_ids if not _is_int32(one)), raw.token_ids)
            raise PromptError(raw.name, wrong, self._describe_ids(raw)) from None
        token_ids = raw.token_ids if raw.is_encoded else decode_token_ids(packed)
        if not token_ids:
            raise PromptError(raw.name, raw.text if raw.text is not None else [], "at least one token")
        if max(token_ids) >= vocab_size or not (raw.is_encoded or min(token_ids) >= 0):
            wrong = next(one for one in token_ids if not 0 <= one < vocab_size)
            raise PromptError(raw.name, wrong, self._describe_ids(raw))
        return TokenizedPrompt(raw.name, raw.text, token_ids, packed, raw.cache_salt, raw.type_start)

    def _describe_ids(self, raw: RawPrompt) -> str:
        hint = "" if raw.is_encoded else self._id_hint
        return f"{describe_token_ids(self._facts.vocab_size)}{hint}"

    def _check_length(self, name: str, num_tokens: int) -> None:
        limit, reserved = self._facts.max_model_len, self._num_generated
        if num_tokens > limit - reserved:
            raise PromptError(name, f"{num_tokens} tokens", describe_length(limit, reserved))
        slots = self._facts.num_gpu_blocks * self._facts.block_size
        if slots and num_tokens > slots - reserved:  # a bidirectional model has none
            raise PromptError(
                name,
                f"{num_tokens} tokens",
                f"at most {slots - reserved}, the KV cache of this engine "
                "(raise kv_cache_memory_bytes or num_gpu_blocks_override)",
            )


def require_tokenizer(tokenizer: Tokenizer | None, names: Sequence[str], texts: Sequence[str]) -> Tokenizer:
    """The tokenizer, if there is one and no text is empty. Raises PromptError."""
    if tokenizer is None:
        raise PromptError(names[0], texts[0], "token ids: this engine runs without a tokenizer")
    for name, text in zip(names, texts, strict=True):
        if not text:
            raise PromptError(name, text, "a text that is not empty")
    return tokenizer


@contextlib.contextmanager
def refusing_texts(names: Sequence[str], texts: Sequence[str]) -> Generator[None]:
    """Raise PromptError where a tokenizer says that it cannot take one of the texts."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:  # tokenizers has no narrower one, as where a vocabulary lacks [UNK]
        for name, text in zip(names, texts, strict=True):
            check_encodable(name, text)
        raise PromptError(names[0], texts[0], f"a text that can be tokenized ({error})") from error


def _is_int32(value: Any) -> bool:
    try:
        return -(2**31) <= operator.index(value) < 2**31
    except TypeError:
        return False
