"""Prompts as users write them (a text, token ids, a dict with either), and the token ids an engine takes.

A wrong form is a PromptError.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast

import msgspec

from ...ipc.errors import InputError, PromptError, SamplingParamsError, did_you_mean
from ...ipc.params.param_fields import make_plain
from ...ipc.params.request_options import RequestOptions, check_encodable, check_name, check_salt
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.protocol.messages import EngineFacts
from ...ipc.protocol.token_ids import TOKEN_SIZE_BYTES, decode_token_ids, encode_token_ids
from ..text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding


class Truncation(msgspec.Struct, frozen=True):
    """Keep `max_tokens` tokens of a prompt: its last ones, or its first ones (`keeps_start`)."""

    max_tokens: int
    keeps_start: bool = False

    def apply(self, token_ids: list[int]) -> list[int]:
        """What is kept; the list itself if that is all."""
        if len(token_ids) <= self.max_tokens:
            return token_ids
        return token_ids[: self.max_tokens] if self.keeps_start else token_ids[-self.max_tokens :]


def find_truncation(params: SamplingParams, facts: EngineFacts) -> Truncation | None:
    """What checked parameters say; None if a prompt that is too long is to be refused.

    -1 leaves room for max_tokens, or for one token if there is no such limit. Raises SamplingParamsError for
    what this engine has no room for.
    """
    length = params.truncate_prompt_tokens
    if length is None:
        return None
    room = min(facts.max_model_len, facts.num_kv_tokens)
    max_tokens = params.max_tokens or 1
    kept = room - max_tokens if length == -1 else length
    if kept < 1:
        allowed = f"max_tokens below {room}, the most tokens of a request here: it is {max_tokens}"
        raise SamplingParamsError("truncate_prompt_tokens", length, allowed)
    if kept >= room:
        allowed = f"-1, or from 1 to {room - 1}: a request has at most {room} tokens here, one to generate"
        raise SamplingParamsError("truncate_prompt_tokens", length, allowed)
    return Truncation(kept, params.truncation_side == "right")


Prompt = str | Sequence[int] | Mapping[str, Any]
PromptType = Prompt  # vLLM's name


class TextPrompt(TypedDict):
    """A prompt as a text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids, and the text that they are of, if somebody wants it in the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_ALLOWED_PROMPT = "a text, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"


class ParsedPrompt(msgspec.Struct):
    """A prompt whose form is right. `token_ids` are a list once it is checked, and `packed` is not empty.

    `text` None: it was given as token ids. is_encoded: its token ids are a list that the tokenizer has made.
    """

    name: str  # of the argument, for errors
    text: str | None
    token_ids: Any  # None: they are still to be made of `text`
    cache_salt: str
    ids_name: str = "prompt"  # of the token ids alone
    truncation: Truncation | None = None
    type_start: int | None = None  # as in EngineCoreRequest
    is_encoded: bool = False
    packed: bytes = b""  # the token ids for the wire

    def salt(self, options: RequestOptions) -> RequestOptions:
        """The options with the prompt's cache_salt, if it has one."""
        if not self.cache_salt:
            return options
        return msgspec.structs.replace(options, cache_salt=self.cache_salt)

    def drop_trailing(self, token_id: int) -> None:
        """Take this token from its end, however often it is there; of nothing else, one is left."""
        count = len(self.token_ids)
        while count > 1 and self.token_ids[count - 1] == token_id:
            count -= 1
        self.token_ids = self.token_ids[:count]
        self.packed = self.packed[: count * TOKEN_SIZE_BYTES]


