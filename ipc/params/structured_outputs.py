"""StructuredOutputsParams: what the output of a request has to look like. Names and checks are vLLM's.

It stays in the frontend, which makes one grammar text of it (`EngineCoreRequest.grammar`). What takes
reading a schema or a grammar is checked there; here is what can be seen at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, cast, get_args

import msgspec
from msgspec import Meta

from ..errors import SamplingParamsError

MAX_CHOICES = 10_000


class GrammarLimits(TypedDict):
    """Arguments of llguidance's LLParserLimits."""

    max_items_in_row: int
    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_lexer_states: int
    max_grammar_size: int


# For the frontend that checks a grammar, and for the process that follows it where that may take long: fuel
# of making the lexer and of a step (1 M is some 50 ms), what a step may parse, and sizes. They bound memory;
# what bounds time is below. 250 properties that may be missing are a row of 1,000.
GRAMMAR_LIMITS: GrammarLimits = {
    "max_items_in_row": 1_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 3_000,
    "max_lexer_states": 25_000,  # up to 2 kB each
    "max_grammar_size": 500_000,
}


_NO_LIMIT = 1 << 30
# A grammar is bounded in processor time: a mask may take MASK_S on average and MAX_MASK_S once.
MASK_S = 0.01
MAX_MASK_S = 0.03
COMPILE_S = 0.2  # twice what a frontend allows: its processor may be a faster one
# For a row to go by its output, a time and more for each token. The same rule holds while the output is made,
# so a row that comes back is not refused what it had.
REPLAY_S, REPLAY_TOKEN_S = 0.1, 1e-3


def find_replay_limit_s(num_tokens: int) -> float:
    """The processor time in which a grammar must follow `num_tokens` tokens."""
    return REPLAY_S + REPLAY_TOKEN_S * num_tokens


def make_timed_limits() -> GrammarLimits:
    """The limits in a process that is ended by time: a step's items and fuel are not bounded."""
    return {**GRAMMAR_LIMITS, "step_max_items": _NO_LIMIT, "step_lexer_fuel": _NO_LIMIT}


class GrammarTime:
    """The processor time that a row's grammar has taken to follow its tokens."""

    def __init__(self) -> None:
        self._taken_s, self._num_tokens = 0.0, 0

    def note(self, taken_s: float, num_tokens: int) -> str:
        """`num_tokens` more tokens took `taken_s`. Returns why that is too slow, '' if it is not."""
        self._taken_s += taken_s
        self._num_tokens += num_tokens
        allowed_s = find_replay_limit_s(self._num_tokens)
        if self._taken_s <= allowed_s:
            return ""
        return (
            f"{self._num_tokens} tokens took {self._taken_s:.2f} s of processor time to follow, "
            f"and {allowed_s:.2f} s are allowed"
        )


# Names that are none, but that of a field of `structured_outputs`: those of older vLLM, and the fields alone.
RENAMED_FIELDS = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json_object": "structured_outputs.json_object",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
    "guided_decoding": "structured_outputs",
    "guided_decoding_backend": "structured_outputs, without a backend",
    "structural_tag": "structured_outputs.structural_tag",
    "regex": "structured_outputs.regex",
    "choice": "structured_outputs.choice",
    "grammar": "structured_outputs.grammar",
}

GrammarKind = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)
_WITH_JSON = ("json", "json_object", "structural_tag")


