"""Logprobs of many positions: the same JSON as of few, and no time that grows faster than they do."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
from openai_fakes import AsgiClient
from quire.frontend.http.dialects.completions import CompletionRequest, LogprobsOfChoices
from quire.frontend.http.dialects.logprobs import (
    make_beside,
    make_chat_logprobs,
    make_completion_logprobs,
    make_prompt_logprobs,
)
from quire.frontend.logprobs import Logprob, LogprobsList, LogprobsTable
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.text.detokenizer import Detokenizer
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.messages import LogprobsBlock

POSITIONS = [None, *({n: Logprob(-n / 10, 1, f"t{n}"), 7: Logprob(-1.0, 2, "\u00e9")} for n in range(10, 20))]


@pytest.mark.parametrize(
    "make",
    [
        lambda positions: make_chat_logprobs(positions, 2).content,
        lambda positions: make_completion_logprobs(positions, 2, lambda _: 0).top_logprobs,
        make_prompt_logprobs,
    ],
    ids=["chat", "completions", "prompt"],
)
def test_many_positions_are_encoded_as_few_are(make: Callable[[Any], list[Any]]):
    few = json.loads(msgspec.json.encode(make(POSITIONS)))
    assert json.loads(msgspec.json.encode(make(POSITIONS * 30))) == few * 30


def test_ids_that_were_asked_for_stand_in_their_order_also_with_the_same_text():
    entries = {3: Logprob(-0.1, 1, "a"), 9: Logprob(-2.0, None, "b"), 4: Logprob(-3.0, None, "b")}
    (top,) = make_completion_logprobs([entries], [4, 3, 9], lambda _: 0).top_logprobs
    assert list((top or {}).items()) == [("b", -3.0), ("a", -0.1), ("token_id:9", -2.0)]
    (own,) = make_chat_logprobs([entries], [4, 9]).content
    assert (own.token, [one.logprob for one in own.top_logprobs]) == ("a", [-3.0, -2.0])


def test_the_token_itself_is_among_the_alternatives_of_a_completion_and_shown_once():
    entries = {3: Logprob(-4.0, 9, "a"), 9: Logprob(-1.0, 1, "b"), 4: Logprob(-2.0, 2, "c")}
    for top, expected in (
        (0, {"a": -4.0}),
        (1, {"a": -4.0, "b": -1.0}),
        (3, {"a": -4.0, "b": -1.0, "c": -2.0}),
    ):
        (found,) = make_completion_logprobs([entries], top, lambda _: 0).top_logprobs
        assert found == expected
    (found,) = make_completion_logprobs([entries], 1, lambda _: 0, as_ids=True).top_logprobs
    assert found == {"token_id:3": -4.0, "token_id:9": -1.0}
    (own,) = make_chat_logprobs([entries], 1, as_ids=True).content
    assert (own.token, bytes(own.bytes)) == ("token_id:3", b"token_id:3")
    assert [one.token for one in own.top_logprobs] == ["token_id:9"]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("prompt", ["", "the fox", "naïve 🦊"])
def test_offsets_are_places_in_the_text_however_it_is_cut(
    kind: str, prompt: str, as_ids: bool, request: pytest.FixtureRequest
):
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    before = tokenizer.encode(prompt, add_special_tokens=False)
    token_ids = tokenizer.encode("the quick 🦊🦊 fox <s> jumps 狐", add_special_tokens=False)
    params = SamplingParams()
    asked = CompletionRequest(prompt="x", logprobs=0, return_tokens_as_token_ids=as_ids)
    logprobs = LogprobsOfChoices(asked, params, tokenizer)
    text = Detokenizer(tokenizer, before, params)
    found: list[int] = []
    expected: list[int] = []
    for number, token_id in enumerate(token_ids):
        entries = {token_id: Logprob(-1.0, 1, tokenizer.token_text(token_id))}
        one = CompletionOutput(0, "", [token_id], logprobs=cast(Any, [entries]))
        made = logprobs.make(0, 0, one, prompt=before, num_echoed=5, is_first=not number, is_hidden=False)
        assert made is not None
        found += made.text_offset
        assert made.tokens == [f"token_id:{token_id}" if as_ids else tokenizer.token_text(token_id)]
        expected.append(5 + len(text.text))
        text.add([token_id])
    assert found == expected
    assert "🦊🦊 fox" in text.text
    place = len(tokenizer.encode("the quick 🦊🦊", add_special_tokens=False))
    assert text.text[found[place] - 5 :].lstrip().startswith("fox")


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_the_bytes_of_tokens_that_share_a_character_are_those_of_the_character(
    kind: str, request: pytest.FixtureRequest
):
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    token_ids = tokenizer.encode("🦊狐", add_special_tokens=False)
    positions = [{one: Logprob(-1.0, 1, tokenizer.token_text(one))} for one in token_ids]
    content = make_chat_logprobs(positions, 1, tokenizer).content
    assert len(content) > 2
    assert bytes(byte for one in content for byte in one.bytes).decode().lstrip() == "🦊狐"
    assert [one.top_logprobs[0].bytes for one in content] == [one.bytes for one in content]


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("adds_special", [False, True])
def test_offsets_of_an_echoed_prompt_are_places_in_it(
    kind: str, adds_special: bool, request: pytest.FixtureRequest
):
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    prompt = "the quick 🦊🦊 fox jumps"
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    num_added = int(adds_special)
    ids[:0] = [1] * num_added
    positions = [
        None,
        *({token_id: Logprob(-1.0, 1, tokenizer.token_text(token_id))} for token_id in ids[1:]),
    ]
    asked = CompletionRequest(prompt=prompt, echo=True, logprobs=0)
    logprobs = LogprobsOfChoices(asked, SamplingParams(), tokenizer)
    one = CompletionOutput(0, "", [ids[-1]], logprobs=cast(Any, [positions[-1]]))
    output = RequestOutput("a", prompt, ids, cast(Any, positions), [one], False)
    logprobs.note_prompt(0, output, len(prompt))
    made = logprobs.make(0, 0, one, prompt=ids, num_echoed=len(prompt), is_first=True, is_hidden=False)
    assert made is not None
    assert made.text_offset == sorted(made.text_offset)
    assert made.text_offset[: num_added + 1] == [0] * (num_added + 1)
    assert made.text_offset[-1] == len(prompt)
    place = len(tokenizer.encode("the quick 🦊🦊", add_special_tokens=False)) + num_added
    assert prompt[made.text_offset[place] :] == " fox jumps"


def test_a_whole_vocabulary_is_made_apart_from_the_event_loop_at_a_single_position():
    table = LogprobsTable()
    width = 2049
    table.add(LogprobsBlock(1, width, bytes(4 * width), bytes(4 * width), bytes(4)))
    one = CompletionOutput(0, "", [0], logprobs=LogprobsList(table, 0, 1, None))
    output = RequestOutput("a", None, [1], None, [one], False)
    made_in = asyncio.run(make_beside(output, threading.get_ident))
    assert made_in != threading.get_ident()
    one.logprobs = None
    assert asyncio.run(make_beside(output, threading.get_ident)) == threading.get_ident()


@pytest.mark.app(max_model_len=200_000)
async def test_the_echo_of_a_long_prompt_with_logprobs_takes_time_as_it_is_long(client: AsgiClient) -> None:
    num_tokens = 100_000  # the sums of all beginnings would take a minute
    body = {"prompt": [7] * num_tokens, "echo": True, "logprobs": 0, "max_tokens": 1, "n": 2}
    answer = await client.post("/v1/completions", body)
    for choice in answer.json["choices"]:
        offsets = choice["logprobs"]["text_offset"]
        assert offsets[1] == len(choice["logprobs"]["tokens"][0])
        assert [b - a for a, b in itertools.pairwise(offsets)][1:-1] == [1] * 99_998