def is_many(prompts: Prompt | Sequence[Prompt]) -> bool:
    """A list is many prompts, unless it holds token ids."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        return False
    return not prompts or isinstance(prompts[0], (str, Mapping, Sequence)) or hasattr(prompts[0], "__len__")


def parse_prompt(name: str, prompt: Any) -> ParsedPrompt:
    """The prompt that is called `name` in errors. Raises PromptError."""
    if isinstance(prompt, str):
        return ParsedPrompt(name, make_plain(prompt), None, "")
    if isinstance(prompt, Mapping):
        return _parse_dict(name, cast(Mapping[str, Any], prompt))
    return ParsedPrompt(name, None, _as_sequence(name, prompt, _ALLOWED_PROMPT), "", name)


def _as_sequence(name: str, values: Any, allowed: str) -> Sequence[Any]:
    """Token ids as a sequence, whose range is unchecked; an array of any library turns itself into a list."""
    ids = values
    if not isinstance(values, Sequence) and hasattr(values, "tolist"):
        ids = values.tolist()
    # Bytes are a sequence of integers that nobody meant as ids.
    if not isinstance(ids, Sequence) or isinstance(values, (str, bytes, bytearray, memoryview)):
        raise PromptError(name, values, allowed)
    return cast(Sequence[Any], ids)


def _parse_dict(name: str, prompt: Mapping[str, Any]) -> ParsedPrompt:
    for key in prompt:
        if key not in _PROMPT_KEYS:
            hint = did_you_mean(str(key), _PROMPT_KEYS)
            raise PromptError(f"{name}.{key}", prompt[key], f"no such key{hint or '; ' + _ALLOWED_PROMPT}")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise PromptError(name, dict(prompt), _ALLOWED_PROMPT)
    if text is not None and not isinstance(text, str):
        raise PromptError(f"{name}.prompt", text, "a text")
    ids_name = f"{name}.prompt_token_ids"
    if token_ids is not None:
        token_ids = _as_sequence(ids_name, token_ids, "a list of token ids")
    text = None if text is None else make_plain(text)
    salt = check_salt(f"{name}.cache_salt", prompt.get("cache_salt"))
    return ParsedPrompt(name, text, token_ids, salt, ids_name)


def describe_length(max_model_len: int, num_generated: int = 1) -> str:
    """How long a prompt may be that leaves room to generate so many tokens; clients look for vLLM's words.

    Without any it is for vectors, and a longer one may be cut.
    """
    rest = ", one to generate" if num_generated else ""
    cut = "" if num_generated else "; truncate_prompt_tokens=-1 cuts longer ones (TEI, Cohere: truncate)"
    return (
        f"at most {max_model_len - num_generated} (max_model_len={max_model_len}{rest}): "
        f"this model's maximum context length is {max_model_len} tokens{cut}"
    )


def describe_token_ids(vocab_size: int) -> str:
    """Which token ids there are; likewise."""
    return f"token ids from 0 to {vocab_size - 1}: any other is out of vocabulary (vocab_size={vocab_size})"


MAX_USER_ID_LENGTH = 200  # leaves room for the index and the random part within the wire's cap


def check_request_id(request_id: Any) -> str:
    """The user's id of a request. Raises InputError."""
    return check_name("request_id", request_id, 1, MAX_USER_ID_LENGTH)


# Parsed prompts -> token ids that an engine takes, after every check that needs its limits.


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

    def tokenize(self, prompts: Sequence[ParsedPrompt], add_special_tokens: bool = True) -> None:
        """Turn texts into token ids, many at once on all cores, and check all. Raises PromptError."""
        texts = [prompt for prompt in prompts if prompt.token_ids is None]
        encodings = self._encode(texts, add_special_tokens)
        for prompt, encoding in zip(texts, encodings, strict=True):
            if prompt.truncation is None:
                self._check_length(prompt.name, len(encoding))
            prompt.token_ids, prompt.is_encoded = encoding.ids, True
        for prompt in prompts:
            self.check(prompt)

    def _encode(self, prompts: Sequence[ParsedPrompt], add_special_tokens: bool) -> list[Encoding]:
        if not prompts:
            return []
        names, texts = [prompt.name for prompt in prompts], [prompt.text or "" for prompt in prompts]
        tokenizer = require_tokenizer(self._tokenizer, names, texts)
        with refusing_texts(names, texts):
            return tokenizer.encode_texts(texts, add_special_tokens)

    def check(self, raw: ParsedPrompt) -> None:
        """Cut the token ids as `raw.truncation` says and check them. Raises PromptError."""
        if raw.truncation is not None:
            raw.token_ids = raw.truncation.apply(list(raw.token_ids))
        self._check_length(raw.name, len(raw.token_ids))  # before anything that takes longer for more of them
        if not raw.is_encoded and bool in set(map(type, raw.token_ids)):  # they would be packed as 0 and 1
            wrong = next(token_id for token_id in raw.token_ids if isinstance(token_id, bool))
            raise PromptError(raw.ids_name, wrong, "integers as token ids")
        vocab_size = self._facts.vocab_size
        try:
            packed = encode_token_ids(raw.token_ids)
        except (TypeError, OverflowError):
            wrong = next((token_id for token_id in raw.token_ids if not _is_int32(token_id)), raw.token_ids)
            raise PromptError(raw.name, wrong, self._describe_ids(raw)) from None
        token_ids = raw.token_ids if raw.is_encoded else decode_token_ids(packed)
        if not token_ids:
            raise PromptError(raw.name, raw.text if raw.text is not None else [], "at least one token")
        if max(token_ids) >= vocab_size or not (raw.is_encoded or min(token_ids) >= 0):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise PromptError(raw.name, wrong, self._describe_ids(raw))
        raw.token_ids, raw.packed = token_ids, packed

    def _describe_ids(self, raw: ParsedPrompt) -> str:
        hint = "" if raw.is_encoded else self._id_hint
        return f"{describe_token_ids(self._facts.vocab_size)}{hint}"

    def _check_length(self, name: str, num_tokens: int) -> None:
        limit, reserved = self._facts.max_model_len, self._num_generated
        if num_tokens > limit - reserved:
            raise PromptError(name, f"{num_tokens} tokens", describe_length(limit, reserved))
        slots = self._facts.num_kv_tokens
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
