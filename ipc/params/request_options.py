"""RequestOptions: when a request runs and whose it is, carried whole from a body or a call to the core.

An option is a field here: its type, range, default and words, of which checks, HTTP's bodies and their schema
are made; a list, or a text that people are shown, has its check in `_CHECKS`. Its row in
`ipc/protocol/rights.py` says who may say it, and RequestKeywords types it for calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from ..errors import InputError, PromptError
from .absent_arguments import drop_absent
from .param_fields import make_plain, read_fields

MAX_CACHE_SALT_LENGTH = 128
MAX_TENANT_LENGTH = 128
MAX_REQUEST_ID_LENGTH = 256
MAX_NAMES = 3  # two of an HTTP request, and that of a beam search
MAX_TIMEOUT_S = 86400.0 * 7

RequestName = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_LENGTH)]
Tenant = Annotated[str, Meta(max_length=MAX_TENANT_LENGTH, description="whose it is under the fair policy")]
Priority = Annotated[
    int,
    Meta(
        ge=-(2**31),
        le=2**31 - 1,
        description="lower goes first, under the policy `priority`",
        extra={"allowed": "an integer; lower runs first"},
    ),
]


def _seconds(text: str) -> Meta:
    allowed = f"seconds above 0 and up to {MAX_TIMEOUT_S:g}, or None"
    return Meta(gt=0.0, le=MAX_TIMEOUT_S, description=text, extra={"allowed": allowed})


class RequestOptions(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a request says about when it runs and whose it is; what a field means is its description.

    Made by `read_options`, which checks; a new field comes last. tenant: '' is the client's own. names: what
    aborts may call it.
    """

    priority: Priority = 0
    cache_salt: Annotated[
        str,
        Meta(
            max_length=MAX_CACHE_SALT_LENGTH,
            description="a prefix is shared only with requests of the same salt",
        ),
    ] = ""
    tenant: Tenant = ""
    timeout_s: Annotated[float, _seconds("aborted if it has not ended by then")] | None = None
    queue_timeout_s: Annotated[float, _seconds("refused if it has not begun by then")] | None = None
    names: Annotated[list[RequestName], Meta(max_length=MAX_NAMES)] = []


class RequestKeywords(TypedDict, total=False):
    """RequestOptions as keywords of a call."""

    priority: int
    cache_salt: str
    tenant: str
    timeout_s: float | None
    queue_timeout_s: float | None
    names: Sequence[str]


OPTION_FIELDS = read_fields(RequestOptions, InputError)
NO_OPTIONS = RequestOptions()


def read_options(options: RequestOptions = NO_OPTIONS, **keywords: Any) -> RequestOptions:
    """The options with those that a call names replaced. Raises InputError; TypeError for no field's name.

    vLLM's arguments of calls for what Quire does not have are left out where they ask for nothing.
    """
    if not keywords:
        return options
    keywords = drop_absent(keywords)
    for name in keywords.keys() & _CHECKS:
        keywords[name] = _CHECKS[name](make_plain(keywords[name]))
    return msgspec.structs.replace(options, **keywords)


def read_priorities(priority: Sequence[int] | None, num_prompts: int) -> list[RequestOptions]:
    """The options of each prompt of a call that says one priority a prompt, or none. Raises InputError."""
    if priority is None:
        return [NO_OPTIONS] * num_prompts
    if len(priority) != num_prompts:
        raise InputError("priority", f"{len(priority)} entries", f"one for each of {num_prompts} prompts")
    return [read_options(priority=each) for each in priority]


def check_salt(name: str, salt: Any) -> str:
    """The checked cache_salt, which is called `name`; '' for None. Raises PromptError."""
    salt = make_plain(salt)
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_CACHE_SALT_LENGTH):
        raise PromptError(name, salt, f"a text of 1 to {MAX_CACHE_SALT_LENGTH} characters, or None")
    check_encodable(name, salt or "")
    return salt or ""


def check_encodable(name: str, text: str) -> None:
    """Raises PromptError for half a surrogate pair, which UTF-8 cannot hold and no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            name,
            text[error.start : error.start + 1],
            f"text that UTF-8 can hold (lone surrogate at character {error.start})",
        ) from None


def check_name(field: str, name: Any, min_length: int, max_length: int) -> str:
    """A text that people are shown. Raises InputError."""
    name = make_plain(name)
    if not isinstance(name, str) or not min_length <= len(name) <= max_length:
        least = f"{min_length} to" if min_length else "at most"
        raise InputError(field, name, f"a text of {least} {max_length} characters")
    if not name.isprintable():  # as lone surrogates are not, which UTF-8 cannot hold
        raise InputError(field, name, "printable characters")
    return name


# Fields whose check is more than a type and a range.
_CHECKS: dict[str, Callable[[Any], Any]] = {name: field.check for name, field in OPTION_FIELDS.items()} | {
    "cache_salt": lambda salt: check_salt("cache_salt", salt or None),
    "tenant": lambda tenant: check_name("tenant", tenant, 0, MAX_TENANT_LENGTH),
    "names": lambda names: [check_name("names", name, 1, MAX_REQUEST_ID_LENGTH) for name in names],
}
