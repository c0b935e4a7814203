"""Every cap of the HTTP side in one table: name, value, meaning, and the status of what exceeds it.

The first part can be set (`quire serve --limit NAME=VALUE`); the second is fixed by SamplingParams, whose
numbers are shown here and checked there or while a request is parsed.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from ...ipc.errors import ConfigError, did_you_mean
from ...ipc.params.request_options import MAX_CACHE_SALT_LENGTH, MAX_TIMEOUT_S
from ...ipc.params.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_N,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from ...ipc.protocol.token_lists import MAX_BAD_WORD_TOKENS
from ..formats.offered_tools import MAX_TOOLS

MAX_TEXT_MEMORY_BYTES = 2 << 30  # of a text process's address space
MAX_TEXT_ANSWER_BYTES = 64 << 20
MAX_TOP_LOGPROBS = 20  # OpenAI's; the engine's max_logprobs may be lower
# Of a body outside of strings, so that msgspec decodes it in some 50 ms on a core of 2 GHz (parsing.py).
MAX_JSON_VALUES = 2**21  # token ids
MAX_JSON_STRINGS = 2**17
MAX_JSON_CONTAINERS = 2**16
MAX_JSON_FLOATS = 4200  # 10 us each at worst; the largest logit_bias has 4,096
MAX_JSON_LONG_NUMBERS = 100  # 40 us at 700 digits

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, Meta(gt=0.0, le=86400.0)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The caps that can be set."""

    max_connections: Count = 4096
    max_header_bytes: Count = 65536
    max_headers: Count = 100
    max_header_s: Seconds = 10.0
    max_total_header_bytes: Count = 16 * 1024 * 1024
    max_pipelined: Count = 64
    max_body_bytes: Count = 8 * 1024 * 1024
    max_total_body_bytes: Count = 64 * 1024 * 1024
    max_body_s: Seconds = 60.0
    max_keep_alive_s: Seconds = 75.0
    max_prompts: Count = 256
    max_inputs: Count = 2048
    max_messages: Count = 4096
    max_sequences: Count = 1024
    max_result_bytes: Count = 256 * 1024 * 1024
    max_total_logprobs_bytes: Count = 1024 * 1024 * 1024
    max_render_s: Seconds = 10.0
    write_timeout_s: Seconds = 60.0
    ping_interval_s: Seconds = 15.0
    max_stored_bytes: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 32 * 1024 * 1024
    max_stored_s: Seconds = 3600.0


class Limit(NamedTuple):
    """A row of the table. `answer`: what a request past it gets."""

    name: str
    value: int | float
    meaning: str
    answer: str


_SETTABLE = {
    "max_connections": ("open connections of one process; idle ones give way, busy ones do not", "503"),
    "max_header_bytes": ("bytes of a request's line and headers, and of its trailers", "431"),
    "max_headers": ("headers of a request", "431"),
    "max_header_s": ("seconds from a request's first byte to its last header", "408"),
    "max_total_header_bytes": ("bytes of the headers of all requests that a process has", "429"),
    "max_pipelined": ("requests of a connection that wait for an answer behind another", "429"),
    "max_body_bytes": ("bytes of a request's body, with the lines between its chunks", "413"),
    "max_total_body_bytes": ("bytes of all bodies that a process has not parsed, or max_body_bytes", "429"),
    "max_body_s": ("seconds in which a request's body must come", "408"),
    "max_keep_alive_s": ("seconds that an idle connection stays open", "closed"),
    "max_prompts": ("prompts of one completions request", "400"),
    "max_inputs": ("texts of one request for vectors, classes, scores or ranks", "400"),
    "max_messages": ("messages of one conversation, and parts and calls in all of them", "400"),
    "max_sequences": ("prompts times n (or best_of) of one request", "400"),
    "max_result_bytes": ("bytes of an answer: 64 a token, 384 a logprob, 48 a number of a vector", "413"),
    "max_total_logprobs_bytes": ("of them for logprobs and vectors of all requests; shared", "429"),
    "max_render_s": ("seconds of processor time in which a prompt is rendered and tokenized", "400"),
    "write_timeout_s": ("seconds that a write may wait for a reader that does not read", "closed"),
    "ping_interval_s": ("seconds without a chunk before a stream gets a comment", "': ping'"),
    "max_stored_bytes": ("bytes of responses that a process keeps; shared by callers; 0: none", "forgotten"),
    "max_stored_s": ("seconds that a response is kept since it was last used", "forgotten"),
}
_FIXED = [
    Limit("n, best_of", MAX_N, "sequences of one prompt", "400"),
    Limit("stop", MAX_STOP_STRINGS, "stop texts", "400"),
    Limit("stop length", MAX_STOP_LENGTH, "characters of a stop text or bad word", "400"),
    Limit("stop_token_ids", MAX_STOP_TOKEN_IDS, "stop token ids", "400"),
    Limit("bad_words", MAX_BAD_WORDS, "bad words", "400"),
    Limit("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS, "allowed token ids", "400"),
    Limit("bad_words tokens", MAX_BAD_WORD_TOKENS, "token ids of all bad words of a request", "400"),
    Limit("logit_bias", MAX_LOGIT_BIAS, "tokens with a bias", "400"),
    Limit("top_logprobs", MAX_TOP_LOGPROBS, "alternatives of a token (the engine's max_logprobs too)", "400"),
    Limit("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS, "token ids whose logprobs are asked for", "400"),
    Limit("JSON values", MAX_JSON_VALUES, "values of a body's lists and objects", "400"),
    Limit("JSON strings", MAX_JSON_STRINGS, "texts of a body, names of fields with them", "400"),
    Limit("JSON containers", MAX_JSON_CONTAINERS, "lists and objects of a body", "400"),
    Limit("JSON floats", MAX_JSON_FLOATS, "numbers of a body with a point or an exponent", "400"),
    Limit("JSON long numbers", MAX_JSON_LONG_NUMBERS, "times 24 digits in a row in a body", "400"),
    Limit("tools", MAX_TOOLS, "tools that a request offers", "400"),
    Limit("cache_salt", MAX_CACHE_SALT_LENGTH, "characters of a cache salt", "400"),
    Limit("text memory", MAX_TEXT_MEMORY_BYTES, "bytes in which a prompt is rendered and tokenized", "400"),
    Limit("text answer", MAX_TEXT_ANSWER_BYTES, "bytes of an answer of /tokenize or /detokenize", "400"),
    Limit("timeout_s", MAX_TIMEOUT_S, "seconds of timeout_s and queue_timeout_s", "400"),
]


def list_limits(limits: Limits) -> list[Limit]:
    """The whole table."""
    return [Limit(name, getattr(limits, name), *row) for name, row in _SETTABLE.items()] + _FIXED


def parse_limits(settings: list[str]) -> Limits:
    """Limits of `NAME=VALUE` texts; raises ConfigError for an unknown name or a value out of range."""
    values: dict[str, str] = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator:
            raise ConfigError("limit", setting, "NAME=VALUE, see --help-limits")
        if name not in _SETTABLE:
            raise ConfigError("limit", name, f"one of {', '.join(_SETTABLE)}{did_you_mean(name, _SETTABLE)}")
        values[name] = value
    for name, value in values.items():
        try:
            msgspec.convert({name: value}, Limits, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(name, value, str(error).split(" - at ")[0]) from None
    return msgspec.convert(values, Limits, strict=False)
