"""Grammars: what a worker knows of grammars by llguidance, which is loaded with the first of them.

It turns texts into matchers and matchers into masks, and knows nothing of rows and logits. Nothing here
raises for what a grammar does: a matcher that can go no further says why.
Legend: R matchers, V vocabulary, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...ipc.config import ModelConfig
from ...ipc.errors import FilesChangedError
from ...ipc.file_identity import check_tokenizer
from ...ipc.kept_grammars import KeptGrammars
from ...ipc.structured_outputs import GRAMMAR_LIMITS, make_limits
from ..threads import count_cores

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

# Masks that take a core longer are shared between threads. One of a JSON schema takes 4 us at V=2,048 and 10
# at V=151,936, one of `[a-z ]{1,300}` 2,000; on busy cores threads come 5 ms late (2-core Xeon, load 9).
_MIN_SHARED_S = 0.005
# Masks that take less are computed where they are needed: to hand them over and back takes some 20 us.
_MIN_SLOW_S = 50e-6
_MAX_REASON = 500  # characters
# What the library says of a limit, and its name.
_SAYINGS = {
    "too many expressions": "step_lexer_fuel",
    "too many states": "max_lexer_states",
    "too many items": "step_max_items",
    "current row has": "max_items_in_row",
    "initial lexer configuration": "initial_lexer_fuel",
    "grammar size": "max_grammar_size",
}


class Matcher:
    """Where one row is in its grammar. With a `failure`, which says why, it can go no further."""

    __slots__ = ("failure", "inner")

    def __init__(self, inner: LLMatcher | None, failure: str = "") -> None:
        self.inner = inner  # None with a failure
        self.failure = failure

    def consume_all(self, token_ids: list[int]) -> None:
        """The row's output goes on with these, or ends."""
        try:
            if self.inner is not None and not self.inner.consume_tokens(token_ids):
                self._fail(self.inner.get_error())
        except BaseException as error:
            self._fail(_describe_panic(error))

    def fill_mask(self, address: int, num_bytes: int, token_id: int | None = None) -> None:
        """Write there which tokens may come next, after `token_id` if it is one; with a failure nothing."""
        # Run for each token, and both at once: after a step nothing of the matcher is left in the cache.
        inner = self.inner
        if inner is None:
            return
        try:
            if token_id is not None and not inner.consume_token(token_id):
                self._fail(inner.get_error())
                return
            inner.unsafe_compute_mask_ptr(address, num_bytes)
            if inner.is_error():
                self._fail(inner.get_error())
        except BaseException as error:
            self._fail(_describe_panic(error))

    def check(self) -> None:
        """Take note of what has gone wrong with the inner matcher."""
        if self.inner is not None and self.inner.is_error():
            self._fail(self.inner.get_error())

    @property
    def is_accepting(self) -> bool:
        """Whether the output may end here."""
        return self.inner is not None and self.inner.is_accepting()

    def _fail(self, error: str) -> None:
        self.failure = f"its grammar cannot be followed: {_describe(error)}"
        self.inner = None