class StructuredOutputsFields(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The fields alone, as a request over HTTP has them; StructuredOutputsParams are checked."""

    json: Annotated[str | dict[str, Any], Meta(description="a JSON schema")] | None = None
    regex: Annotated[str, Meta(description="a regular expression of all of the output")] | None = None
    choice: Annotated[list[str], Meta(description="texts, of which the output is one")] | None = None
    grammar: Annotated[str, Meta(description="a grammar: Lark, or EBNF as GBNF has it")] | None = None
    json_object: Annotated[bool, Meta(description="true: any JSON object")] | None = None
    structural_tag: (
        Annotated[
            str | dict[str, Any],
            Meta(description="JSON: structures (begin, schema, end) that follow triggers in free text"),
        ]
        | None
    ) = None
    disable_any_whitespace: Annotated[bool, Meta(description="JSON without any whitespace")] = False
    disable_additional_properties: Annotated[
        bool, Meta(description="no properties but those that a schema names, where it does not say")
    ] = False
    whitespace_pattern: (
        Annotated[str, Meta(description="a regular expression of whitespace within JSON")] | None
    ) = None


class StructuredOutputsParams(StructuredOutputsFields, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What the output of a request follows: exactly one of json, regex, choice, grammar, json_object and
    structural_tag is given.

    Where JSON is asked for, whitespace between its tokens is a space, or a new line with an indentation,
    unless disable_any_whitespace or whitespace_pattern say otherwise. Raises SamplingParamsError on
    construction.
    """

    def __post_init__(self) -> None:
        self.verify()

    @property
    def kind(self) -> GrammarKind:
        """The one of the six that is set."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    def verify(self) -> None:
        """Check every field that can be checked without reading a schema or a grammar."""
        kinds: list[GrammarKind] = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            what = ", ".join(kinds) or "none of them"
            raise SamplingParamsError("structured_outputs", what, f"exactly one of {', '.join(KINDS)}")
        kind = kinds[0]
        value = getattr(self, kind)
        rule = _RULES[kind]
        if not isinstance(value, rule.types) or not value:
            raise SamplingParamsError(f"structured_outputs.{kind}", value, rule.allowed)
        if kind == "choice":
            _check_choices(value)
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_no_nul(name, getattr(self, name))
        self._check_options(kind)

    def _check_options(self, kind: str) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise SamplingParamsError(f"structured_outputs.{name}", getattr(self, name), "True or False")
            if getattr(self, name) and kind not in _WITH_JSON:
                raise SamplingParamsError(f"structured_outputs.{name}", True, _only_with_json())
        pattern = self.whitespace_pattern
        if pattern is None:
            return
        name = "structured_outputs.whitespace_pattern"
        if not isinstance(pattern, str) or not pattern:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SamplingParamsError(name, pattern, "a regular expression")
        if kind not in _WITH_JSON:
            raise SamplingParamsError(name, pattern, _only_with_json())
        if self.disable_any_whitespace:
            raise SamplingParamsError(name, pattern, "None with disable_any_whitespace")


def check_renamed(fields: Iterable[str]) -> None:
    """Raise SamplingParamsError for a field that is another's part, as some were not in older vLLM."""
    for name in fields:
        if name in RENAMED_FIELDS:
            raise SamplingParamsError(name, "given", f"no such field: it is {RENAMED_FIELDS[name]}")


class _Rule(NamedTuple):
    types: tuple[type, ...]
    allowed: str


_RULES: dict[GrammarKind, _Rule] = {
    "json": _Rule((str, dict), "a JSON schema that is not empty, as a text or a dict"),
    "regex": _Rule((str,), "a regular expression that is not empty"),
    "choice": _Rule((list, tuple), f"a list of 1 to {MAX_CHOICES} texts"),
    "grammar": _Rule((str,), "a grammar that is not empty"),
    "json_object": _Rule((bool,), "True"),
    "structural_tag": _Rule((str, dict), "a structural tag that is not empty, as JSON text or a dict"),
}


def _only_with_json() -> str:
    return f"only with {', '.join(_WITH_JSON)}"


def _check_choices(choices: Any) -> None:
    choices = cast(list[Any], choices)
    if len(choices) > MAX_CHOICES:
        raise SamplingParamsError(
            "structured_outputs.choice", f"{len(choices)} texts", f"at most {MAX_CHOICES}"
        )
    for place, text in enumerate(choices):
        if not isinstance(text, str) or not text:
            raise SamplingParamsError(f"structured_outputs.choice[{place}]", text, "a text that is not empty")


def _check_no_nul(name: str, text: object) -> None:
    if isinstance(text, str) and "\0" in text:
        raise SamplingParamsError(f"structured_outputs.{name}", text, "a text without NUL characters")
