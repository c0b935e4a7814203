"""The one error tree. User errors are ValueErrors that name the field, the value and what is allowed.

Nothing here knows who raises what; an error that crosses a process travels as text and is raised again
on the other side as the class that fits there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NoReturn, cast

_MAX_SHOWN = 120  # characters of a value
_MAX_NAME = 80  # of a name that a caller has made up
_STATEMENTS = (  # how a text begins that says what is wrong
    *("Either ", "When ", "expected ", "its weights ", "no such ", "not ", "only "),
    *("the chat template failed", "the chat template says", "the packaged "),
)
_NOT_OF_WORDS = re.compile(r"[^a-z0-9]+")
_NEAR_WORD = 0.75  # 'reset' and 'rest' are 0.89, 'tool' and 'lora' 0.5
_MIN_BEGINNING = 3  # letters: 'mem' for 'memory'


class QuireError(Exception):
    """Base of every error that Quire raises on purpose."""


class InputError(QuireError, ValueError):
    """The user's `value` of `field` cannot be used; `allowed` completes "expected ..." (describe_allowed)."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field}={shorten(value)}: {describe_allowed(allowed)}")


class SamplingParamsError(InputError):
    """A SamplingParams field is out of range or of the wrong type."""


class PoolingParamsError(InputError):
    """A PoolingParams field is out of range, of the wrong type, or not what the model can do."""


class PromptError(InputError):
    """A prompt is empty, too long, or holds token ids outside the vocabulary."""


class ConfigError(InputError):
    """An engine argument is unknown, out of range, or does not fit the others."""


class ModelError(InputError):
    """A model folder or its weights cannot be used: missing, unsupported, truncated, wrong shapes."""


class FilesChangedError(ModelError):
    """A file is not as it was at the start of the engine, or of this process: a reader would not fit."""

    def __init__(self, field: str, value: object, change: str) -> None:
        super().__init__(field, value, change)
        Exception.__init__(self, f"{field}={shorten(value)}: {change}")


class EngineStartError(QuireError, RuntimeError):
    """The engine did not become ready; the text is the root cause."""


class CaptureError(QuireError, RuntimeError):
    """A CUDA graph could not be captured. What it leaves behind may fail later: another process goes on."""

    def __init__(self, cause: object) -> None:
        super().__init__(f"a CUDA graph could not be captured, enforce_eager=True runs without: {cause}")


class DaemonError(QuireError, RuntimeError):
    """A daemon is not there, is there already, or does not answer; the text names it."""


class UnknownDaemonError(DaemonError, InputError):
    """No daemon of the name that the user gave is running."""

    def __init__(self, name: str, hint: str) -> None:
        self.field, self.value, self.allowed = "name", name, "the name of a daemon that runs"
        Exception.__init__(self, f"no daemon named {name!r} is running{hint}")


class EngineDeadError(QuireError, RuntimeError):
    """The engine has ended and this request cannot be continued."""


class WrongEventLoopError(QuireError, RuntimeError):
    """An AsyncLLM was used outside the event loop that it was started in."""


class RequestFailedError(QuireError, RuntimeError):
    """The engine failed this one request; the text is the cause, `code` the name of its ErrorCode."""

    def __init__(self, text: str, code: str | None = None) -> None:
        self.code = code
        super().__init__(text)


class ProtocolError(QuireError):
    """A frame from another process does not decode or is out of place."""


# Start-up's user errors by class name: they are the same however often the start is tried.
USER_ERRORS: dict[str, type[InputError]] = {
    cls.__name__: cls for cls in (ModelError, ConfigError, FilesChangedError)
}

# Of refusals that no further start takes back; DaemonError: the engine will not have this client.
FINAL_KINDS = frozenset({*USER_ERRORS, "DaemonError"})


