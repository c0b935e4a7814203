"""Loaded by schemathesis (SCHEMATHESIS_HOOKS): aims requests at the engine and not at the first check.

Random text is hardly ever the name of the served model, and a generation without a limit is long.
"""

from __future__ import annotations

from typing import Any

import schemathesis

MAX_TOKENS = 16
MAX_N = 4


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Of a request that could be valid: the model that is served, few tokens, few sequences."""
    if not isinstance(body, dict) or not context.operation.path.startswith("/v1/"):
        return body
    if isinstance(body.get("model"), str):
        body["model"] = "pocket"
    limit = "max_output_tokens" if context.operation.path == "/v1/responses" else "max_tokens"
    body[limit] = _cap(body.get(limit, MAX_TOKENS), MAX_TOKENS)
    for name in ("max_completion_tokens", "n", "best_of"):
        if name in body:
            body[name] = _cap(body[name], MAX_N)
    return body


def _cap(value: Any, bound: int) -> Any:
    """None, which means no limit, and large numbers become the bound; what is invalid stays so."""
    if value is None:
        return bound
    return min(value, bound) if type(value) is int else value
