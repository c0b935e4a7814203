"""SamplingParams: how one request is sampled and when it stops. Names, defaults and ranges are vLLM's.

A field added here is checked here; whatever needs a tokenizer or the model's vocabulary is checked by
`frontend/input_processor.py`. PoolingParams joins this file when Quire pools.
"""

from __future__ import annotations

import itertools
import math
import operator
from array import array
from collections.abc import Sized
from enum import IntEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .errors import SamplingParamsError

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 4096
MAX_BAD_WORDS = 128
MAX_ALLOWED_TOKEN_IDS = 2**19  # twice the largest vocabularies
MAX_SEED = 2**63 - 1
MAX_INT = 2**31 - 1  # of every other integer: the worker holds them as int32

# Below this a temperature means greedy (vLLM's figure); between it and MIN_TEMPERATURE it is lifted.
GREEDY_TEMPERATURE = 1e-5
MIN_TEMPERATURE = 1e-2
# Logits are multiplied or divided by it: further out they can leave float32, and there is no token to choose.
MIN_REPETITION_PENALTY = 1e-2
MAX_REPETITION_PENALTY = 1e2


class RequestOutputKind(IntEnum):
    """What each RequestOutput of a request carries."""

    CUMULATIVE = 0  # everything generated so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # one output, at the end


_PLAIN = frozenset({str, int, float, bool, type(None), list, dict, RequestOutputKind})


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling and stopping of one request.

    n, best_of: best_of sequences are generated and the n with the highest cumulative logprob returned.
    temperature: 0 is greedy and forces top_p=1, top_k=0, min_p=0.
    top_k: 0 or -1 considers all tokens. min_p: relative to the most likely token.
    seed: None draws one per request; noise is a function of (seed, output position) only.
    presence_penalty, frequency_penalty: over the output. repetition_penalty: over prompt and output.
    max_tokens: None generates to max_model_len. min_tokens: no stop token before that many.
    stop, stop_token_ids: end generation; `stop` text is cut off unless include_stop_str_in_output.
    logprobs, prompt_logprobs: number of alternatives per position, -1 for the whole vocabulary.
    logit_bias: token id -> value added to its logit, clamped to -100..100.
    allowed_token_ids: nothing else can be sampled. bad_words: texts that are never produced.

    Raises SamplingParamsError (a ValueError) on construction and from `verify`.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Annotated[dict[int, float], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    allowed_token_ids: Annotated[list[int], Meta(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[str], Meta(max_length=MAX_BAD_WORDS)] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

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
    def num_sequences(self) -> int:
        """How many sequences are generated: best_of, or n."""
        return self.best_of or self.n

    def verify(self) -> None:
        """Check every field and normalize the equivalents (greedy, -1 seeds, iterables).

        Values that stand for plain ones become plain, since messages hold nothing else: a str Enum's members
        and other subclasses, scalars of numpy and the like.
        Called on construction, on decoding and when a request is added, since fields can be assigned.
        """
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) not in _PLAIN:
                setattr(self, name, make_plain(value))
        self._verify_counts()
        self._verify_ranges()
        self._verify_stops()
        self._verify_logprobs()
        self._verify_token_sets()
        self._normalize_greedy()

    def clone(self) -> SamplingParams:
        """A copy that shares nothing that can be changed."""
        copy = msgspec.structs.replace(self)
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            value = getattr(copy, name)
            if isinstance(value, list):
                setattr(copy, name, list(value))  # pyright: ignore[reportUnknownArgumentType]
        copy.logit_bias = dict(copy.logit_bias) if copy.logit_bias else None
        return copy

    def _verify_counts(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, 1, MAX_N)
            if self.best_of < self.n:
                raise SamplingParamsError("best_of", self.best_of, f"must be at least n={self.n}")
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, MAX_INT)
        _check_int("min_tokens", self.min_tokens, 0, MAX_INT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.seed == -1:
            self.seed = None
        if self.seed is not None:
            _check_int("seed", self.seed, -MAX_SEED - 1, MAX_SEED)

    def _verify_ranges(self) -> None:
        self.temperature = _check_float("temperature", self.temperature, 0.0, 2.0)
        if GREEDY_TEMPERATURE <= self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        self.top_p = _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise SamplingParamsError("top_p", self.top_p, "a number above 0 and up to 1")
        _check_int("top_k", self.top_k, -1, MAX_INT)
        self.min_p = _check_float("min_p", self.min_p, 0.0, 1.0)
        self.presence_penalty = _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = _check_float(
            "repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        )

    def _verify_stops(self) -> None:
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):
            if not isinstance(getattr(self, name), bool):
                raise SamplingParamsError(name, getattr(self, name), "True or False")
        stops = self.stop
        if isinstance(stops, str):
            _check_text("stop", stops, f"a text of 1 to {MAX_STOP_LENGTH} characters")
        elif stops is not None:
            self.stop = _check_strings("stop", stops, MAX_STOP_STRINGS)
        if self.stop_strings and not self.detokenize:
            raise SamplingParamsError("stop", self.stop, "only with detokenize=True")
        if self.stop_token_ids is not None:
            self.stop_token_ids = _check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            allowed = ", ".join(f"RequestOutputKind.{kind.name}" for kind in RequestOutputKind)
            raise SamplingParamsError("output_kind", self.output_kind, f"one of {allowed}") from None

    def _verify_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool):
                value = 1 if value else None
                setattr(self, name, value)
            if value is not None:
                _check_int(name, value, -1, MAX_INT)

    def _verify_token_sets(self) -> None:
        if self.logit_bias is not None:
            self.logit_bias = _check_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _check_ids(
                "allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS
            )
            if not self.allowed_token_ids:
                raise SamplingParamsError("allowed_token_ids", [], "None or at least one token id")
        if self.bad_words is not None:
            if isinstance(self.bad_words, str):
                raise SamplingParamsError("bad_words", self.bad_words, "a list of texts")
            self.bad_words = _check_strings("bad_words", self.bad_words, MAX_BAD_WORDS)

    def _normalize_greedy(self) -> None:
        if self.is_greedy:
            self.temperature = 0.0
            self.top_p = 1.0
            self.top_k = 0
            self.min_p = 0.0
        self.top_k = max(self.top_k, 0)


