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
from refusals import Refusal, refusals

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object"}
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
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
        *(("id_slot", -1), ("id_slot", 1), ("cache_prompt", True), ("n_probs", 0), ("ttl", 300)),
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
        (TEXT, "n_predict", -1, {"max_tokens": -1}),
        (CHAT, "max_output_tokens", 7, {"max_tokens": 7}),
        (CHAT, "thinking", {"type": "disabled"}, {"reasoning_effort": "none"}),
        (CHAT, "thinking", {"type": "enabled", "clear_thinking": False}, THINKS),
        (CHAT, "thinking", {"type": "enabled", "budget_tokens": 7}, THINKS | {"thinking_token_budget": 7}),
        (CHAT, "thinking_budget", 7, {"thinking_token_budget": 7}),
        (CHAT, "reasoning", {"max_tokens": 7, "enabled": True}, THINKS | {"thinking_token_budget": 7}),
        (CHAT, "reasoning", {"effort": "low", "summary": "auto"}, {"reasoning_effort": "low"}),
        (CHAT, "reasoning", {"enabled": False}, {"reasoning_effort": "none"}),
        (CHAT, "reasoning", {"exclude": True}, {"include_reasoning": False}),
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
    assert made.keys() == becomes.keys()
    for name, new in becomes.items():
        assert new.items() <= made[name].items() if isinstance(new, dict) else made[name] == new


@refusals("other_fields")
def test_what_asks_for_something_else_is_refused_with_a_hint(refusal: Refusal) -> None:
    error = refusal.check(lambda given: parse(*given))
    assert (error.status, error.param) == (400, refusal.text.partition("=")[0])


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


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"reasoning_details": [{"type": "reasoning.text", "text": "a"}]}, {"reasoning": "a"}),
        ({"thinking_blocks": [{"type": "thinking", "thinking": "a", "signature": "x"}]}, {"reasoning": "a"}),
        ({"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}, {}),
        (
            {"thinking_blocks": [{"type": "thinking", "thinking": "a"}], "reasoning_content": "b"},
            {"reasoning_content": "b"},
        ),
    ],
)
def test_listed_thoughts_are_the_messages_unless_it_has_them_already(
    fields: dict[str, Any], kept: dict[str, Any]
) -> None:
    said = {"role": "assistant", "content": "x"}
    assert parse(CHAT, {"messages": [said | fields]}) == parse(CHAT, {"messages": [said | kept]})


@pytest.mark.parametrize("stream", [True, False])
def test_usage_that_a_stream_is_asked_for_is_its_options(stream: bool) -> None:
    made = parse(CHAT, {"stream": stream, "usage": {"include": True}})
    assert made == parse(
        CHAT, {"stream": True, "stream_options": {"include_usage": True}} if stream else {"stream": False}
    )


@pytest.mark.parametrize(
    ("value", "is_taken"), [("7.0", True), ("70e-1", True), ("7.5", False), ("1e400", False)]
)
def test_a_number_is_an_integer_if_its_value_is(value: str, is_taken: bool) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "max_tokens": {value}}}'.encode()
    if is_taken:
        assert parse_body(body, ROUTES[CHAT].body) == parse_body(
            body.replace(value.encode(), b"7"), ROUTES[CHAT].body
        )
    else:
        with pytest.raises(ApiError) as caught:
            parse_body(body, ROUTES[CHAT].body)
        assert (caught.value.status, caught.value.param) == (400, "max_tokens")
