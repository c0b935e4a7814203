"""Every cap of the HTTP side in one table: name, value, meaning, and the status of what exceeds it.

The first part can be set (`quire serve --limit NAME=VALUE`); the second is fixed by SamplingParams, whose
numbers are shown here and checked there or while a request is parsed.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta

from ...ipc.decoding import convert
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
from ..text.bounded_jobs import MAX_RENDER_S, MAX_TEXT_MEMORY_BYTES

MAX_TEXT_ANSWER_BYTES = 64 << 20
MAX_TOP_LOGPROBS = 20  # OpenAI's; the engine's max_logprobs may be lower
# Of a body outside of strings, so that msgspec decodes it in some 50 ms on a core of 2 GHz (parsing.py).
MAX_JSON_VALUES = 2**21  # token ids
MAX_JSON_STRINGS = 2**17
MAX_JSON_CONTAINERS = 2**16
MAX_JSON_FLOATS = 4200  # 10 us each at worst; the largest logit_bias has 4,096
MAX_JSON_LONG_NUMBERS = 100  # 40 us at 700 digits


def count(text: str, answer: str, low: int = 1) -> Meta:
    """A number that users set: what it is, and what a request past it gets."""
    return Meta(ge=low, le=2**31 - 1, description=text, extra={"answer": answer})


def seconds(text: str, answer: str) -> Meta:
    """Likewise, of a time."""
    return Meta(gt=0.0, le=86400.0, description=text, extra={"answer": answer})


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The caps that can be set."""

    max_connections: Annotated[
        int, count("open connections of one process; idle ones give way, busy ones do not", "503")
    ] = 4096
    max_header_bytes: Annotated[
        int, count("bytes of a request's line and headers, and of its trailers", "431, 414")
    ] = 65536
    max_headers: Annotated[int, count("headers of a request", "431")] = 100
    max_header_s: Annotated[
        float, seconds("seconds from a request's first byte to its last header", "408")
    ] = 10.0
    max_total_header_bytes: Annotated[
        int, count("bytes of the headers of all requests that a process has", "429")
    ] = 16 * 1024 * 1024
    max_body_bytes: Annotated[
        int, count("bytes of a request's body, with the lines between its chunks", "413")
    ] = 8 * 1024 * 1024
    max_total_body_bytes: Annotated[
        int, count("bytes of all bodies that a process has not parsed, or max_body_bytes", "429")
    ] = 64 * 1024 * 1024
    max_body_s: Annotated[float, seconds("seconds in which a request's body must come", "408")] = 60.0
    max_keep_alive_s: Annotated[float, seconds("seconds that an idle connection stays open", "closed")] = 75.0
    max_prompts: Annotated[int, count("prompts of one completions request", "400")] = 256
    max_inputs: Annotated[int, count("texts of one request for vectors, classes, scores or ranks", "400")] = (
        2048
    )
    max_messages: Annotated[
        int, count("messages of one conversation, and parts and calls in all of them", "400")
    ] = 4096
    max_sequences: Annotated[int, count("prompts times n (or best_of) of one request", "400")] = 1024
    max_result_bytes: Annotated[
        int, count("bytes of an answer: 64 a token, 384 a logprob, 48 a number of a vector", "413")
    ] = 256 * 1024 * 1024
    max_total_logprobs_bytes: Annotated[
        int, count("of them for logprobs and vectors of all requests; shared", "429")
    ] = 1024 * 1024 * 1024
    max_render_s: Annotated[
        float, seconds("seconds of processor time in which a prompt is rendered and tokenized", "400")
    ] = MAX_RENDER_S
    write_timeout_s: Annotated[
        float, seconds("seconds that a write may wait for a reader that does not read", "closed")
    ] = 60.0
    ping_interval_s: Annotated[
        float, seconds("seconds without a chunk before a stream gets a comment", "': ping'")
    ] = 15.0
    max_stored_bytes: Annotated[
        int, count("bytes of responses that a process keeps; shared by callers; 0: none", "forgotten", low=0)
    ] = 32 * 1024 * 1024
    max_stored_s: Annotated[
        float, seconds("seconds that a response is kept since it was last used", "forgotten")
    ] = 3600.0


class Limit(NamedTuple):
    """A row of the table. `answer`: what a request past it gets."""

    name: str
    value: int | float
    meaning: str
    answer: str


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
    metas = {name: hint.__metadata__[0] for name, hint in get_type_hints(Limits, include_extras=True).items()}
    settable = [
        Limit(name, getattr(limits, name), meta.description, meta.extra["answer"])
        for name, meta in metas.items()
    ]
    return settable + _FIXED


def parse_limits(settings: list[str]) -> Limits:
    """Limits of `NAME=VALUE` texts; raises ConfigError for an unknown name or a value out of range."""
    values: dict[str, str] = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator:
            raise ConfigError("limit", setting, "NAME=VALUE, see --help-limits")
        if name not in Limits.__struct_fields__:
            known = Limits.__struct_fields__
            raise ConfigError("limit", name, f"one of {', '.join(known)}{did_you_mean(name, known)}")
        values[name] = value
    for name, value in values.items():
        try:
            convert({name: value}, Limits, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(name, value, str(error).split(" - at ")[0]) from None
    return convert(values, Limits, strict=False)