class Grammars:
    """The compiled grammars of a worker, and the tokenizer that they are made for."""

    def __init__(self, model: ModelConfig) -> None:
        self._folder, self._noted = Path(model.tokenizer), model.noted
        self._vocab_size = model.spec.vocab_size
        self.eos_token_ids = list(model.eos_token_ids)
        eos = np.array(self.eos_token_ids, dtype=np.int64)
        self._eos_words = eos // 32
        self._eos_bits = np.left_shift(1, eos % 32).astype(np.uint32).view(np.int32)
        self._tokenizer: LLTokenizer | None = None
        self._limits: LLParserLimits | None = None
        self._executor: LLExecutor | None = None
        self._num_threads = count_cores()
        self._unusable = ""  # why there can be no tokenizer
        # The matcher at its beginning, or why a text does not compile: nobody waits for that twice.
        self._compiled: KeptGrammars[LLMatcher | str] = KeptGrammars()
        self._last_s = 0.0  # how long the last masks took, on one core
        self._masks: NDArray[np.int32] = np.empty((0, -(-self._vocab_size // 32)), dtype=np.int32)

    @property
    def is_slow(self) -> bool:
        """Whether the next masks may take so long that somebody else should compute them."""
        return self._tokenizer is None or self._last_s > _MIN_SLOW_S

    def make_matcher(self, grammar: str, output: list[int]) -> Matcher:
        """A matcher of a row's own, after `output`. The first call of a worker makes the tokenizer's trie."""
        try:
            compiled = self._compile(grammar)
        except _UnusableError as error:
            return Matcher(None, str(error)[:_MAX_REASON])
        matcher = Matcher(compiled.deep_copy())  # its lexer, too: what other rows cost is not counted here
        if output:
            matcher.consume_all(output)
        return matcher

    def compute_masks(
        self, matchers: Sequence[Matcher], token_ids: Sequence[int | None]
    ) -> NDArray[np.int32]:
        """Tokens that may come next, int32 [R, W]; of a matcher with a failure anything.

        Each matcher consumes its one of `token_ids` first, if that is one. The end of sequence is among those
        of its mask where the output may end, and alone where it must. Masks are overwritten by the next call.
        """
        if len(self._masks) < len(matchers):
            self._masks = np.empty((len(matchers), self._masks.shape[1]), dtype=np.int32)
        started = time.perf_counter()
        is_shared = len(matchers) > 1 and self._last_s > _MIN_SHARED_S
        if is_shared:
            for matcher, token_id in zip(matchers, token_ids, strict=True):
                if token_id is not None:
                    matcher.consume_all([token_id])
            token_ids = [None] * len(matchers)
        if not (is_shared and self._compute_together(matchers)):
            self._compute_in_turn(matchers, token_ids)
        self._last_s = (time.perf_counter() - started) * (self._num_threads if is_shared else 1)
        return self._masks[: len(matchers)]

    def find_ends(self, masks: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[R]: whether a mask has an end of sequence."""
        return np.asarray((masks[:, self._eos_words] & self._eos_bits).any(axis=1))

    def must_end(self, mask: NDArray[np.int32], is_early: bool) -> bool:
        """Whether `mask` [W] has nothing but ends of sequence. If not, they are taken out if it `is_early`.

        Early is also where the matcher does not accept: what ends a sequence may have a text, which the
        grammar allows as such.
        """
        ends = mask[self._eos_words] & self._eos_bits
        np.bitwise_and.at(mask, self._eos_words, ~self._eos_bits)
        if not mask.any():
            return True
        if not is_early:
            np.bitwise_or.at(mask, self._eos_words, ends)
        return False

    def _compute_in_turn(self, matchers: Sequence[Matcher], token_ids: Sequence[int | None]) -> None:
        place, size = self._masks.ctypes.data, self._masks.strides[0]
        for matcher, token_id in zip(matchers, token_ids, strict=True):
            matcher.fill_mask(place, size, token_id)
            place += size

    def _compute_together(self, matchers: Sequence[Matcher]) -> bool:
        """The same with threads. False if one has panicked, and nobody knows which."""
        from llguidance import LLExecutor

        if self._executor is None:
            self._executor = LLExecutor(num_threads=self._num_threads)
        inner = [
            (matcher.inner, place) for place, matcher in enumerate(matchers) if matcher.inner is not None
        ]
        masks = self._masks
        try:
            self._executor.unsafe_compute_mask_ptr(inner, masks.ctypes.data, masks.strides[0], len(masks))
        except BaseException as error:
            _describe_panic(error)
            return False
        for matcher in matchers:
            matcher.check()
        return True

    def _compile(self, grammar: str) -> LLMatcher:
        """The matcher at its beginning, which nobody may advance."""
        tokenizer = self._load_tokenizer()
        compiled = self._compiled.use(grammar)
        if compiled is None:
            compiled = self._try_to_compile(tokenizer, grammar)
            self._compiled.keep(grammar, compiled)
        if isinstance(compiled, str):
            raise _UnusableError(f"its grammar does not compile: {compiled}")
        return compiled

    def _try_to_compile(self, tokenizer: LLTokenizer, grammar: str) -> LLMatcher | str:
        """A new matcher, or what is wrong with the text."""
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)
        except BaseException as error:
            return _describe_panic(error)
        return _describe(matcher.get_error()) if matcher.is_error() else matcher

    def _load_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None and not self._unusable:
            self._unusable = self._try_to_load()
        if self._tokenizer is None:
            raise _UnusableError(self._unusable)
        return self._tokenizer

    def _try_to_load(self) -> str:
        """Make the trie, which takes a second for 150,000 tokens; why it cannot be made."""
        from llguidance import LLParserLimits, LLTokenizer

        if not self.eos_token_ids:
            return (
                "a grammar needs a model with an eos_token_id: nothing else says that the output is complete"
            )
        try:
            # The library takes a text that does not begin so for a name to be downloaded.
            text = (self._folder / "tokenizer.json").read_text(encoding="utf-8").lstrip()
            check_tokenizer(self._noted, str(self._folder))
            if not text.startswith("{"):
                return f"no grammar can be followed: {self._folder / 'tokenizer.json'} is not a JSON object"
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self.eos_token_ids)
        except FilesChangedError as error:
            return f"no grammar can be followed: {error}"
        except (OSError, ValueError) as error:
            return f"no grammar can be followed with this model's tokenizer: {error}"
        except BaseException as error:
            return f"no grammar can be followed with this model's tokenizer: {_describe_panic(error)}"
        self._limits = LLParserLimits(**make_limits(self._vocab_size), verbose_errors=False)
        return ""


class _UnusableError(Exception):
    """There is no matcher for a grammar; the text says why."""


def _describe(error: str) -> str:
    """The library's text on one line, with the limit that it speaks of."""
    text = " ".join(error.removesuffix("<non-verbose/>").split())
    name = next((name for words, name in _SAYINGS.items() if words in text.lower()), None)
    if name is not None:
        text = f"{name}={GRAMMAR_LIMITS[name]} is not enough: {text}"
    return text[:_MAX_REASON]


def _describe_panic(error: BaseException) -> str:
    """What a panic of the library says. It comes as a BaseException; all others are raised again."""
    if type(error).__name__ != "PanicException":
        raise error
    return f"llguidance panicked: {error}"[:_MAX_REASON]
