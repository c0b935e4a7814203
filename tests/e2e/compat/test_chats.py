"""/v1/chat/completions: chat, echo, logit bias, stop ids, token ids, /invocations."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from quire.frontend.text.tokenizer import Tokenizer
from served import Served

VOCAB_SIZE = 2048
SUM: list[Any] = [
    {"role": "system", "content": "you are a helpful assistant"},
    {"role": "user", "content": "what is 1+1?"},
]
PLAIN: dict[str, Any] = {"model": "pocket", "temperature": 0.0, "max_completion_tokens": 5}


def chat(
    client: openai.OpenAI, messages: Any = SUM, more: dict[str, Any] | None = None, **fields: Any
) -> Any:
    return client.chat.completions.create(messages=messages, extra_body=more, **(PLAIN | fields))


def refuse(client: openai.OpenAI, more: dict[str, Any] | None = None, **fields: Any) -> str:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, more=more, **fields)
    return caught.value.message


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
def test_a_chat_has_as_many_alternatives_as_asked_for(
    client: openai.OpenAI, asked: dict[str, Any], expected: int | None
) -> None:
    logprobs = chat(client, **asked).choices[0].logprobs
    assert (logprobs is None) == (expected is None)
    assert expected is None or {len(one.top_logprobs) for one in logprobs.content} == {expected}


def test_too_many_alternatives_are_refused_also_of_a_stream_and_the_server_goes_on(
    client: openai.OpenAI,
) -> None:
    for stream in (False, True):
        assert "top_logprobs=21" in refuse(client, logprobs=True, top_logprobs=21, stream=stream)
    assert "max_logprobs=20" in refuse(client, {"top_logprobs": -1}, logprobs=True)
    assert "max_logprobs=20" in refuse(client, {"prompt_logprobs": -1})
    assert chat(client).choices[0].message.content is not None


def test_logprobs_of_the_prompt_are_there_when_asked_for(client: openai.OpenAI) -> None:
    assert chat(client).prompt_logprobs is None
    for asked in (0, 1, 2):
        found = chat(client, more={"prompt_logprobs": asked}).prompt_logprobs
        assert found[0] is None
        assert all(max(1, asked) <= len(one) <= asked + 1 for one in found[1:])


def test_turns_follow_each_other_and_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = chat(client, more={"min_tokens": 5})
    choice = whole.choices[0]
    assert (choice.finish_reason, choice.message.role) == ("length", "assistant")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 5
    chunks = list(chat(client, more={"min_tokens": 5}, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert deltas[-1].content
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
        "length"
    ]
    again = [*SUM, choice.message.model_dump(exclude_none=True), {"role": "user", "content": "and as json"}]
    assert chat(client, again).choices[0].message.content is not None


def test_usage_so_far_is_in_each_chunk_only_beside_that_at_the_end(client: openai.OpenAI) -> None:
    def stream(**options: bool) -> list[Any]:
        return list(chat(client, more={"min_tokens": 5}, stream=True, stream_options=options))

    assert {chunk.usage for chunk in stream(include_usage=False, continuous_usage_stats=True)} == {None}
    counts = [
        chunk.usage.completion_tokens for chunk in stream(include_usage=True, continuous_usage_stats=True)
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert "stream_options" in refuse(client, stream_options={"include_usage": True})


@pytest.mark.parametrize("echo", [True, False])
def test_an_answer_that_goes_on_with_the_last_message_begins_with_it_when_echoed(
    client: openai.OpenAI, echo: bool
) -> None:
    saying = "An apple a day, keeps"
    messages = [{"role": "user", "content": "a saying"}, {"role": "assistant", "content": saying}]
    more = {"echo": echo, "continue_final_message": True, "add_generation_prompt": False}
    answer = chat(client, messages, more).choices[0].message
    assert answer.role == "assistant"
    assert answer.content.startswith(saying) == echo


def test_content_in_parts_is_taken_and_a_role_of_ones_own_is_refused(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "what is 1+1?"}]
    answers = [chat(client, [{"role": "user", "content": said}]) for said in (parts, parts[0]["text"])]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="my-custom-role"):
        chat(client, [{"role": "my-custom-role", "content": parts}])


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"seed": 2**63}, ["less_than_equal"]),
        ({"seed": -(2**63) - 1}, ["greater_than_equal"]),
        ({"logit_bias": {str(VOCAB_SIZE + 1): 1.0}}, [str(VOCAB_SIZE + 1), str(VOCAB_SIZE)]),
        ({"logit_bias": {"not_a_token_id": 50}}, ["logit_bias", "not_a_token_id"]),
        ({"logit_bias": {"1": "not_a_number"}}, ["logit_bias", "not_a_number"]),
        ({"logit_bias": {"bad1": 50.0, "bad2": 20.0}}, ["bad1", "bad2"]),
        ({"extra_body": {"stop_token_ids": [VOCAB_SIZE + 1]}}, [str(VOCAB_SIZE + 1), str(VOCAB_SIZE)]),
        ({"extra_body": {"stop_token_ids": [-1]}}, ["stop_token_ids", "-1"]),
        ({"extra_body": {"min_characters": 10}}, ["min_characters", "--unknown-fields ignore"]),
    ],
)
def test_what_cannot_be_is_refused_with_its_value_and_the_bound(
    client: openai.OpenAI, fields: dict[str, Any], texts: list[str]
) -> None:
    message = refuse(client, fields.pop("extra_body", None), **fields)
    assert [text for text in texts if text not in message] == []


def test_the_last_id_of_the_vocabulary_may_be_biased_and_may_stop(client: openai.OpenAI) -> None:
    last = VOCAB_SIZE - 1
    answer = chat(client, more={"stop_token_ids": [last]}, logit_bias={str(last): 1.0})
    assert answer.choices[0].message.content is not None


def test_several_answers_are_numbered_and_differ(client: openai.OpenAI) -> None:
    asked = {"n": 3, "temperature": 1.0, "seed": 42, "max_completion_tokens": 12}
    whole = chat(client, more={"min_tokens": 12}, **asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    streamed = dict.fromkeys(range(3), "")
    for chunk in chat(client, more={"min_tokens": 12}, **asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == texts


def test_ids_of_prompt_and_answer_are_those_of_the_texts(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    more = {"return_token_ids": True}
    messages = [{"role": "user", "content": "Repeat after me: I love cats \N{CAT FACE}"}]
    whole = chat(client, messages, more)
    assert "I love cats \N{CAT FACE}" in tokenizer.decode(whole.prompt_token_ids)
    (choice,) = whole.choices
    assert tokenizer.decode(choice.token_ids, skip_special_tokens=True) == choice.message.content
    first, *others = chat(client, messages, more, stream=True)
    assert first.prompt_token_ids == whole.prompt_token_ids
    assert not any("prompt_token_ids" in chunk.model_dump() for chunk in others)
    assert [one for chunk in others for one in chunk.choices[0].token_ids] == choice.token_ids
    without = chat(client, messages, {"return_token_ids": False})
    assert (without.choices[0].token_ids, without.prompt_token_ids) == (None, None)


def test_logprobs_of_certain_ids_are_told_by_their_ids(client: openai.OpenAI) -> None:
    asked = [100, 1000, 1500]
    more = {"logprob_token_ids": asked, "return_tokens_as_token_ids": True}
    (position, *_) = chat(client, more=more, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [one.token for one in position.top_logprobs] == [f"token_id:{one}" for one in asked]
    assert all(-9999.0 < one.logprob <= 0.0 for one in position.top_logprobs)


@pytest.mark.parametrize("logprobs", [None, False, True])
def test_ids_without_logprobs_and_no_ids_are_refused(client: openai.OpenAI, logprobs: bool | None) -> None:
    message = refuse(client, {"logprob_token_ids": []}, logprobs=logprobs)
    assert "must not be an empty list" in message
    if not logprobs:
        assert "logprob_token_ids" in refuse(client, {"logprob_token_ids": [100]}, logprobs=logprobs)


def test_an_answer_follows_a_choice_a_pattern_or_a_schema(client: openai.OpenAI) -> None:
    choices = ["Python", "Java", "Rust"]
    asked = {"structured_outputs": {"choice": choices}}
    choice = chat(client, more=asked, logprobs=True, top_logprobs=5).choices[0]
    assert choice.message.content in choices
    assert min(top.logprob for one in choice.logprobs.content for top in one.top_logprobs) >= -9999.0
    digits = chat(client, more={"structured_outputs": {"regex": "[0-9]{3}"}}).choices[0].message.content
    assert len(digits) == 3
    assert digits.isdigit()
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    shape = {"type": "json_schema", "json_schema": {"name": "foo_test", "schema": schema}}
    told = chat(client, response_format=shape, max_completion_tokens=40).choices[0].message.content
    assert told.replace(" ", "").replace("\n", "").startswith('{"a":')


def test_an_invocation_is_answered_as_a_chat_is(client: openai.OpenAI, shared_server: Served) -> None:
    answer = shared_server.ask("/invocations", PLAIN | {"messages": SUM, "logprobs": False})
    assert answer.status == 200
    expected = chat(client, logprobs=False).model_dump()
    assert answer.json["choices"][0]["message"]["content"] == expected["choices"][0]["message"]["content"]
    assert {"id", "object", "created", "model", "choices", "usage"} <= answer.json.keys()
