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
MAX_ALLOWED_N = 128
MAX_ID_LENGTH = 256
MESSAGES_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
# Where a role is one of these; a chat's may be any text.
ROLES = dict.fromkeys(MESSAGES_PATHS, ("user", "assistant", "system")) | {
    "/v1/responses": ("user", "assistant", "system", "developer")
}
# What Quire does not have, and refuses with any value but none.
UNSUPPORTED: dict[str, type] = {
    "audio": dict,
    "background": bool,
    "chat_template": str,
    "function_call": object,
    "functions": list,
    "previous_response_id": str,
    "conversation": object,
    "kv_transfer_params": dict,
    "ec_transfer_params": dict,
    "watermarking": bool,
    "prompt_embeds": object,
    "return_prompt_text": bool,
    "previous_input_messages": list,
    "suffix": str,
    "web_search_options": dict,
}
VECTOR_PATHS = {
    *("/v1/embeddings", "/v2/embed", "/embed", "/similarity", "/pooling", "/classify"),
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Of a request that could be valid: the served model, few tokens, few sequences, nothing unsupported."""
    path = context.operation.path
    if not isinstance(body, dict):
        return body
    is_refused = path.startswith("/api/") and not body.get("model")
    if isinstance(body.get("model"), str) and not is_refused:
        body["model"] = "pocket"
    if path.startswith("/api/") and isinstance(options := body.get("options"), dict):
        endless = options.get("num_predict") in (None, -1, -2)
        options["num_predict"] = MAX_TOKENS if endless else _cap(options["num_predict"], MAX_TOKENS)
    if path in VECTOR_PATHS:
        return body | {name: _fold_ids(body[name]) for name in ("input", "inputs") if name in body}
    if path == "/invocations" and not {"prompt", "messages"} & body.keys():
        return body | {"input": _fold_ids(body["input"])} if "input" in body else body
    if not path.startswith("/v1/") and path != "/invocations":
        return body
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    if path not in MESSAGES_PATHS:
        body[limit] = _cap(body.get(limit, MAX_TOKENS), MAX_TOKENS)
    elif body.get(limit) is not None:  # which is required
        body[limit] = _cap(body[limit], MAX_TOKENS)
    for name, largest in (
        ("max_completion_tokens", MAX_INT),
        ("n", MAX_ALLOWED_N),
        ("best_of", MAX_ALLOWED_N),
    ):
        if name in body:
            body[name] = _cap(body[name], MAX_N, largest)
    for name, kind in UNSUPPORTED.items():
        if name in body and isinstance(body[name], kind) and not _is_too_long(name, body[name]):
            body[name] = None
    for name in ("prompt", "allowed_token_ids", "stop_token_ids"):
        if name in body:
            body[name] = _fold_ids(body[name])
    for name in ("messages", "input"):
        for message in body[name] if isinstance(body.get(name), list) else []:
            if isinstance(message, dict) and isinstance(role := message.get("role"), str):
                message["role"] = "user" if role in ROLES.get(path, (role,)) else role
    return body


def _is_too_long(name: str, value: Any) -> bool:
    return name == "previous_response_id" and len(value) > MAX_ID_LENGTH


def _cap(value: Any, bound: int, largest: int = MAX_INT) -> Any:
    """None, which means no limit, and numbers up to the largest that is valid become the bound at most."""
    if value is None:
        return bound
    return min(value, bound) if type(value) is int and value <= largest else value


def _fold_ids(value: Any) -> Any:
    """Token ids, at any depth, become ids of the model."""
    if isinstance(value, list):
        return [_fold_ids(item) for item in value]
    return value % NUM_TOKEN_IDS if type(value) is int and 0 <= value <= MAX_INT else value
