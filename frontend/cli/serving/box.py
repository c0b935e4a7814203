"""What `quire serve` prints when it is ready: where its API is, and a request to copy."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .options import ENV_KEY

_EXAMPLES: tuple[tuple[str, str, dict[str, Any]], ...] = (  # a task, its route, what is asked
    ("generate", "/v1/chat/completions", {"messages": [{"role": "user", "content": "What is 12 plus 30?"}]}),
    ("embed", "/v1/embeddings", {"input": "A rose."}),
    ("score", "/rerank", {"query": "What is red?", "documents": ["A rose.", "A sum."]}),
    ("classify", "/classify", {"input": "A rose."}),
)


def bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def format_box(
    host: str,
    port: int,
    models: Mapping[str, Sequence[str]],
    formats: str,
    has_keys: bool,
    grpc_port: int | None = None,
) -> str:
    """What to do with the server, as text to copy from.

    models: what each can do. formats: how tool calls and thoughts are read, '' without any to read.
    """
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else bracket(host)
    url = f"http://{shown}:{port}"
    path, body = _make_example(models)
    auth = f' -H "Authorization: Bearer ${ENV_KEY}"' if has_keys else ""
    curl = (
        f"curl {url}{path} -H 'Content-Type: application/json'{auth} "
        f"-d {shlex.quote(msgspec.json.encode(body).decode())}"
    )
    rows = [
        ("OpenAI API", f"{url}/v1"),
        ("model" if len(models) == 1 else "models", ", ".join(models)),
        ("docs", f"{url}/docs"),
        ("metrics", f"{url}/metrics"),
        ("page", f"{url}/"),
    ]
    if formats:
        rows.append(("formats", formats))
    if grpc_port is not None:
        rows.append(("gRPC", f"{shown}:{grpc_port}"))
    lines = [f"  {name:<11} {value}" for name, value in rows]
    return "\n".join(["Quire is ready", *lines, "", f"  {curl}", ""])


def _make_example(models: Mapping[str, Sequence[str]]) -> tuple[str, dict[str, Any]]:
    """Path and body of a request: to a model that generates, if there is one."""
    for task, path, fields in _EXAMPLES:
        for name, tasks in models.items():
            if task in tasks:
                return path, {"model": name} | fields
    return "/pooling", {"model": next(iter(models)), "input": "A rose."}
