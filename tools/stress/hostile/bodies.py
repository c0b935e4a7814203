"""Attacks by requests that a key allows: as large, as many and as dear as their fields let them be.

Each is a body, made once, and how many are sent at once; what is answered is counted as `wire` says. A 200 is
fine, a refusal that names a limit is fine, a connection that ends is not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ....ipc.protocol.messages import MAX_IDS_PER_ABORT
from .attack import ATTACKS, REFUSALS, Attack, Play
from .plan import Target
from .wire import Exchange, converse, make_request

ALLOWED = REFUSALS | {"200", "401", "404", "open", "not accepted"}
_TEXT_BYTES = 8_000_000  # fits into the largest body
_WORDS = "one two three four five six seven eight "
_COMPLETIONS, _CHAT, _TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"

_NUMBERS = (b"NaN", b"1e999", b"-1", b"0", b"9" * 400, b"2147483647", b"[]", b'"5"', b"true", b"null")

MakeBodies = Callable[[Target], list[bytes]]


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent to `path`: each body, `count` times, all at once."""

    path: str
    make_bodies: MakeBodies
    count: int = 1


def _json(**fields: Any) -> MakeBodies:
    return lambda target: [msgspec.json.encode({"model": target.model, **fields})]


def _large(make: Callable[[int], dict[str, Any]], size: int = _TEXT_BYTES) -> MakeBodies:
    """Fields made of a size that the run's scale shrinks."""
    return lambda target: [msgspec.json.encode({"model": target.model, **make(target.shrink(size))})]


