"""Grammars: what a worker knows of grammars by llguidance, which is loaded with the first of them.

It turns texts into matchers and matchers into masks, and knows nothing of rows and logits. Nothing here
raises for what a grammar does: a matcher that can go no further says why.
A native call cannot be ended, so only what is small by `_SMALL` is followed in this process. All else has one
of its own (grammar_child.py), where time is what bounds it.
Legend: R matchers, V vocabulary, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...ipc.errors import FilesChangedError
from ...ipc.files.file_identity import check_tokenizer
from ...ipc.params.structured_outputs import GRAMMAR_LIMITS, GrammarLimits
from ...ipc.protocol.kept_grammars import KeptGrammars
from ...ipc.protocol.step import MIN_ROW_WORK_US
from ...ipc.spec.config import ModelConfig
from ..threads import count_cores
from .grammar_child import ChildError, ChildMatcher, GrammarProcess, GrammarTemplate

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Masks that take a core longer are shared between threads. One of a JSON schema takes 4 us at V=2,048 and 10
# at V=151,936, one of `[a-z ]{1,300}` 2,000; on busy cores threads come 5 ms late (2-core Xeon, load 9).
_MIN_SHARED_S = 0.005
# Masks that take less are computed where they are needed: to hand them over and back takes some 20 us.
_MIN_SLOW_S = 50e-6
_MIN_NOTED_NS = MIN_ROW_WORK_US * 1000
_MAX_TEMPLATES = 16  # a process and some MB each
_MAX_LATE = 4  # rows of a text in a step
_MAX_REASON = 500  # characters
# (symbols, items of a step, items of a row) with which no mask takes more than some 12 ms, whatever the
# grammar and the vocabulary: an item costs as the square of the symbols, which are the alternatives that may
# be ambiguous (2.5 GHz Xeon, 40 families of ambiguous grammars). JSON schemas of 40 required or 30 optional
# properties are small.
_SMALL = ((32, 5_000, 100), (96, 1_500, 200), (256, 400, 250))
_SMALL_LEXER_FUEL = 200_000  # 10 ms
_MAX_SMALL_COMPILE_US = (
    10_000  # of processor time: a chain of 600 rules takes 5 s, and 1,500 a process's stack
)
# Going by an output again takes 2-3 us a token, and is left to a child when it takes more than:
_MAX_REPLAY_S, _MAX_REPLAY_TOKEN_S = 0.02, 2e-5
_REPLAYED_AT_ONCE = 256  # tokens
# What the library says of a limit, and its name.
_SAYINGS = {
    "too many expressions": "step_lexer_fuel",
    "too many states": "max_lexer_states",
    "too many items": "step_max_items",
    "current row has": "max_items_in_row",
    "initial lexer configuration": "initial_lexer_fuel",
    "lexer precomputation failed": "initial_lexer_fuel",
    "fuel exhausted": "initial_lexer_fuel",
    "grammar size": "max_grammar_size",
}


class Matcher:
    """Where one row is in its grammar. With a `failure`, which says why, it can go no further.

    Without a failure it has `inner`, in this process, or none, and then what follows it is `child`, which is
    made when the next mask is computed.
    """

    __slots__ = ("_can_end", "_token_ids", "_work_us", "child", "failure", "inner", "is_late", "text")

    def __init__(self, text: str, inner: LLMatcher | None, failure: str = "") -> None:
        self.inner = inner
        self.failure = failure
        self.child: ChildMatcher | None = None
        self.text = text
        self.is_late = False  # it failed for the time of a mask
        self._token_ids: list[int] = []  # consumed; with a child, those that it has not been told
        self._can_end = False  # as the child has said
        self._work_us = 0

    def consume_all(self, token_ids: list[int]) -> None:
        """The row's output goes on with these, or ends."""
        self._token_ids += token_ids
        try:
            if self.inner is not None and not self.inner.consume_tokens(token_ids):
                self._end(self.inner.get_error())
        except BaseException as error:
            self.fail(_describe_panic(error))

    def fill_mask(self, address: int, num_bytes: int, token_id: int | None = None) -> None:
        """Write there which tokens may come next, after `token_id` if it is one; nothing without `inner`."""
        # Run for each token, and both at once: after a step nothing of the matcher is left in the cache.
        inner = self.inner
        if token_id is not None:
            self._token_ids.append(token_id)
        if inner is None:
            return
        try:
            if token_id is not None and not inner.consume_token(token_id):
                self._end(inner.get_error())
                return
            inner.unsafe_compute_mask_ptr(address, num_bytes)
            if inner.is_error():
                self._end(inner.get_error())
        except BaseException as error:
            self.fail(_describe_panic(error))

    @property
    def needs_child(self) -> bool:
        """Whether it is followed in a process of its own."""
        return self.inner is None and not self.failure

    def ask(self, find_template: Callable[[str], GrammarTemplate]) -> None:
        """Have the child, which is there now, compute the mask."""
        try:
            if self.child is None:
                self.child = ChildMatcher(find_template(self.text))
            self.child.ask(self._token_ids)
            self._token_ids = []
        except ChildError as error:
            self._end_child(error)
        except OSError as error:
            self.fail(f"no process can be started for it: {error}")

    def receive(self, mask: NDArray[np.int32]) -> None:
        """Write the mask that was asked for."""
        if self.child is None:
            return
        try:
            self._can_end = self.child.receive(mask)
            self.note_work(self.child.work_us)
        except ChildError as error:
            self._end_child(error)

    @property
    def is_accepting(self) -> bool:
        """Whether the output may end here."""
        return self._can_end if self.inner is None else self.inner.is_accepting()

    def note_work(self, work_us: int) -> None:
        """Count processor time of this row's own work."""
        self._work_us += work_us

    def take_work_us(self) -> int:
        """Processor time since the last call."""
        work_us, self._work_us = self._work_us, 0
        return work_us

    def _end(self, error: str) -> None:
        """`inner` goes no further: by a limit, of which a child knows more, or by the row's token."""
        if _find_limit(error) is None:
            self.fail(error)
        else:
            self.inner = None

    def _end_child(self, error: ChildError) -> None:
        self.is_late = error.would_recur
        self.note_work(error.work_us)
        self.fail(str(error))

    def fail(self, error: str) -> None:
        """End the row with this reason."""
        self.failure = f"its grammar cannot be followed: {_format_error(error)}"
        self.inner = self.child = None


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
        self._limits: list[LLParserLimits] = []  # of `_SMALL`
        self._process: GrammarProcess | None = None  # for grammars that are not small
        self._apart_us = 0  # what templates have computed, and no matcher has noted
        self._templates: OrderedDict[str, GrammarTemplate] = OrderedDict()
        self._has_children = False  # among the last matchers
        self._num_threads = count_cores()
        self._threads: ThreadPoolExecutor | None = None
        self._unusable = ""  # why there can be no tokenizer
        # The matcher at its beginning, why a text does not compile, or that it is not small: nobody waits for
        # that twice.
        self._compiled: KeptGrammars[LLMatcher | str | _Large] = KeptGrammars()
        self._last_s = 0.0  # how long the last masks took, on one core
        self._masks: NDArray[np.int32] = np.empty((0, -(-self._vocab_size // 32)), dtype=np.int32)
        self._address = 0

    @property
    def is_slow(self) -> bool:
        """Whether the next masks may take so long that somebody else should compute them."""
        return self._tokenizer is None or self._has_children or self._last_s > _MIN_SLOW_S

    def make_matcher(self, grammar: str, output: list[int]) -> Matcher:
        """A matcher of a row's own, after `output`. The first call of a worker makes the tokenizer's trie."""
        began = time.thread_time()
        try:
            compiled = self._compile(grammar)
        except _UnusableError as error:
            matcher = Matcher(grammar, None, str(error)[:_MAX_REASON])
        else:
            # With a lexer of its own: what other rows cost is not counted here.
            matcher = Matcher(grammar, None if isinstance(compiled, _Large) else compiled.deep_copy())
            self._replay(matcher, output)
        matcher.note_work(int((time.thread_time() - began) * 1e6) + self._apart_us)
        self._apart_us = 0
        return matcher

    def _replay(self, matcher: Matcher, output: list[int]) -> None:
        """Have a new matcher go by the row's output; what takes long is left to a child."""
        began = time.thread_time()
        for place in range(0, len(output), _REPLAYED_AT_ONCE):
            matcher.consume_all(output[place : place + _REPLAYED_AT_ONCE])
            if time.thread_time() - began > _MAX_REPLAY_S + place * _MAX_REPLAY_TOKEN_S:
                matcher.inner = None

    def compute_masks(
        self, matchers: Sequence[Matcher], token_ids: Sequence[int | None]
    ) -> NDArray[np.int32]:
        """Tokens that may come next, int32 [R, W]; of a matcher with a failure anything.

        Each matcher consumes its one of `token_ids` first, if that is one. The end of sequence is among those
        of its mask where the output may end, and alone where it must. Masks are overwritten by the next call.
        """
        if len(self._masks) < len(matchers):
            self._masks = np.empty((len(matchers), self._masks.shape[1]), dtype=np.int32)
            self._address = self._masks.ctypes.data  # numpy takes 2 us to tell
        self._compute_here(matchers, token_ids)
        children = [place for place, matcher in enumerate(matchers) if matcher.needs_child]
        self._has_children = bool(children)
        if children:
            self._compute_in_children(matchers, children)
        return self._masks[: len(matchers)]

    def _compute_in_children(self, matchers: Sequence[Matcher], places: list[int]) -> None:
        """The masks of the matchers at `places`, of few at first and twice as many each time.

        Of a text for which several took too long in this step the others are not tried: 128 rows of one
        request would have all wait for 4 s.
        """
        num_late: Counter[str] = Counter()
        size = self._num_threads
        while places:
            wave, places = places[:size], places[size:]
            size *= 2
            for matcher in (matchers[place] for place in wave):
                if num_late[matcher.text] < _MAX_LATE:
                    matcher.ask(self._find_template)
                else:
                    matcher.fail(f"{_MAX_LATE} others with the same grammar took too long in this step")
            for place in wave:
                matchers[place].receive(self._masks[place])
                num_late[matchers[place].text] += matchers[place].is_late

    def _compute_here(self, matchers: Sequence[Matcher], token_ids: Sequence[int | None]) -> None:
        """Have all go on by their tokens, and compute the masks of those without a child."""
        place, size = self._address, self._masks.strides[0]
        places = range(place, place + size * len(matchers), size)
        rows = zip(matchers, places, token_ids, strict=True)
        if len(matchers) > 1 and self._last_s > _MIN_SHARED_S:
            started = time.perf_counter()
            self._share(functools.partial(_fill_masks, iter(list(rows)), size, True))
            self._last_s = (time.perf_counter() - started) * self._num_threads
        else:
            self._last_s = _fill_masks(rows, size, self._last_s > MIN_ROW_WORK_US * 1e-6)

    def _share(self, work: Callable[[], object]) -> None:
        """Have all threads do it at once; those that have not begun when this one is done come too late."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(max(1, self._num_threads - 1), "grammars")
        helpers = [self._threads.submit(work) for _ in range(self._num_threads - 1)]
        work()
        for helper in helpers:
            if not helper.cancel():
                helper.result()

    def _start_process(self) -> GrammarProcess:
        path = str(self._folder / "tokenizer.json")
        return GrammarProcess(path, self._vocab_size, self.eos_token_ids)

    def _find_template(self, text: str) -> GrammarTemplate:
        """What forks the processes of rows with this grammar. Raises ChildError, OSError."""
        template = self._templates.pop(text, None)
        if template is None or template.has_ended:
            if self._process is None or self._process.has_ended:
                self._process = self._start_process()
            template = GrammarTemplate(self._process, text)
        self._templates[text] = template  # the last to go
        if len(self._templates) > _MAX_TEMPLATES:
            self._templates.popitem(last=False)
        return template

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

    def _compile(self, grammar: str) -> LLMatcher | _Large:
        """The matcher at its beginning, which nobody may advance. Raises _UnusableError."""
        tokenizer = self._load_tokenizer()
        compiled = self._compiled.use(grammar)
        if compiled is None:
            compiled = self._compile_apart_first(tokenizer, grammar)
            self._compiled.keep(grammar, compiled)
        if isinstance(compiled, str):
            raise _UnusableError(compiled)
        return compiled

    def _compile_apart_first(self, tokenizer: LLTokenizer, grammar: str) -> LLMatcher | str | _Large:
        """A new matcher, what is wrong with the text, or that it is not small. Raises _UnusableError.

        What nobody has compiled may take for ever, or the process with it.
        """
        try:
            self._apart_us = self._find_template(grammar).wait()
        except ChildError as error:
            self._apart_us, reason = error.work_us, f"its grammar cannot be followed: {error}"
            if error.would_recur:
                return reason
            raise _UnusableError(reason) from None
        except OSError as error:
            raise _UnusableError(f"no process can be started for its grammar: {error}") from None
        if self._apart_us > _MAX_SMALL_COMPILE_US:
            return _Large()
        compiled = self._try_to_compile(tokenizer, grammar)
        if not isinstance(compiled, _Large):
            del self._templates[grammar]
        return compiled

    def _try_to_compile(self, tokenizer: LLTokenizer, grammar: str) -> LLMatcher | str | _Large:
        from llguidance import LLMatcher

        for limits in self._limits:
            try:
                matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
            except BaseException as error:
                return f"its grammar does not compile: {_describe_panic(error)}"
            if not matcher.is_error():
                return matcher
            if _find_limit(matcher.get_error()) is None:
                return f"its grammar does not compile: {_format_error(matcher.get_error())}"
        return _Large()

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
            # It loads the trie, too, meanwhile: nobody waits for it when a grammar turns out not to be small.
            with contextlib.suppress(OSError):
                self._process = self._start_process()
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self.eos_token_ids)
        except FilesChangedError as error:
            return f"no grammar can be followed: {error}"
        except (OSError, ValueError) as error:
            return f"no grammar can be followed with this model's tokenizer: {error}"
        except BaseException as error:
            return f"no grammar can be followed with this model's tokenizer: {_describe_panic(error)}"
        self._limits = [LLParserLimits(**limits, verbose_errors=False) for limits in _make_small_limits()]
        return ""


def _fill_masks(rows: Iterator[tuple[Matcher, int, int | None]], size: int, were_long: bool) -> float:
    """Fill the mask of each matcher at its address, and note what took long. Returns seconds.

    Many masks take 4 us, a look at the thread's own time 0.7 and at the clock 0.2: so each is timed by the
    clock, and where the last ones `were_long` what the thread did not compute of it is left out.
    """
    long: list[tuple[Matcher, int]] = []
    thread_began = time.thread_time_ns() if were_long else 0
    began = last = time.perf_counter_ns()
    for matcher, place, token_id in rows:
        matcher.fill_mask(place, size, token_id)
        now = time.perf_counter_ns()
        if now - last > _MIN_NOTED_NS:
            long.append((matcher, now - last))
        last = now
    if long:
        share = min(1.0, (time.thread_time_ns() - thread_began) / (last - began)) if were_long else 1.0
        for matcher, took_ns in long:
            matcher.note_work(int(took_ns * share) // 1000)
    return (last - began) * 1e-9


class _UnusableError(Exception):
    """There is no matcher for a grammar; the text says why."""


class _Large:
    """What a text is compiled to that is not small."""


def _make_small_limits() -> Iterator[GrammarLimits]:
    for num_symbols, num_items, num_in_row in _SMALL:
        limits: GrammarLimits = {
            "max_grammar_size": num_symbols,
            "step_max_items": num_items,
            "max_items_in_row": num_in_row,
            "initial_lexer_fuel": _SMALL_LEXER_FUEL,
            "step_lexer_fuel": _SMALL_LEXER_FUEL,
            "max_lexer_states": GRAMMAR_LIMITS["max_lexer_states"],
        }
        yield limits


def _find_limit(error: str) -> str | None:
    """The name of the limit that the library speaks of."""
    text = error.lower()
    return next((name for words, name in _SAYINGS.items() if words in text), None)


def _format_error(error: str) -> str:
    """The library's text on one line, with the limit that it speaks of."""
    text = " ".join(error.removesuffix("<non-verbose/>").split())
    name = _find_limit(text)
    if name is not None:
        text = f"{name}={GRAMMAR_LIMITS[name]} is not enough: {text}"
    return text[:_MAX_REASON]


def _describe_panic(error: BaseException) -> str:
    """What the library has raised. A panic comes as a BaseException; those who end a process are not its."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    if type(error).__name__ == "PanicException":
        return f"llguidance panicked: {error}"[:_MAX_REASON]
    return f"{type(error).__name__}: {error}"[:_MAX_REASON]