def raise_remote(kind: str, text: str) -> NoReturn:
    """Raise what another process reported: a user error of start-up as such, others as EngineStartError."""
    if kind == "DaemonError":
        raise DaemonError(text)
    cls = USER_ERRORS.get(kind)
    if cls is None:
        raise EngineStartError(text)
    error = cls.__new__(cls)
    Exception.__init__(error, text)  # the text is complete; field and value stayed on the other side
    raise error


def describe_refusal(field: str, value: object, allowed: str) -> str:
    """As InputError's text, for a field's name that a remote caller may have made up."""
    return f"{shorten_name(field)}={shorten(value)}: {describe_allowed(allowed)}"


def describe_allowed(allowed: str) -> str:
    """What follows the field and its value in every error: 'expected', then what is allowed and why.

    A text that begins as one of _STATEMENTS says what is wrong, and stays as it is.
    """
    return allowed if allowed.startswith(_STATEMENTS) else f"expected {allowed}"


def shorten_name(name: str) -> str:
    """A name on one line, cut."""
    start = name[: _MAX_NAME + 1]
    text = start if start.isprintable() else repr(start)[1:-1]
    return text if len(text) <= _MAX_NAME else f"{text[: _MAX_NAME - 3]}..."


def make_printable(text: str) -> str:
    """The text with ? for what could steer a terminal or break a line of a log."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)


def shorten(value: object) -> str:
    """`repr(value)`, cut to a length that fits one line; costs no more than that, whatever the value is."""
    text = ""
    for piece in _iterate_repr(value):
        text += piece
        if len(text) > _MAX_SHOWN:
            return f"{text[: _MAX_SHOWN - 3]}..."
    return text


def _iterate_repr(value: object) -> Iterator[str]:
    """`repr(value)` in pieces, of which few are needed: values of a request may be megabytes, or deep."""
    if isinstance(value, (str, bytes)):
        cut = value[: _MAX_SHOWN + 1]
        yield repr(cut) if len(cut) == len(value) else repr(cut)[:-1] + "..."
    elif type(value) is list:
        yield from _join("[", map(_iterate_repr, cast(list[object], value)), "]")
    elif type(value) is dict:
        entries = cast(dict[object, object], value).items()
        yield from _join("{", (chain(_iterate_repr(k), (": ",), _iterate_repr(v)) for k, v in entries), "}")
    else:
        try:
            yield repr(value)
        except (ValueError, RecursionError):  # an integer of more digits than Python converts to text
            yield f"<{type(value).__name__} too large to show>"


def _join(begin: str, items: Iterable[Iterable[str]], end: str) -> Iterator[str]:
    yield begin
    for number, pieces in enumerate(items):
        if number:
            yield ", "
        yield from pieces
    yield end


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """', did you mean X?' when `name` is a known name mistyped, shortened or split otherwise, else ''."""
    if len(name) > _MAX_SHOWN:  # which no known name is; comparing would take seconds
        return ""
    import difflib  # for who mistypes a name

    for close in difflib.get_close_matches(name, list(known), n=3, cutoff=0.6):
        if _means(name, close):
            return f", did you mean {close!r}?"
    return ""


def _means(name: str, known: str) -> bool:
    """Whether each word of `name` is one of `known`: '--ssl-keyfile' is spelled like '--api-key-file'."""
    words = _NOT_OF_WORDS.split(known.lower())
    words.append("".join(words))
    return all(
        any(_is_word(word, other) for other in words) for word in _NOT_OF_WORDS.split(name.lower()) if word
    )


def _is_word(word: str, other: str) -> bool:
    import difflib

    short, long = sorted((word, other), key=len)
    is_shortened = len(short) >= _MIN_BEGINNING and long.startswith(short)
    return is_shortened or difflib.SequenceMatcher(None, word, other).ratio() >= _NEAR_WORD


def describe_install(extra: str) -> str:
    """The command that adds an extra of pyproject.toml to the Python that runs this."""
    import shlex

    return f"{shlex.quote(sys.executable)} -m pip install 'quire[{extra}]'"