def make_plain(value: Any) -> Any:
    """The bool, int, float or str that a value of another type stands for; any other value as it is.

    Subclasses are taken for what they hold, whatever they make of it; a scalar of numpy, torch and the like
    says itself which it is.
    """
    if type(value) in _PLAIN:
        return value
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        value = value.item()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    return value


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise SamplingParamsError(name, value, f"an integer from {low} to {high}")


def _check_float(name: str, value: Any, low: float, high: float) -> float:
    """The value as a float, which an integer too large for one cannot become."""
    allowed = f"a number from {low:g} to {high:g}"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise SamplingParamsError(name, value, allowed)
    try:
        number = float(value)
    except OverflowError:
        raise SamplingParamsError(name, value, allowed) from None
    if not low <= number <= high:  # NaN is not, either
        raise SamplingParamsError(name, value, allowed)
    return number


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
        bad = next(one for one in ids if not _is_id(one))
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
    for key, value in bias.items():  # pyright: ignore[reportUnknownVariableType]
        key, value = make_plain(key), make_plain(value)
        try:
            token_id, number = int(key), float(value)  # pyright: ignore[reportUnknownArgumentType]
        except (TypeError, ValueError, OverflowError):
            raise SamplingParamsError("logit_bias", {key: value}, allowed) from None
        # OpenAI's JSON has string keys; of all else, int() must not have changed the value.
        is_id = isinstance(key, str) or (token_id == key and not isinstance(key, bool))
        if not is_id or not 0 <= token_id <= MAX_INT or not math.isfinite(number):
            raise SamplingParamsError("logit_bias", {key: value}, allowed)
        checked[token_id] = min(100.0, max(-100.0, number))
    return checked
