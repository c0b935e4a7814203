"""Prompts as users write them: a text, token ids, or a dict with either. A wrong form is a PromptError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, cast

import msgspec

from ...ipc.errors import PromptError, SamplingParamsError, did_you_mean
from ...ipc.params.param_fields import make_plain
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.protocol.messages import MAX_CACHE_SALT_LENGTH, EngineFacts


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
    asked = params.truncate_prompt_tokens
    if asked is None:
        return None
    room = min(facts.max_model_len, facts.num_gpu_blocks * facts.block_size)
    max_tokens = params.max_tokens or 1
    kept = room - max_tokens if asked == -1 else asked
    if kept < 1:
        allowed = f"max_tokens below {room}, the most tokens of a request here: it is {max_tokens}"
        raise SamplingParamsError("truncate_prompt_tokens", asked, allowed)
    if kept >= room:
        allowed = f"-1, or from 1 to {room - 1}: a request has at most {room} tokens here, one to generate"
        raise SamplingParamsError("truncate_prompt_tokens", asked, allowed)
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


@dataclass(slots=True)
class RawPrompt:
    """A prompt whose form is right. `token_ids` None: they are still to be made of `text`.

    is_encoded: they are a list that the tokenizer has made.
    """

    name: str
    text: str | None
    token_ids: Any
    cache_salt: str
    ids_name: str = "prompt"  # of the token ids alone
    truncation: Truncation | None = None
    type_start: int | None = None  # as in EngineCoreRequest
    is_encoded: bool = False


def is_many(prompts: Prompt | Sequence[Prompt]) -> bool:
    """A list is many prompts, unless it holds token ids."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        return False
    return not prompts or isinstance(prompts[0], (str, Mapping, Sequence)) or hasattr(prompts[0], "__len__")


def parse_prompt(name: str, prompt: Any) -> RawPrompt:
    """The prompt that is called `name` in errors. Raises PromptError."""
    if isinstance(prompt, str):
        return RawPrompt(name, make_plain(prompt), None, "")
    if isinstance(prompt, Mapping):
        return _parse_dict(name, cast(Mapping[str, Any], prompt))
    return RawPrompt(name, None, _as_sequence(name, prompt, _ALLOWED_PROMPT), "", name)


def _as_sequence(name: str, values: Any, allowed: str) -> Sequence[Any]:
    """Token ids as a sequence, whose range is unchecked; an array of any library turns itself into a list."""
    ids = values
    if not isinstance(values, Sequence) and hasattr(values, "tolist"):
        ids = values.tolist()
    # Bytes are a sequence of integers that nobody meant as ids.
    if not isinstance(ids, Sequence) or isinstance(values, (str, bytes, bytearray, memoryview)):
        raise PromptError(name, values, allowed)
    return cast(Sequence[Any], ids)


def _parse_dict(name: str, prompt: Mapping[str, Any]) -> RawPrompt:
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
    salt = parse_salt(f"{name}.cache_salt", prompt.get("cache_salt"))
    return RawPrompt(name, text, token_ids, salt, ids_name)


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


def parse_salt(name: str, salt: Any) -> str:
    """The checked cache_salt, '' for None. Raises PromptError."""
    salt = make_plain(salt)
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_CACHE_SALT_LENGTH):
        raise PromptError(name, salt, f"a text of 1 to {MAX_CACHE_SALT_LENGTH} characters, or None")
    check_encodable(name, salt or "")
    return salt or ""


def check_encodable(name: str, text: str) -> None:
    """Raises PromptError for half a surrogate pair, which no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            name,
            text[error.start : error.start + 1],
            f"text that UTF-8 can hold (lone surrogate at character {error.start})",
        ) from None
