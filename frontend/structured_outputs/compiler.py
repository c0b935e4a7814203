"""GrammarCompiler: takes a grammar text to llguidance, with limits, before a request that has it may run.

The compiler here has a vocabulary of single bytes and the model's special tokens: what a grammar is, and
what it costs to compile, depends on no others. llguidance is imported by the first grammar.
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...ipc.errors import SamplingParamsError
from ...ipc.structured_outputs import GRAMMAR_LIMITS, StructuredOutputsParams
from ..output_formats.grammars.grammar import make_output_grammar
from ..output_formats.grammars.rules import OutputRules
from ..text.tokenizer import Tokenizer
from .grammar_cache import GrammarCache, make_key
from .grammar_text import GrammarText, make_grammar_text, wrap_schema
from .strict_schema import list_parts

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_COMPILE_S = 0.1  # of processor time; a worker compiles what passes once more, with all its rows waiting
_MAX_TRIES = 100  # schemas within a schema that are compiled to find which one is refused, and
_MAX_TRY_S = 0.02  # the longest that each may take
_MAX_SAID = 400  # characters of a compiler's message
_PANIC = "PanicException"  # of llguidance's Rust: no Exception, and not to be imported
# What llguidance says -> what is allowed, where its own words are for others.
_SAYINGS = {
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
        grammar = _make_grammar(params, place, is_strict, rules)
        if grammar is None:
            return ""
        self._check(grammar)
        self._taken.keep(key, grammar.text)
        return grammar.text

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return _make_vocabulary(self._tokenizer)

    def _check_alone(self, place: str, regex: str) -> None:
        if (said := self._try(make_grammar_text(StructuredOutputsParams(regex=regex)).text)) is not None:
            raise SamplingParamsError(place, regex, _explain(said))

    def _check(self, grammar: GrammarText) -> None:
        _ = self._vocabulary  # with llguidance's import, which is no grammar's work
        started = time.thread_time()
        said = self._try(grammar.text)
        took_s = time.thread_time() - started
        place, value = grammar.place, grammar.value
        if said is None and took_s > MAX_COMPILE_S:
            allowed = f"what compiles in {MAX_COMPILE_S:g} s (it took {took_s:.2f} s)"
            raise SamplingParamsError(place, value, allowed)
        if said is None:
            return
        if took_s < _MAX_TRY_S * len(grammar.schemas):
            place, value, said = self._find_culprit(grammar, said)
        raise SamplingParamsError(place, value, _explain(said))

    def _try(self, text: str) -> str | None:
        """What is wrong with a grammar, None if nothing is."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**GRAMMAR_LIMITS, verbose_errors=False)
        try:
            matcher = LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
            if not matcher.is_error() and not matcher.is_accepting():
                matcher.compute_bitmask()
            return matcher.get_error() or None
        except BaseException as error:
            if type(error).__name__ != _PANIC:
                raise
            return f"llguidance fails: {error}"

    def _find_culprit(self, grammar: GrammarText, said: str) -> tuple[str, Any, str]:
        """Place and value of the schema at fault, and what is said of it alone; of the grammar if none is."""
        for place, schema in grammar.schemas.items():
            if (alone := self._try(wrap_schema(schema))) is not None:
                return *self._find_place(schema, place, alone), alone
        return grammar.place, grammar.value, said

    def _find_place(self, schema: dict[str, Any], place: str, said: str) -> tuple[str, Any]:
        """Place and value of the innermost schema of which alone the compiler says the same."""
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        num_left = _MAX_TRIES
        while True:
            for where, part in list_parts(schema):
                num_left -= 1
                if num_left < 0:
                    return place, schema
                if isinstance(part, dict) and _is_same(self._try(wrap_schema(shared | part)), said):
                    place, schema = f"{place}.{where}", part
                    break
            else:
                return place, schema


def _make_grammar(
    params: StructuredOutputsParams | None, place: str | None, is_strict: bool, rules: OutputRules | None
) -> GrammarText | None:
    if rules is not None:
        return make_output_grammar(rules, params, place, is_strict)
    return None if params is None else make_grammar_text(params, place, is_strict)


def _is_same(said_of_part: str | None, said: str) -> bool:
    """Whether a schema is refused for what is said of its part alone."""
    if said_of_part is None:
        return False
    return said_of_part == said or (_UNSATISFIABLE in said_of_part and _UNSATISFIABLE in said)


def _explain(said: str) -> str:
    """What is allowed instead of a grammar that llguidance does not take, on one line."""
    text = " ".join(said.partition("<backtrace>")[0].split())
    text = text if len(text) <= _MAX_SAID else f"{text[:_MAX_SAID]}..."
    for sign, allowed in _SAYINGS.items():
        if sign in text:
            return allowed
    if any(word in text for word in _LIMIT_WORDS):
        limits = ", ".join(f"{name}={value}" for name, value in GRAMMAR_LIMITS.items())
        return f"what stays within the limits ({limits}): {text}"
    return f"what can be compiled: {text}"


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
