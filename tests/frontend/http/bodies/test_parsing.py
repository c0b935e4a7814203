"""Bodies that are wrong, deep, large or dear: what is said of them is short, and said in time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from openai_fakes import CHAT, AsgiClient
from quire.frontend.http.bodies.parsing import check_json_cost, parse_body
from quire.frontend.http.bodies.schema import DetokenizeRequest, TokenizeRequest
from quire.frontend.http.dialects.chat import ChatCompletionRequest
from quire.frontend.http.dialects.completions import CompletionRequest
from quire.frontend.http.dialects.responses_body import ResponsesRequest
from quire.frontend.http.errors import ApiError

LONG = "n" * 200_000
REQUESTS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "x"}),
    CHAT: (ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}]}),
    "/v1/responses": (ResponsesRequest, {"input": "x"}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
DEEP = b"[" * 980 + b"]" * 980


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, b'{"messages":%b}' % DEEP, 400),
        (CHAT, b'{"messages":[{"role":"user","content":%b}]}' % DEEP, 400),
        (CHAT, b'{"unknown":%b}' % DEEP, 400),
        (CHAT, b"[" * 100_000, 400),
        ("/v1/completions", b'{"prompt":%b}' % DEEP, 400),
        ("/v1/completions", b'{"prompt":"x","echo":%b}' % (b"9" * 5000), 400),
        (CHAT, {"": [], "x": None}, 400),
        (CHAT, {"response_format": {"type": ["text"], "x": None}}, 400),
        (CHAT, {LONG: 1}, 400),
        (CHAT, {LONG[:1000]: 1}, 400),
        (CHAT, {"messages": [{"role": LONG}]}, 400),
        (CHAT, {"messages": LONG}, 400),
        (CHAT, {"messages": [{LONG: LONG}]}, 400),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "model": LONG}, 404),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "logit_bias": {LONG: "x"}}, 400),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}, 400),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "tool_choice": LONG}, 400),
        ("/v1/responses", {"input": [{"type": LONG}]}, 400),
        ("/v1/responses", {"input": "x", "truncation": LONG}, 400),
        ("/tokenize", {"prompt": 1, LONG: 2}, 400),
        ("/detokenize", {"tokens": LONG}, 400),
    ],
)
async def test_what_is_wrong_is_said_in_few_words(
    client: AsgiClient, path: str, body: Any, status: int
) -> None:
    answer = await client.post(path, body)
    assert answer.status == status, answer.body[:300]
    assert len(answer.body) < 1000
    assert answer.error["message"]


@pytest.mark.parametrize("character", ["\0", "\U0001f600"])
@pytest.mark.parametrize("path", REQUESTS)
async def test_no_name_and_no_value_is_repeated_at_length(
    client: AsgiClient, path: str, character: str
) -> None:
    kind, least = REQUESTS[path]
    values = list(place_everywhere(character * 3000))
    answer = await client.post(path, {**least, character * 3000: 1})
    assert answer.error["code"] == "unknown_field"
    assert len(answer.body) < 1000
    for name in kind.__struct_fields__:
        for value in values:
            answer = await client.post(path, {**least, name: value})
            assert answer.status < 500, answer.body
            if answer.status >= 400:
                assert len(answer.body) < 1000, (name, str(value)[:80], answer.body)


def place_everywhere(text: str) -> Iterator[Any]:
    """A long text as a value and as a name, in whatever a field may hold."""
    yield from (text, [text], {text: 1}, {text: {text: text}}, {"format": {"type": text}})
    yield from ([{text: text}], [{"role": text, "content": "x"}], [{"role": "user", text: text}])
    yield [{"role": "user", "content": [{"type": text, "text": "x"}]}]
    yield [{"role": "user", "content": [{"type": "text", "text": "x", text: text}]}]
    yield [{"role": "user", "content": "x", "name": {text: text}}]


async def test_a_name_of_a_path_and_a_header_are_not_repeated_at_length(client: AsgiClient) -> None:
    for path in (f"/v1/models/{LONG}", f"/{LONG}"):
        answer = await client.get(path)
        assert (answer.status, len(answer.body) < 1000) == (404, True)
    answer = await client.post(CHAT, {}, content_type=LONG)
    assert (answer.status, len(answer.body) < 1000) == (415, True)


@pytest.mark.parametrize("field", ["image_url", "input_audio", "file"])
async def test_what_is_no_text_in_a_part_with_a_text_is_named(client: AsgiClient, field: str) -> None:
    part = {"type": "text", "text": "x", field: {"url": "u"}}
    answer = await client.post(CHAT, {"messages": [{"role": "user", "content": [part]}]})
    assert answer.status == 400
    assert answer.error["param"] == f"messages[0].content[0].{field}"
    assert (
        answer.error["message"]
        == f"{answer.error['param']}={{'url': 'u'}}: expected none: only text is supported"
    )


@pytest.mark.parametrize(
    ("field", "value", "param", "shown"),
    [
        ("max_tokens", "1e400", "max_tokens", "max_tokens=1e400: "),
        ("seed", "-1e400", "seed", "seed=-1e400: "),
        ("seed", "1e30", "seed", "seed=1e+30: "),
        ("top_k", "9" * 30, "top_k", f"top_k={'9' * 30}: "),
        ("n", "9" * 5000, "n", f"n={'9' * 117}...: "),
        ("logit_bias", '{"5": 1e400}', "logit_bias[...]", "logit_bias[...]={'5': 1e400}: "),
    ],
)
def test_a_number_that_nothing_can_hold_is_shown_as_it_was_written(
    field: str, value: str, param: str, shown: str
) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(f'{{"prompt": "x", "{field}": {value}}}'.encode(), CompletionRequest)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert str(caught.value).startswith(shown)


async def test_no_depth_of_lists_is_an_internal_error(client: AsgiClient) -> None:
    for depth in range(850, 1000, 5):  # what decodes, and what can be shown, ends somewhere there
        for field in ("messages", "unknown", "temperature"):
            answer = await client.post(CHAT, b'{"%b":%b%b}' % (field.encode(), b"[" * depth, b"]" * depth))
            assert answer.status == 400, (depth, answer.body[:300])


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ('"",' * 200_000, "strings"),
        ("[]," * 100_000, "lists and objects"),
        ('{"":1},' * 100_000, "lists and objects"),
        ("2.2250738585072011e-308," * 5000, "floats"),
        ("1e5," * 20_000, "floats"),
        (("1" * 4000 + ",") * 200, "digits"),
        ("1," * 2_200_000, "values"),
    ],
)
def test_a_body_that_is_dear_to_decode_is_refused_with_the_number(values: str, word: str) -> None:
    with pytest.raises(ApiError, match=rf"body=\d+ .*{word}.*: expected at most \d+") as caught:
        check_json_cost(b'{"x":[' + values.encode() + b"0]}")
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "value",
    [
        "a, b. [c] {d} 1e5 " * 100_000,
        '"quoted" \\ text, [with] {all} signs. ' * 50_000,
        "\\" * 100_000 + '"' + ",[{" * 100_000,
        list(range(500_000)),
        [{"role": "user", "content": 'He said "1.5, or [2]".\n'}] * 4096,
        {str(token): -99.5 for token in range(4096)} | {"pad": "x" * 100_000},
        [0.12345678901234567] * 4096,
    ],
)
def test_large_bodies_that_are_cheap_pass(value: Any) -> None:
    check_json_cost(json.dumps({"x": value}).encode())