def _text(size: int) -> str:
    return (_WORDS * (size // len(_WORDS) + 1))[:size]


def _chat(size: int, **message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": _text(size)} | message], "max_tokens": 1}


def _many_messages(size: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": _text(1900)} for _ in range(max(1, size // 2000))]
    return {"messages": messages, "max_tokens": 1}


def _many_items(size: int) -> dict[str, Any]:
    """Calls and their results, one turn of the assistant after the other."""
    items: list[dict[str, Any]] = []
    for number in range(min(2048, size // 2000)):
        call_id = f"call_{number}"
        call = {"type": "function_call", "call_id": call_id, "name": "f", "arguments": '{"a": 1}'}
        items += [call, {"type": "function_call_output", "call_id": call_id, "output": _text(1900)}]
    return {"input": items, "max_output_tokens": 1}


def _tools(size: int) -> dict[str, Any]:
    """As many tools as there may be, with schemas that have to be followed."""
    half = size // 256
    schema = {"properties": {"a": {"enum": [_text(50) + str(number) for number in range(half // 60)]}}}
    tools: list[dict[str, Any]] = []
    for number in range(128):
        function = {"name": f"f{number}", "description": _text(half), "parameters": schema, "strict": True}
        tools.append({"type": "function", "function": function})
    return {**_chat(5), "tools": tools, "tool_choice": "required"}


def _past_calls(size: int) -> dict[str, Any]:
    """A turn of as many calls as there may be, and the result of each."""
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for number in range(min(4000, max(1, size // 2000))):
        function = {"name": "f", "arguments": msgspec.json.encode({"a": _text(1800)}).decode()}
        calls.append({"id": f"call_{number}", "type": "function", "function": function})
        results.append({"role": "tool", "tool_call_id": f"call_{number}", "content": "x"})
    return {"messages": [{"role": "assistant", "tool_calls": calls}, *results], "max_tokens": 1}


def _bad_words(num_prompts: int, n: int) -> Callable[[int], dict[str, Any]]:
    def make(length: int) -> dict[str, Any]:
        words = [f"{number} {_text(length)}"[:length] for number in range(128)]
        prompts = ["Once upon a time"] * num_prompts
        return {"prompt": prompts, "n": n, "max_tokens": 16, "bad_words": words}

    return make


def _unknown_nulls(size: int) -> dict[str, Any]:
    """Fields that are not known and null, of which some places are left out and decoded again."""
    message = {"role": "user", "content": [{"type": "text", "text": "x", "new": None}], "new": None}
    return {"messages": [message] * max(1, size // 90), "max_tokens": 1, "new": None}


def _nested(depth: int) -> MakeBodies:
    def make(target: Target) -> list[bytes]:
        return [b'{"prompt": ' + b"[" * target.shrink(depth) + b"]" * target.shrink(depth) + b"}"]

    return make


def _named(size: int) -> MakeBodies:
    return lambda target: [b'{"' + b"f" * target.shrink(size) + b'": 1}']


def _repeated_in_an_error(depth: int) -> bytes:
    """Just within what JSON's parser takes, in a field that is refused with its value."""
    return b'{"prompt": "Hi", "response_format": ' + b'{"a": ' * depth + b"1" + b"}" * depth + b"}"


def _many_blocks(size: int) -> dict[str, Any]:
    blocks = [{"type": "text", "text": _text(1900)} for _ in range(max(1, size // 2000))]
    return {"messages": [{"role": "user", "content": blocks}], "max_tokens": 1}


REQUESTS: dict[str, Request] = {
    # Text on the event loop, in the tokenizer, in the chat template.
    "text": Request(_COMPLETIONS, _large(lambda size: {"prompt": _text(size), "max_tokens": 1}), 2),
    "texts": Request(
        _COMPLETIONS, _large(lambda size: {"prompt": [_text(size)] * 256, "max_tokens": 1}, 30_000)
    ),
    "tokenize": Request(_TOKENIZE, _large(lambda size: {"prompt": _text(size)}), 2),
    "token-strings": Request(
        _TOKENIZE, _large(lambda size: {"prompt": _text(size), "return_token_strs": True})
    ),
    "detokenize": Request("/detokenize", _large(lambda size: {"tokens": [1000] * size}, 1_500_000)),
    "chat": Request(_CHAT, _large(_chat), 2),
    "messages": Request(_CHAT, _large(_many_messages)),
    "role": Request(_CHAT, _large(lambda size: _chat(5, role=_text(size)), 7_500_000)),
    "tool-call": Request(_CHAT, _large(lambda size: _chat(5, role="tool", tool_call_id=_text(size)))),
    "tools": Request(_CHAT, _large(_tools), 2),
    "past-calls": Request(_CHAT, _large(_past_calls)),
    "template-arguments": Request(
        _CHAT, _large(lambda size: _chat(5) | {"chat_template_kwargs": {"x": ["a"] * size}}, 2_000_000)
    ),
    "documents": Request(_CHAT, _large(lambda size: _chat(5) | {"documents": [{"text": _text(size)}]}), 2),
    "unknown-nulls": Request(_CHAT, _large(_unknown_nulls, 4_000_000), 2),
    "invocations": Request("/invocations", _large(lambda size: {"prompt": _text(size), "max_tokens": 1}), 2),
    "responses": Request(
        "/v1/responses", _large(lambda size: {"input": _text(size), "max_output_tokens": 1})
    ),
    "message-blocks": Request("/v1/messages", _large(_many_blocks)),
    "ollama-calls": Request(
        "/api/chat",
        _large(
            lambda size: {
                "messages": _past_calls(size)["messages"],
                "options": {"num_predict": 1},
                "stream": False,
            }
        ),
    ),
    "items": Request("/v1/responses", _large(_many_items), 4),
    # What an HTTP process keeps of responses: many, and large ones, of which a token is the prompt.
    "kept-responses": Request("/v1/responses", _json(input="Hi", max_output_tokens=1), 64),
    "large-kept-responses": Request(
        "/v1/responses",
        _large(lambda size: {"input": _text(size), "max_output_tokens": 1, "truncation": "auto"}, 500_000),
        8,
    ),
    # What core and worker hold, and what a step costs them.
    "allowed-tokens": Request(
        _COMPLETIONS,
        _large(lambda size: {"prompt": "Hi", "n": 8, "allowed_token_ids": [5] * size}, 4_000_000),
    ),
    "bad-words": Request(_COMPLETIONS, _large(_bad_words(256, 1), 1000)),
    "bad-words-times-n": Request(_COMPLETIONS, _large(_bad_words(8, 128), 1000)),
    "logprobs": Request(
        _COMPLETIONS, _json(prompt=["Tell me"] * 8, n=128, max_tokens=2000, logprobs=20, ignore_eos=True)
    ),
    "all-logprobs": Request(
        _COMPLETIONS, _json(prompt=["Tell me all"] * 4, n=32, max_tokens=500, logprobs=-1, ignore_eos=True)
    ),
    "beams": Request(
        _COMPLETIONS, _json(prompt=["Seek"] * 8, n=128, max_tokens=100, use_beam_search=True, ignore_eos=True)
    ),
    "aborts": Request(
        "/abort_requests",  # which has no field `model`
        lambda _: [msgspec.json.encode({"request_ids": [f"cmpl-{i}" for i in range(MAX_IDS_PER_ABORT)]})],
        32,
    ),
    "echoed-logprobs": Request(
        _COMPLETIONS,
        _json(prompt=[[1000] * 1900] * 64, max_tokens=1, logprobs=20, echo=True, prompt_logprobs=20),
    ),
    "returned-ids": Request(
        _COMPLETIONS,
        _json(prompt=[[1000] * 1900] * 8, n=128, max_tokens=1, echo=True, return_token_ids=True),
    ),
    "repetitions": Request(
        _COMPLETIONS,
        _json(
            prompt=["Again"] * 8,
            n=128,
            max_tokens=500,
            ignore_eos=True,
            allowed_token_ids=[300, 301],
            repetition_detection={"max_pattern_size": 64, "min_count": 64},
        ),
    ),
    "cut-prompt": Request(
        _COMPLETIONS,
        _large(lambda size: {"prompt": [7] * size, "max_tokens": 1, "truncate_prompt_tokens": -1}, 2_000_000),
    ),
    "biases": Request(
        _COMPLETIONS,
        _json(
            prompt=["Hi"] * 8,
            n=32,
            max_tokens=200,
            logit_bias={str(token): 1.0 for token in range(1000)},
            stop=["a stop text that never comes " * 30] * 4,
        ),
    ),
    "flood": Request(
        _COMPLETIONS,
        _json(prompt=["Flood"] * 6, n=128, max_tokens=500, ignore_eos=True, stream=True),
        8,  # more than fill each of two processes
    ),
    "long-prompts": Request(
        _COMPLETIONS, _json(prompt=[[1000 + place] * 1900 for place in range(200)], max_tokens=100), 2
    ),
    # Vectors, of a model that makes some; any other refuses them.
    "vectors": Request("/v1/embeddings", _large(lambda size: {"input": [_text(size // 2048)] * 2048}), 4),
    "vector-ids": Request(
        "/v1/embeddings", _large(lambda size: {"input": [[7] * 900] * (size // 900)}, 1_800_000)
    ),
    "vector-of-many-ids": Request("/v1/embeddings", _large(lambda size: {"input": [7] * size}, 2_000_000)),
    "vector-size": Request(
        "/v1/embeddings", lambda _: [b'{"input": "Hi", "dimensions": %b}' % size for size in _NUMBERS]
    ),
    "token-vectors": Request(
        "/pooling",
        _large(
            lambda size: {"input": [_text(size)] * 64, "task": "token_embed", "truncate_prompt_tokens": -1},
            9000,
        ),
        4,
    ),
    "ranks": Request(
        "/v1/rerank", _large(lambda size: {"query": _text(size), "documents": [_text(size)] * 2000}, 3900), 4
    ),
    "scores": Request(
        "/score", _large(lambda size: {"text_1": ["a"] * size, "text_2": ["b"] * size}, 60_000)
    ),
    # JSON itself.
    "depth": Request(_COMPLETIONS, lambda _: [_repeated_in_an_error(930 + step) for step in range(70)]),
    "great-depth": Request(_COMPLETIONS, _nested(3_500_000)),
    "unknown-field": Request(_COMPLETIONS, _named(7_900_000)),
    "unknown-model": Request(
        _COMPLETIONS, _large(lambda size: {"model": "m" * size, "prompt": "Hi"}, 7_900_000)
    ),
}


def _prepare(request: Request, target: Target, _rng: random.Random) -> Play:
    bodies = request.make_bodies(target) * request.count
    sent = [make_request(target, request.path, body) for body in bodies]
    return lambda until: converse(target, [Exchange([data]) for data in sent], until)


ATTACKS.update({name: Attack(ALLOWED, partial(_prepare, request)) for name, request in REQUESTS.items()})
