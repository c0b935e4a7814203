"""Fields of other engines and clients: by route, field and value, what is taken, or said of it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from quire.frontend.http.bodies.other_fields import MESSAGE_FIELDS, REQUEST_FIELDS
from quire.frontend.http.bodies.parsing import parse_body
from quire.frontend.http.dialects.table import ROUTES
from quire.frontend.http.errors import ApiError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object"}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    TEXT: {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"model": "m", "max_tokens": 5, "messages": MESSAGES},
    "/v1/embeddings": {"input": "x"},
    "/v2/embed": {"model": "m", "texts": ["x"], "input_type": "search_query"},
    "/v1/rerank": {"query": "x", "documents": ["x"]},
    "/embed": {"inputs": "x"},
    "/tokenize": {"prompt": "x"},
}


def parse(path: str, fields: dict[str, Any], ignores_unknown: bool = False) -> dict[str, Any]:
    """What a request has beside the least of it."""
    body = parse_body(json.dumps(LEAST[path] | fields).encode(), ROUTES[path].body, ignores_unknown)
    values = msgspec.to_builtins(body)
    least = msgspec.to_builtins(parse_body(json.dumps(LEAST[path]).encode(), ROUTES[path].body))
    return {name: value for name, value in values.items() if value != least[name]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("repeat_penalty", 1.0), ("repeat_last_n", 64), ("repeat_last_n", -1), ("penalize_nl", True)),
        *(("typical_p", 1), ("tfs_z", 1.0), ("mirostat", 0), ("mirostat_tau", 5.0), ("xtc_probability", 0)),
        *(("dry_multiplier", 0.0), ("dry_base", 1.75), ("dry_sequence_breakers", ["\n", ":"])),
        *(("id_slot", -1), ("id_slot", 1), ("cache_prompt", True), ("n_probs", 0), ("n_predict", -1)),
        *(("samplers", []), ("do_sample", True), ("num_beams", 1), ("return_full_text", False)),
        *(("provider", {}), ("provider", {"order": ["a"]}), ("transforms", []), ("plugins", [])),
        *(("usage", {"include": False}), ("reasoning", {}), ("reasoning_format", "auto")),
        *(("guided_json", None), ("guided_decoding_backend", "xgrammar"), ("lora_path", None)),
        *(("separate_reasoning", True), ("return_hidden_states", False), ("extra_body", {})),
        *(("late_chunking", False), ("embedding_type", "float"), ("never_heard_of", None)),
    ],
)
@pytest.mark.parametrize("path", LEAST)
def test_what_asks_for_nothing_is_taken_by_every_route(path: str, field: str, value: Any) -> None:
    if field not in ROUTES[path].body.__struct_fields__:
        assert parse(path, {field: value}) == {}


@pytest.mark.parametrize(
    ("path", "field", "value", "becomes"),
    [
        (TEXT, "max_new_tokens", 7, {"max_tokens": 7}),
        (CHAT, "n_predict", 7, {"max_tokens": 7}),
        (CHAT, "min_new_tokens", 7, {"min_tokens": 7}),
        (CHAT, "stop_sequences", ["a"], {"stop": ["a"]}),
        (CHAT, "random_seed", 7, {"seed": 7}),
        (CHAT, "rid", "a", {"request_id": "a"}),
        (CHAT, "enable_thinking", False, {"chat_template_kwargs": {"enable_thinking": False}}),
        (CHAT, "thinking", {"type": "disabled"}, {"reasoning_effort": "none"}),
        (CHAT, "reasoning", {"effort": "low"}, {"reasoning_effort": "low"}),
        (TEXT, "json_schema", SCHEMA, {"structured_outputs": {"json": SCHEMA}}),
        (CHAT, "regex", "[a-z]+", {"structured_outputs": {"regex": "[a-z]+"}}),
        (CHAT, "ebnf", 'root ::= "a"', {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        (CHAT, "grammar", 'root ::= "a"', {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        (CHAT, "guided_json", SCHEMA, {"structured_outputs": {"json": SCHEMA}}),
        (CHAT, "guided_choice", ["a", "b"], {"structured_outputs": {"choice": ["a", "b"]}}),
    ],
)
@pytest.mark.parametrize("ignores_unknown", [False, True])
def test_another_name_of_one_meaning_becomes_ours(
    path: str, field: str, value: Any, becomes: dict[str, Any], ignores_unknown: bool
) -> None:
    made = parse(path, {field: value}, ignores_unknown)
    ((name, new),) = becomes.items()
    assert list(made) == [name]
    assert new.items() <= made[name].items() if isinstance(new, dict) else made[name] == new


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        (CHAT, {"repeat_penalty": 1.1}, "repeat_penalty=1.1: no such field: repetition_penalty, which"),
        (CHAT, {"presence_penalty": 0.5, "repeat_last_n": 64}, "repeat_last_n=64: no such field: repet"),
        (CHAT, {"typical_p": 0.9}, "typical_p=0.9: no such field: Quire samples by"),
        (CHAT, {"mirostat": 2}, "mirostat=2: no such field: Quire samples by"),
        (CHAT, {"mirostat": True}, "mirostat=True: no such field"),
        (CHAT, {"format": SCHEMA}, "format={'type': 'object'}: no such field: response_format"),
        (CHAT, {"think": False}, "think=False: no such field: reasoning_effort, or"),
        (CHAT, {"thinking": {"type": "enabled"}}, "thinking={'type': 'enabled'}: no such field: reasoning_e"),
        (CHAT, {"reasoning": {"max_tokens": 5}}, "reasoning={'max_tokens': 5}: no such field: reasoning_e"),
        (CHAT, {"num_ctx": 5}, "num_ctx=5: no such field: the server's --max-model-len"),
        (CHAT, {"lora_path": "a"}, "lora_path='a': no such field: Quire has no LoRA adapters yet"),
        (CHAT, {"provider": {"a": "x" * 5000}}, "provider={'a': 'xxx"),
        (CHAT, {"enable_thinking": "no"}, "enable_thinking='no': no such field: true or false"),
        (TEXT, {"enable_thinking": True}, "enable_thinking=True: no such field; the server's option"),
        ("/v1/embeddings", {"max_new_tokens": 5}, "max_new_tokens=5: no such field"),
        (CHAT, {"max_tokens": 5, "n_predict": 6}, "n_predict=6: expected the same as max_tokens, or"),
        (
            CHAT,
            {"structured_outputs": {"regex": "a"}, "regex": "b"},
            "regex='b': expected the same as structured_outputs.regex, or",
        ),
        (CHAT, {"guided_decoding": {"a": 1}}, "guided_decoding={'a': 1}: no such field: structured_outputs"),
    ],
)
def test_what_asks_for_something_else_is_refused_with_a_hint(
    path: str, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ApiError) as caught:
        parse(path, fields)
    assert str(caught.value).startswith(said)
    assert (caught.value.status, caught.value.param) == (400, list(fields)[-1])


@pytest.mark.parametrize(
    ("field", "value", "is_taken"),
    [
        *(("type", "text", True), ("type", "image", False), ("copilot_cache_control", {}, True)),
        *(("id", "a", True), ("timestamp", 5, True), ("prefix", False, True), ("prefix", True, False)),
        *(("images", [], True), ("images", ["x"], False), ("reasoning_details", [], True)),
        *(("usage", {"total_tokens": 5}, True), ("citations", ["x"], False), ("nothing", 1, False)),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_what_clients_add_to_messages_is_taken_where_it_says_nothing(
    path: str, field: str, value: Any, is_taken: bool
) -> None:
    body = {"messages": [MESSAGES[0] | {field: value}]}
    if is_taken:
        assert parse(path, body) == {}
    else:
        with pytest.raises(ApiError, match=rf"^messages\[0\]\.{field}=.*: no such field"):
            parse(path, body)


@pytest.mark.parametrize(("field", "is_taken"), [("id", True), ("citations", True), ("other", False)])
def test_what_clients_add_to_parts_is_taken_where_it_says_nothing(field: str, is_taken: bool) -> None:
    def read(part: dict[str, Any]) -> dict[str, Any]:
        return parse(CHAT, {"messages": [{"role": "user", "content": [part]}]})

    part = {"type": "text", "text": "x"}
    if is_taken:
        assert read(part | {field: []}) == read(part)
    else:
        with pytest.raises(ApiError, match=r"content\[0\]\.other="):
            read(part | {field: []})


def test_a_value_that_is_said_twice_is_taken() -> None:
    assert parse(TEXT, {"max_new_tokens": 4, "max_tokens": 4}) == {"max_tokens": 4}
    assert parse(TEXT, {"stop_sequences": ["a"], "stop": ["a"]}) == {"stop": ["a"]}


def test_no_row_is_for_a_field_that_chats_or_their_messages_have() -> None:
    known = ROUTES[CHAT].body.__struct_fields__
    assert not set(known) & set(REQUEST_FIELDS)
    assert {row.becomes.partition(".")[0] for row in REQUEST_FIELDS.values()} <= {*known, ""}
    assert MESSAGE_FIELDS.keys().isdisjoint({"role", "content", "name", "tool_calls", "reasoning"})


@pytest.mark.parametrize(
    "value", ["9" * 5000, "1e400", "[" * 900 + "1," * 3000 + "1" + "]" * 900, '"\\ud800"']
)
@pytest.mark.parametrize("field", ["provider", "mirostat", "regex", "n_predict", "reasoning"])
def test_values_that_nothing_can_hold_are_refused(field: str, value: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "{field}": {value}}}'
    with pytest.raises(ApiError) as caught:
        parse_body(body.encode(), ROUTES[CHAT].body)
    assert caught.value.status == 400
    assert len(str(caught.value)) < 1000
