"""SamplingParams: how one request is sampled and when it stops. Names, defaults and ranges are vLLM's.

A field's type, range, default and text stand in its declaration, and checks, HTTP requests with their schema
and CLI options are made of it; what computes with it is a logit edit or a filter (`worker/sampling`). What
temperature 0 switches off is reset in `_normalize`. What needs a tokenizer is checked by the input processor.
"""

from __future__ import annotations

import itertools
import math
import operator
from array import array
from collections.abc import Callable, Sized
from enum import IntEnum
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..errors import SamplingParamsError
from .absent_arguments import PARAMS_FIELDS, AbsentArgument, drop_absent
from .param_fields import MAX_INT, bounds, make_plain, read_fields
from .repetition_detection import RepetitionDetectionParams, check_repetition_detection
from .structured_outputs import RENAMED_FIELDS, StructuredOutputsParams, check_renamed

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 4096
MAX_BAD_WORDS = 128
MAX_LOGPROB_TOKEN_IDS = 128  # vLLM's
MAX_ALLOWED_TOKEN_IDS = 2**19  # twice the largest vocabularies
MAX_EXTRA_ARGS_BYTES = 8192  # as JSON
MAX_SEED = 2**63 - 1

# Below this a temperature means greedy (vLLM's figure); between it and MIN_TEMPERATURE it is lifted.
GREEDY_TEMPERATURE = 1e-5
MIN_TEMPERATURE = 1e-2


class RequestOutputKind(IntEnum):
    """What each RequestOutput of a request carries."""

    CUMULATIVE = 0  # everything generated so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # one output, at the end


# These are said of requests in `frontend/http/bodies/schema.py` too.
Temperature = Annotated[float, bounds(0.0, 2.0, "0 takes the likeliest token always; higher is livelier")]
TopP = Annotated[
    float, Meta(gt=0.0, le=1.0, description="only the likeliest tokens that together have this probability")
]
Seed = Annotated[
    int, bounds(-MAX_SEED - 1, MAX_SEED, "same seed, same text; default: another text each time")
]
NumLogprobs = Annotated[int, bounds(-1, MAX_INT, "alternatives at each position; -1: the whole vocabulary")]
Stops = Annotated[
    str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)], Meta(description="end before this text")
]


TruncationSide = Literal["left", "right"]  # where a prompt is cut


