"""GrammarCompiler: takes a grammar text to llguidance, with limits, before a request that has it may run.

The compiler here has a vocabulary of single bytes and the model's special tokens: what a grammar is, and
it costs to compile, depends on no others. What its first mask costs does: a process that can fork and has
a second to load the model's vocabulary checks it. llguidance is imported by the first grammar.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from ....ipc.errors import SamplingParamsError
from ....ipc.params.structured_outputs import (
    COMPILE_S,
    GRAMMAR_LIMITS,
    MAX_MASK_S,
    StructuredOutputsParams,
    make_timed_limits,
)
from ...text.tokenizer import Tokenizer
from ..grammars.grammar import make_output_grammar
from ..grammars.rules import OutputRules
from .grammar_cache import GrammarCache, make_key
from .grammar_text import GrammarText, make_grammar_text, wrap_schema
from .json_schema import check_valid
from .strict_schema import list_parts

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_logger = logging.getLogger(__name__)
_MAX_LEFT_OUT = 16  # schemas of tools that are left out of a request's grammar,
_MAX_LEFT_OUT_S = 1.0  # and the processor time after which no more are
MAX_COMPILE_S = 0.1  # of processor time; a worker compiles what passes once more, with all its rows waiting
_MAX_TRIES = 100  # schemas within a schema that are compiled to find which one is refused, and
_MAX_TRY_S = 0.02  # the longest that each may take
_MAX_MASKED = 2_000  # characters; the mask of a longer grammar may take seconds, which nothing here can end
_TOO_LATE = f"what has its first token found in {MAX_MASK_S * 1e3:.0f} ms of processor time"
_MAX_MESSAGE = 400  # characters of a compiler's message
_PANIC = "PanicException"  # of llguidance's Rust: no Exception, and not to be imported
# What llguidance says -> what is allowed, where its own words are for others.
_EXPLANATIONS = {
    "oneOf constraints are not supported": "oneOf of schemas of which only one can hold, as their types or a "
    "required property with a const in each say; anyOf takes others",
    "NoExtension": "what some output can satisfy",
}
_UNSATISFIABLE = "nsatisfiable"  # "Unsatisfiable schema: ... is unsatisfiable"
_LIMIT_WORDS = ("too big", "too large", "too complex", "too many", "limit", "fuel")


class GrammarCompiler:
    """Makes and checks the grammars of requests; what was taken once is not compiled again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._taken = GrammarCache()
        self._model_vocabulary: LLTokenizer | None = None

    def load_vocabulary(self) -> None:
        """Check first masks, too, from now on: loads the model's vocabulary, which takes a second for 150,000
        tokens. Only where no other thread holds what a forked process needs.
        """
        from llguidance import LLTokenizer

        if self._model_vocabulary is not None or self._tokenizer.eos_token_id is None:
            return
        text, size = self._tokenizer.backend.to_str(), self._tokenizer.vocab_size
        with contextlib.suppress(
            ValueError
        ):  # a worker, which cannot follow grammars with it either, says so
            self._model_vocabulary = LLTokenizer(text, n_vocab=size, eos_token=self._tokenizer.eos_token_id)

    def compile(
        self,
        params: StructuredOutputsParams | None,
        place: str | None = None,
        is_strict: bool = False,
        rules: OutputRules | None = None,
    ) -> str:
        """EngineCoreRequest.grammar; some milliseconds, and rarely more than MAX_COMPILE_S.

        `params`: what the answer looks like. `place`: the field that they were made of, for errors.
        is_strict: a JSON schema has to keep OpenAI's rules as well. rules: of the turn that the answer is
        part of. '' if neither says anything. Raises SamplingParamsError.
        """
        key = make_key(params, is_strict, rules)
        if (known := self._taken.find(key)) is not None:
            return known
        if params is not None and params.whitespace_pattern is not None:
            self._check_alone("structured_outputs.whitespace_pattern", params.whitespace_pattern)
        ends_at = time.thread_time() + _MAX_LEFT_OUT_S
        for _ in range(_MAX_LEFT_OUT):
            try:
                return self._make(key, params, place, is_strict, rules)
            except SamplingParamsError as error:
                if time.thread_time() > ends_at:
                    raise
                rules = _leave_schema_out(rules, error)
        return self._make(key, params, place, is_strict, rules)

    def _make(
        self,
        key: bytes,
        params: StructuredOutputsParams | None,
        place: str | None,
        is_strict: bool,
        rules: OutputRules | None,
    ) -> str:
        grammar = _make_grammar(params, place, is_strict, rules)
        if grammar is None:
            return ""
        self._verify(grammar)
        self._taken.keep(key, grammar.text)
        return grammar.text

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return _make_vocabulary(self._tokenizer)

    def _check_alone(self, place: str, regex: str) -> None:
        if (message := self._try(make_grammar_text(StructuredOutputsParams(regex=regex)).text)) is not None:
            raise SamplingParamsError(place, regex, _explain(message))

    def _verify(self, grammar: GrammarText) -> None:
        _ = self._vocabulary  # with llguidance's import, which is no grammar's work
        started = time.thread_time()
        message = self._try(grammar.text)
        took_s = time.thread_time() - started
        place, value = grammar.place, grammar.value
        if message is None and took_s > MAX_COMPILE_S:
            allowed = f"what compiles in {MAX_COMPILE_S:g} s (it took {took_s:.2f} s)"
            raise SamplingParamsError(place, value, allowed)
        if message is None and self._model_vocabulary is not None:
            message = _try_first_mask(self._model_vocabulary, grammar.text)
            if message == _TOO_LATE:
                raise SamplingParamsError(place, value, _TOO_LATE)
        if message is None:
            return
        if took_s < _MAX_TRY_S * len(grammar.schemas):
            place, value, message = self._find_culprit(grammar, message)
        raise SamplingParamsError(place, value, _explain(message))

    def _try(self, text: str) -> str | None:
        """What is wrong with a grammar, None if nothing is."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**GRAMMAR_LIMITS, verbose_errors=False)
        try:
            matcher = LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
            if not matcher.is_error() and not matcher.is_accepting() and len(text) <= _MAX_MASKED:
                matcher.compute_bitmask()
            return matcher.get_error() or None
        except BaseException as error:
            if type(error).__name__ != _PANIC:
                raise
            return f"llguidance fails: {error}"

    def _find_culprit(self, grammar: GrammarText, message: str) -> tuple[str, Any, str]:
        """Place and value of the schema at fault, and what is said of it alone; of the grammar if none is."""
        for place, schema in grammar.schemas.items():
            if (alone := self._try(wrap_schema(schema))) is not None:
                return *self._find_place(schema, place, alone), alone
        return grammar.place, grammar.value, message

    def _find_place(self, schema: dict[str, Any], place: str, message: str) -> tuple[str, Any]:
        """Place and value of the innermost schema of which alone the compiler says the same."""
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        num_left = _MAX_TRIES
        while True:
            for where, part in list_parts(schema):
                num_left -= 1
                if num_left < 0:
                    return place, schema
                if isinstance(part, dict) and _is_same(self._try(wrap_schema(shared | part)), message):
                    place, schema = f"{place}.{where}", part
                    break
            else:
                return place, schema


def _leave_schema_out(rules: OutputRules | None, error: SamplingParamsError) -> OutputRules:
    """The rules without the schema that is refused, if it is one, and of a tool that is not strict: arguments
    are then any JSON object. Else raises the error.
    """
    for number, tool in enumerate(rules.tools if rules is not None else ()):
        is_its = error.field == tool.place or error.field.startswith(f"{tool.place}.")
        if rules is not None and is_its and tool.parameters is not None and not tool.is_strict:
            check_valid(tool.place, tool.parameters)
            _logger.warning("a tool's schema is not followed: %.300r", str(error))
            tools = [*rules.tools]
            tools[number] = msgspec.structs.replace(tool, parameters=None)
            return msgspec.structs.replace(rules, tools=tuple(tools))
    raise error


def _make_grammar(
    params: StructuredOutputsParams | None, place: str | None, is_strict: bool, rules: OutputRules | None
) -> GrammarText | None:
    if rules is not None:
        return make_output_grammar(rules, params, place, is_strict)
    return None if params is None else make_grammar_text(params, place, is_strict)


def _is_same(part_message: str | None, message: str) -> bool:
    """Whether a schema is refused for what is said of its part alone."""
    if part_message is None:
        return False
    return part_message == message or (_UNSATISFIABLE in part_message and _UNSATISFIABLE in message)


def _explain(message: str) -> str:
    """What is allowed instead of a grammar that llguidance does not take, on one line."""
    text = " ".join(message.partition("<backtrace>")[0].split())
    text = text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."
    for sign, allowed in _EXPLANATIONS.items():
        if sign in text:
            return allowed
    if any(word in text for word in _LIMIT_WORDS):
        limits = ", ".join(f"{name}={value}" for name, value in GRAMMAR_LIMITS.items())
        return f"what stays within the limits ({limits}): {text}"
    return f"what can be compiled: {text}"


def _try_first_mask(vocabulary: LLTokenizer, text: str) -> str | None:
    """What is wrong with a grammar's first mask, None if nothing is, _TOO_LATE if a worker would refuse it.

    Nothing ends a native call but the end of its process, so it is made in another one.
    """
    answers, its_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(its_end, _compute_first_mask(vocabulary, text).encode())
        finally:
            os._exit(0)  # without a word after a panic, of which a worker tells
    os.close(its_end)
    with open(answers, "rb") as pipe:
        message = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return _TOO_LATE if os.waitstatus_to_exitcode(status) == -signal.SIGPROF else message or None


def _compute_first_mask(vocabulary: LLTokenizer, text: str) -> str:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**make_timed_limits(), verbose_errors=False)
    signal.setitimer(signal.ITIMER_PROF, COMPILE_S)
    matcher = LLMatcher(vocabulary, text, log_level=0, limits=limits)
    signal.setitimer(signal.ITIMER_PROF, MAX_MASK_S)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()


class _Vocabulary:
    """What llguidance asks of a tokenizer: every byte, and the special tokens at their ids."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.special_token_texts
        size = max(256 + len(special), tokenizer.vocab_size, max(special, default=0) + 1)
        self.eos_token_id = size if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self.special_token_ids = list(special)
        self.tokens = [b""] * (size + 1)
        free = (place for place in range(size) if place not in special)
        self._ids = [next(free) for _ in range(256)]  # of each byte
        for byte, place in enumerate(self._ids):
            self.tokens[place] = bytes([byte])
        for place, text in special.items():
            self.tokens[place] = text.encode()

    def __call__(self, text: bytes) -> list[int]:
        """Token ids of a text, which llguidance asks for where a grammar leaves no choice."""
        return [self._ids[byte] for byte in text]


def _make_vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    vocabulary = _Vocabulary(tokenizer)
    return LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), slices=[])
