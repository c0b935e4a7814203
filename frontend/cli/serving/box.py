"""What `quire serve` prints when it is ready: where its API is, and a request to copy."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .options import ENV_KEY

_MAX_NAME_REST = 26  # letters behind 'serve-'
_EXAMPLES: tuple[tuple[str, str, dict[str, Any]], ...] = (  # a task, its route, what is asked
    ("generate", "/v1/chat/completions", {"messages": [{"role": "user", "content": "What is 12 plus 30?"}]}),
    ("embed", "/v1/embeddings", {"input": "A rose."}),
    ("score", "/rerank", {"query": "What is red?", "documents": ["A rose.", "A sum."]}),
    ("classify", "/classify", {"input": "A rose."}),
)


def bracket(host: str) -> str:
    """A host as URLs have it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server listens: at a port, or at the Unix socket `uds`."""

    host: str
    port: int
    uds: str | None = None
    has_tls: bool = False

    @property
    def shown_host(self) -> str:
        """An address that reaches it from this machine."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else bracket(self.host)

    @property
    def url(self) -> str:
        """Of its root."""
        scheme = "https" if self.has_tls else "http"
        return f"{scheme}://localhost" if self.uds else f"{scheme}://{self.shown_host}:{self.port}"

    @property
    def engine_name(self) -> str:
        """What its engine is called, if nobody says otherwise."""
        rest = str(self.port) if self.uds is None else re.sub(r"[^A-Za-z0-9_-]", "-", Path(self.uds).stem)
        return f"serve-{rest[:_MAX_NAME_REST]}"


def format_box(
    place: Place,
    models: Mapping[str, Sequence[str]],
    formats: str,
    has_keys: bool,
    grpc_address: str | None = None,
) -> str:
    """What to do with the server, as text to copy from.

    models: what each can do. formats: how tool calls and thoughts are read, '' without any to read.
    """
    url = place.url
    path, body = _make_example(models)
    auth = f' -H "Authorization: Bearer ${ENV_KEY}"' if has_keys else ""
    curl = (
        f"curl {_name_socket(place)}{url}{path} -H 'Content-Type: application/json'{auth} "
        f"-d {shlex.quote(msgspec.json.encode(body).decode())}"
    )
    rows = [
        ("OpenAI API", f"{url}/v1"),
        ("model" if len(models) == 1 else "models", ", ".join(models)),
        ("docs", f"{url}/docs"),
        ("metrics", f"{url}/metrics"),
        ("page", f"{url}/"),
    ]
    if place.uds is not None:
        rows.append(("socket", place.uds))
    if formats:
        rows.append(("formats", formats))
    if grpc_address is not None:
        address = f"{place.shown_host}:{grpc_address.rpartition(':')[2]}"
        rows.append(("gRPC", f"{address} (TLS)" if place.has_tls else address))
    lines = [f"  {name:<11} {value}" for name, value in rows]
    return "\n".join(["Quire is ready", *lines, "", f"  {curl}", ""])


def _name_socket(place: Place) -> str:
    return "" if place.uds is None else f"--unix-socket {shlex.quote(place.uds)} "


def _make_example(models: Mapping[str, Sequence[str]]) -> tuple[str, dict[str, Any]]:
    """Path and body of a request: to a model that generates, if there is one."""
    for task, path, fields in _EXAMPLES:
        for name, tasks in models.items():
            if task in tasks:
                return path, {"model": name} | fields
    return "/pooling", {"model": next(iter(models)), "input": "A rose."}