class _ChecksNames(msgspec.StructMeta):
    """Says of a field that has another name today what it is; costs nothing where all names are known."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*args, **fields)
        except TypeError:
            check_renamed(name for name, value in fields.items() if value is not None)
            kept = drop_absent(
                fields, PARAMS_FIELDS | dict.fromkeys(RENAMED_FIELDS, AbsentArgument("")), SamplingParamsError
            )
            if len(kept) == len(fields):
                raise
        return super().__call__(*args, **kept)


class SamplingParams(
    msgspec.Struct, metaclass=_ChecksNames, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Sampling and stopping of one request; what a field means is its description.

    Temperature 0 forces top_p=1, top_k=0, min_p=0. Noise is a function of (seed, output position) only.
    presence_penalty and frequency_penalty are over the output, repetition_penalty over prompt and output.
    logit_bias: token id -> value added to its logit, clamped to -100..100.
    allowed_token_ids: nothing else can be sampled. bad_words: texts that are never produced.
    stop_token_ids: end generation, as `stop` does.
    logprob_token_ids: exactly these, and the token itself, have a logprob at each position of the output.
    extra_args: plain JSON values for the engine's logits processors, by name.
    structured_outputs: what the output has to look like; it is made a grammar when a request is added.

    Raises SamplingParamsError (a ValueError) on construction and from `verify`.
    """

    n: Annotated[int, bounds(1, MAX_N, "sequences to return")] = 1
    best_of: Annotated[int, bounds(1, MAX_N, "sequences to generate and choose n of")] | None = None
    max_tokens: Annotated[int, bounds(1, MAX_INT, "most tokens to generate")] | None = 16
    min_tokens: Annotated[int, bounds(0, MAX_INT, "no end before so many tokens are generated")] = 0
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[int, bounds(-1, MAX_INT, "only this many of the likeliest tokens; 0: all")] = 0
    min_p: Annotated[
        float, bounds(0.0, 1.0, "only tokens at least this likely, relative to the likeliest")
    ] = 0.0
    presence_penalty: Annotated[
        float, bounds(-2.0, 2.0, "above 0: tokens become less likely once they came")
    ] = 0.0
    frequency_penalty: Annotated[float, bounds(-2.0, 2.0, "above 0: less likely each time they come")] = 0.0
    # Logits are multiplied or divided by it: further out they can leave float32, with no token to choose.
    repetition_penalty: Annotated[
        float, bounds(0.01, 100.0, "above 1: tokens that were there become less likely")
    ] = 1.0
    seed: Seed | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: Annotated[bool, Meta(description="leave `stop` in the text")] = False
    ignore_eos: Annotated[bool, Meta(description="go on after the model's end of sequence")] = False
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    detokenize: bool = True
    skip_special_tokens: Annotated[bool, Meta(description="leave special tokens out of the text")] = True
    spaces_between_special_tokens: Annotated[bool, Meta(description="spaces around special tokens")] = True
    logit_bias: Annotated[dict[int, float], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    allowed_token_ids: Annotated[list[int], Meta(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[str], Meta(max_length=MAX_BAD_WORDS)] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    repetition_detection: (
        Annotated[RepetitionDetectionParams, Meta(description="end an output that repeats itself")] | None
    ) = None
    logprob_token_ids: (
        Annotated[
            list[int], Meta(max_length=MAX_LOGPROB_TOKEN_IDS, description="whose logprobs each position has")
        ]
        | None
    ) = None
    skip_reading_prefix_cache: (
        Annotated[bool, Meta(description="compute the whole prompt; default: with prompt_logprobs")] | None
    ) = None
    extra_args: dict[str, Any] | None = None
    truncate_prompt_tokens: (
        Annotated[int, bounds(-1, MAX_INT, "cut the prompt to its last tokens; -1: to what fits")] | None
    ) = None
    truncation_side: Annotated[
        TruncationSide, Meta(description="left: the prompt's last tokens are kept")
    ] = "left"
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self.verify()

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return list(self.stop) if isinstance(self.stop, list) else ([self.stop] if self.stop else [])

    @property
    def reads_prefix_cache(self) -> bool:
        """True if blocks that the prefix cache holds may stand for a part of the prompt."""
        skips = self.skip_reading_prefix_cache
        return self.prompt_logprobs is None if skips is None else not skips

    @property
    def num_sequences(self) -> int:
        """How many sequences are generated: best_of, or n."""
        return self.best_of or self.n

    def verify(self) -> None:
        """Check every field and normalize the equivalents (greedy, -1 seeds, iterables).

        Values that stand for plain ones become plain, since messages hold nothing else: a str Enum's members
        and other subclasses, scalars of numpy and the like.
        Called on construction, on decoding and when a request is added, since fields can be assigned.
        """
        for name, default, check in _CHECKS:
            value = getattr(self, name)
            if value is not default:
                setattr(self, name, check(make_plain(value)))
        self._verify_combinations()
        self._normalize()

    def clone(self) -> SamplingParams:
        """A copy that shares nothing that can be changed."""
        copy = msgspec.structs.replace(self)
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logprob_token_ids"):
            value = getattr(copy, name)
            if isinstance(value, list):
                setattr(copy, name, list(value))  # pyright: ignore[reportUnknownArgumentType]
        copy.logit_bias = dict(copy.logit_bias) if copy.logit_bias else None
        return copy

    def _verify_combinations(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise SamplingParamsError("best_of", self.best_of, f"at least n={self.n}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.stop_strings and not self.detokenize:
            raise SamplingParamsError("stop", self.stop, "only with detokenize=True")
        if self.logprob_token_ids and self.logprobs:
            allowed = "None or 0 with logprob_token_ids, which are in place of the likeliest tokens"
            raise SamplingParamsError("logprobs", self.logprobs, allowed)
        if self.prompt_logprobs is not None and self.skip_reading_prefix_cache is False:
            allowed = "None or True with prompt_logprobs, which need every position"
            raise SamplingParamsError("skip_reading_prefix_cache", False, allowed)

    def _normalize(self) -> None:
        if self.is_greedy:
            self.temperature = 0.0
            self.top_p = 1.0
            self.top_k = 0
            self.min_p = 0.0
        self.temperature = max(self.temperature, MIN_TEMPERATURE) if self.temperature else 0.0
        self.top_k = max(self.top_k, 0)
        if self.logprob_token_ids:
            self.logprobs = 0  # the token's own is there as well


def count_alternatives(num_logprobs: int | None, vocab_size: int) -> int | None:
    """How many tokens beside a position's own `num_logprobs` asks for; None for no logprobs."""
    if num_logprobs is None:
        return None
    return vocab_size if num_logprobs < 0 else min(num_logprobs, vocab_size)


SAMPLING_FIELDS = read_fields(SamplingParams, SamplingParamsError)


def _check_seed(value: Any) -> int | None:
    return None if value == -1 else SAMPLING_FIELDS["seed"].check(value)


def _check_logprobs(name: str, value: Any) -> int | None:
    if isinstance(value, bool):
        return 1 if value else None
    return SAMPLING_FIELDS[name].check(value)


def _check_stop(value: Any) -> str | list[str] | None:
    if isinstance(value, str):
        _check_text("stop", value, f"a text of 1 to {MAX_STOP_LENGTH} characters")
        return value
    return _check_strings("stop", value, MAX_STOP_STRINGS)


def _check_bad_words(value: Any) -> list[str]:
    if isinstance(value, str):
        raise SamplingParamsError("bad_words", value, "a list of texts")
    return _check_strings("bad_words", value, MAX_BAD_WORDS)


def _check_allowed_ids(value: Any) -> list[int]:
    ids = _check_ids("allowed_token_ids", value, MAX_ALLOWED_TOKEN_IDS)
    if not ids:
        raise SamplingParamsError("allowed_token_ids", [], "None or at least one token id")
    return ids


def _check_output_kind(value: Any) -> RequestOutputKind:
    try:
        return RequestOutputKind(value)
    except ValueError:
        allowed = ", ".join(f"RequestOutputKind.{kind.name}" for kind in RequestOutputKind)
        raise SamplingParamsError("output_kind", value, f"one of {allowed}") from None


def _check_structured(value: Any) -> StructuredOutputsParams:
    if not isinstance(value, StructuredOutputsParams):
        raise SamplingParamsError("structured_outputs", value, "None or StructuredOutputsParams")
    return value


def _check_text(name: str, text: Any, allowed: str) -> None:
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
        raise SamplingParamsError(name, text, allowed)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"lone surrogate at character {error.start}"
        raise SamplingParamsError(name, text, f"text that UTF-8 can hold ({where})") from None


def _check_strings(name: str, values: Any, max_count: int) -> list[str]:
    allowed = f"at most {max_count} texts of 1 to {MAX_STOP_LENGTH} characters"
    try:
        texts = list(values)
    except TypeError:
        raise SamplingParamsError(name, values, allowed) from None
    if len(texts) > max_count:
        raise SamplingParamsError(name, f"{len(texts)} texts", allowed)
    texts = [make_plain(text) for text in texts]
    for text in texts:
        _check_text(name, text, allowed)
    return texts


def _check_ids(name: str, values: Any, max_count: int) -> list[int]:
    """Distinct ids as plain integers; other libraries' integer scalars and arrays are taken too.

    Counted before they are looked at, then checked in C: 262,144 ids take 20 ms.
    """
    allowed = f"a list of token ids (integers from 0 to {MAX_INT})"
    if isinstance(values, (str, bytes, bytearray, memoryview)):  # iterable, and yet no list of ids
        raise SamplingParamsError(name, values, allowed)
    try:
        ids: list[Any] = list(itertools.islice(values, max_count + 1))
    except TypeError:
        raise SamplingParamsError(name, values, allowed) from None
    if len(ids) > max_count:
        count = f"{len(values)} ids" if isinstance(values, Sized) else f"more than {max_count} ids"
        raise SamplingParamsError(name, count, f"at most {max_count} token ids")
    try:
        packed = array("i", ids)
    except (TypeError, OverflowError):
        packed = None
    if packed is None or bool in set(map(type, ids)) or min(packed, default=0) < 0:
        bad = next(value for value in ids if not _is_id(value))
        raise SamplingParamsError(name, bad, allowed)
    return list(dict.fromkeys(packed))


def _is_id(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and 0 <= operator.index(value) <= MAX_INT
    except TypeError:
        return False


def _check_bias(bias: Any) -> dict[int, float]:
    allowed = f"a dict of at most {MAX_LOGIT_BIAS} token ids to finite numbers"
    if not isinstance(bias, dict) or len(bias) > MAX_LOGIT_BIAS:  # pyright: ignore[reportUnknownArgumentType]
        raise SamplingParamsError("logit_bias", bias, allowed)
    checked: dict[int, float] = {}
    wrong: dict[Any, Any] = {}
    for key, value in bias.items():  # pyright: ignore[reportUnknownVariableType]
        key, value = make_plain(key), make_plain(value)
        try:
            token_id, number = int(key), float(value)  # pyright: ignore[reportUnknownArgumentType]
        except (TypeError, ValueError, OverflowError):
            wrong[key] = value
            continue
        # OpenAI's JSON has string keys, in plain decimal; of all else, int() must not have changed the value.
        is_id = key == (str(token_id) if isinstance(key, str) else token_id) and not isinstance(key, bool)
        if not is_id or not 0 <= token_id <= MAX_INT or not math.isfinite(number):
            wrong[key] = value
        checked[token_id] = min(100.0, max(-100.0, number))
    if wrong:
        raise SamplingParamsError("logit_bias", wrong, allowed)
    return checked


def _check_extra_args(values: Any) -> dict[str, Any] | None:
    if values is None:
        return None
    allowed = f"None or a dict of plain JSON values of at most {MAX_EXTRA_ARGS_BYTES} bytes"
    try:
        encoded = msgspec.json.encode(values)
        decoded = msgspec.json.decode(encoded)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        encoded, decoded = b"", None
    # What JSON would change is not plain: NaN, keys that are numbers, dates.
    if not isinstance(decoded, dict) or decoded != values or len(encoded) > MAX_EXTRA_ARGS_BYTES:
        raise SamplingParamsError("extra_args", values, allowed)
    return decoded  # pyright: ignore[reportUnknownVariableType]


# Fields whose check is more than a type and a range.
_SPECIAL_CHECKS: dict[str, Callable[[Any], Any]] = {
    "seed": _check_seed,
    "logprobs": partial(_check_logprobs, "logprobs"),
    "prompt_logprobs": partial(_check_logprobs, "prompt_logprobs"),
    "stop": _check_stop,
    "stop_token_ids": lambda value: _check_ids("stop_token_ids", value, MAX_STOP_TOKEN_IDS),
    "allowed_token_ids": _check_allowed_ids,
    "logprob_token_ids": lambda value: _check_ids("logprob_token_ids", value, MAX_LOGPROB_TOKEN_IDS),
    "bad_words": _check_bad_words,
    "logit_bias": _check_bias,
    "output_kind": _check_output_kind,
    "repetition_detection": check_repetition_detection,
    "extra_args": _check_extra_args,
    "truncate_prompt_tokens": SAMPLING_FIELDS["truncate_prompt_tokens"].check_truncation,
    "structured_outputs": _check_structured,
}
# (field, default, its check): a value that is the default itself needs none.
_CHECKS = [
    (name, default, _SPECIAL_CHECKS.get(name) or SAMPLING_FIELDS[name].check)
    for name, default in zip(SAMPLING_FIELDS, SamplingParams.__struct_defaults__, strict=True)
]
