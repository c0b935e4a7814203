"""Loaded by schemathesis (SCHEMATHESIS_HOOKS): aims requests at the engine and not at the first check.

Random text is hardly ever the name of the served model, and a generation without a limit is long. Only what
is valid by the schema is changed, and stays valid: what was made invalid on purpose must be refused.
"""

from __future__ import annotations

from typing import Any

import schemathesis

MAX_TOKENS = 16
MAX_N = 4
NUM_TOKEN_IDS = 1000  # the pocket model has more
MAX_INT = 2**31 - 1
# What Quire does not have, and refuses with any value but none.
UNSUPPORTED: dict[str, type] = {
    "audio": dict,
    "background": bool,
    "chat_template": str,
    "function_call": object,
    "functions": list,
    "prediction": dict,
    "previous_response_id": str,
    "conversation": object,
    "suffix": str,
    "verbosity": str,
    "web_search_options": dict,
}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Of a request that could be valid: the served model, few tokens, few sequences, nothing unsupported."""
    path = context.operation.path
    if not isinstance(body, dict) or not path.startswith("/v1/"):
        return body
    if isinstance(body.get("model"), str):
        body["model"] = "pocket"
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    if path != "/v1/messages/count_tokens":
        body[limit] = _cap(body.get(limit, MAX_TOKENS), MAX_TOKENS)
    for name in ("max_completion_tokens", "n", "best_of"):
        if name in body:
            body[name] = _cap(body[name], MAX_N)
    for name, kind in UNSUPPORTED.items():
        if name in body and isinstance(body[name], kind):
            body[name] = None
    for name in ("prompt", "allowed_token_ids", "stop_token_ids"):
        if name in body:
            body[name] = _fold_ids(body[name])
    for name in ("messages", "input"):
        for message in body[name] if isinstance(body.get(name), list) else []:
            if isinstance(message, dict) and isinstance(message.get("role"), str):
                message["role"] = "user"
    return body


def _cap(value: Any, bound: int) -> Any:
    """None, which means no limit, and large numbers become the bound."""
    if value is None:
        return bound
    return min(value, bound) if type(value) is int and value <= MAX_INT else value


def _fold_ids(value: Any) -> Any:
    """Token ids, at any depth, become ids of the model."""
    if isinstance(value, list):
        return [_fold_ids(item) for item in value]
    return value % NUM_TOKEN_IDS if type(value) is int and 0 <= value <= MAX_INT else value
