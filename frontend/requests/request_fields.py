"""What a request says beside its prompt and its parameters: its id, whose it is, how long it may take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ipc.errors import InputError
from ...ipc.params.param_fields import make_plain
from ...ipc.protocol.messages import MAX_REQUEST_ID_LENGTH, MAX_TENANT_LENGTH, MAX_TIMEOUT_S

MAX_USER_ID_LENGTH = 200  # leaves room for the index and the random part within the wire's cap


def check_fields(
    tenant: str = "",
    timeout_s: float | None = None,
    queue_timeout_s: float | None = None,
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """The checked fields of an EngineCoreRequest, by name. Raises InputError."""
    return {
        "tenant": _check_name("tenant", make_plain(tenant), 0, MAX_TENANT_LENGTH),
        "timeout_s": _check_timeout("timeout_s", make_plain(timeout_s)),
        "queue_timeout_s": _check_timeout("queue_timeout_s", make_plain(queue_timeout_s)),
        "names": [_check_name("names", make_plain(name), 1, MAX_REQUEST_ID_LENGTH) for name in names],
    }


def check_request_id(request_id: Any) -> str:
    """The user's id of a request. Raises InputError."""
    return _check_name("request_id", make_plain(request_id), 1, MAX_USER_ID_LENGTH)


def check_priority(priority: Any) -> int:
    """The priority. Raises InputError."""
    priority = make_plain(priority)
    if not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise InputError("priority", priority, "an integer; lower runs first")
    return int(priority)


def _check_name(field: str, name: Any, min_length: int, max_length: int) -> str:
    if not isinstance(name, str) or not min_length <= len(name) <= max_length:
        least = f"{min_length} to" if min_length else "at most"
        raise InputError(field, name, f"a text of {least} {max_length} characters")
    if not name.isprintable():  # as lone surrogates are not, which UTF-8 cannot hold
        raise InputError(field, name, "printable characters")
    return name


def _check_timeout(name: str, value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value <= MAX_TIMEOUT_S):  # nan compares false
        raise InputError(name, value, f"seconds above 0 and up to {MAX_TIMEOUT_S:g}, or None")
    return None if value is None else float(value)
