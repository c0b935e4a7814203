"""/v1/completions: completion, prompt validation, echo, token ids, text offsets."""

from __future__ import annotations

import itertools
from typing import Any

import openai
import pytest
from quire.frontend.text.tokenizer import Tokenizer

IDS = [300, 301, 302, 303, 304]
PLAIN: dict[str, Any] = {"model": "pocket", "temperature": 0.0, "max_tokens": 5}
LONG = {"ignore_eos": True}


def complete(client: openai.OpenAI, prompt: Any, more: dict[str, Any] | None = None, **fields: Any) -> Any:
    extra = LONG | (more or {})
    return client.completions.create(prompt=prompt, extra_body=extra, **(PLAIN | fields))


def refuse(client: openai.OpenAI, prompt: Any, more: dict[str, Any] | None = None, **fields: Any) -> str:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, prompt, more, **fields)
    return caught.value.message


def test_a_prompt_of_text_or_of_ids_is_continued_and_counted(
    client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    answer = complete(client, "Hello, my name is", {"cache_salt": "its own"})
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.prompt_logprobs, choice.logprobs) == ("length", None, None)
    num_prompt = len(tokenizer.encode("Hello, my name is"))
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        num_prompt,
        5,
        num_prompt + 5,
    )
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert complete(client, IDS).choices[0].text


@pytest.mark.parametrize(("side", "kept"), [("right", IDS[:3]), ("left", IDS[2:])])
def test_a_prompt_is_cut_at_the_side_that_is_asked_for(
    client: openai.OpenAI, side: str, kept: list[int]
) -> None:
    more = {"return_token_ids": True, "truncate_prompt_tokens": 3, "truncation_side": side}
    assert complete(client, IDS, more).choices[0].prompt_token_ids == kept


@pytest.mark.parametrize(("asked", "fewest", "most"), [(0, 1, 1), (5, 5, 6), (20, 20, 21)])
def test_each_token_has_as_many_alternatives_as_asked_for_and_itself(
    client: openai.OpenAI, asked: int, fewest: int, most: int
) -> None:
    logprobs = complete(client, IDS, logprobs=asked).choices[0].logprobs
    for token, own, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert fewest <= len(top) <= most
        assert top[token] == own


def test_too_many_alternatives_are_refused_also_of_a_stream_and_the_server_goes_on(
    client: openai.OpenAI,
) -> None:
    assert "max_logprobs=20" in refuse(client, IDS, logprobs=21)
    assert "max_logprobs=20" in refuse(client, IDS, logprobs=30, stream=True)
    assert "max_logprobs=20" in refuse(client, IDS, {"prompt_logprobs": -1})
    assert complete(client, IDS).choices


def test_ids_without_logprobs_and_no_ids_are_refused(client: openai.OpenAI) -> None:
    for more in ({"logprob_token_ids": []}, {"logprob_token_ids": [100]}):
        assert "logprob_token_ids" in refuse(client, IDS, more)
    assert "must not be an empty list" in refuse(client, IDS, {"logprob_token_ids": []}, logprobs=1)


def test_logprobs_of_prompts_are_there_for_each_prompt_that_asks(client: openai.OpenAI) -> None:
    prompts = ["A robot may not injure another robot", "My name is"]
    for asked in (0, 1):
        answer = complete(client, prompts, {"prompt_logprobs": asked})
        assert all(len(choice.prompt_logprobs) > 2 for choice in answer.choices)
        assert answer.choices[0].prompt_logprobs[0] is None


@pytest.mark.parametrize("options", [None, {"include_usage": True, "continuous_usage_stats": True}])
def test_a_stream_says_what_the_whole_answer_says_and_ends_once(
    client: openai.OpenAI, options: dict[str, bool] | None
) -> None:
    whole = complete(client, "What is an LLM?")
    chunks = list(complete(client, "What is an LLM?", stream=True, stream_options=options))
    if options is not None:
        last = chunks.pop()
        assert (last.choices, last.usage) == ([], whole.usage)
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(set(counts))
    assert [chunk.choices[0].finish_reason for chunk in chunks].count(None) == len(chunks) - 1
    assert chunks[-1].choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": None}])
def test_options_of_a_stream_are_refused_without_one(client: openai.OpenAI, options: Any) -> None:
    assert "stream_options" in refuse(client, IDS, stream_options=options)


def test_several_answers_to_a_prompt_differ_and_are_numbered_whole_and_streamed(
    client: openai.OpenAI,
) -> None:
    asked = {"n": 3, "temperature": 1.0, "seed": 42, "max_tokens": 12}
    whole = complete(client, "What is an LLM?", **asked, logprobs=0)
    texts = [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    streamed = dict.fromkeys(range(3), "")
    for chunk in complete(client, "What is an LLM?", **asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == texts


@pytest.mark.parametrize("prompts", [["Hello, my name is"] * 2, [IDS] * 2], ids=["text", "ids"])
def test_equal_prompts_of_a_request_have_equal_answers_by_beam_search_too(
    client: openai.OpenAI, prompts: Any
) -> None:
    first, second = complete(client, prompts).choices
    assert first.text == second.text
    beams = [choice.text for choice in complete(client, prompts, {"use_beam_search": True}, n=2).choices]
    assert beams[:2] == beams[2:]
    assert beams[0] != beams[1]
    texts = ["", ""]
    for chunk in complete(client, prompts, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
    assert texts == [first.text, first.text]


@pytest.mark.parametrize("asked", [0, 1])
@pytest.mark.parametrize("prompt", ["Hello, my name is", IDS], ids=["text", "ids"])
def test_an_echo_has_the_prompts_text_and_logprobs_before_the_answers(
    client: openai.OpenAI, tokenizer: Tokenizer, prompt: Any, asked: int
) -> None:
    choice = complete(client, prompt, echo=True, logprobs=asked).choices[0]
    text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
    assert choice.text.startswith(text)
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    assert {len(one) for one in (logprobs.tokens, logprobs.text_offset, logprobs.top_logprobs)} == {
        len(logprobs.token_logprobs)
    }
    for top in logprobs.top_logprobs[1:]:
        assert max(asked, 1) <= len(top) <= asked + 1


def test_offsets_of_a_stream_that_holds_text_back_are_those_of_the_whole_answer(
    client: openai.OpenAI,
) -> None:
    asked = {"logprobs": 0, "stop": ["never to be found"], "max_tokens": 8}
    whole = complete(client, "Once upon a time", **asked).choices[0].logprobs
    chunks = list(complete(client, "Once upon a time", **asked, stream=True))
    told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    offsets = [offset for one in told for offset in one.text_offset]
    assert offsets == whole.text_offset == [0, *itertools.accumulate(map(len, whole.tokens[:-1]))]
    assert [token for one in told for token in one.tokens] == whole.tokens


def test_ids_stand_for_texts_of_tokens_and_prompts_where_they_are_asked_for(
    client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    prompt = "Hello, world! How are you today?"
    more = {"return_token_ids": True, "return_tokens_as_token_ids": True, "prompt_logprobs": 1}
    choice = complete(client, prompt, more, echo=True, logprobs=1).choices[0]
    shown = [int(token.removeprefix("token_id:")) for token in choice.logprobs.tokens]
    assert choice.prompt_token_ids == tokenizer.encode(prompt)
    assert shown == choice.prompt_token_ids + choice.token_ids
    assert choice.text == prompt + tokenizer.decode(choice.token_ids)
    del more["prompt_logprobs"]
    chunks = [chunk.choices[0] for chunk in complete(client, prompt, more, logprobs=1, stream=True)]
    assert chunks[0].prompt_token_ids == choice.prompt_token_ids
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])
    tokens = [token for chunk in chunks for token in chunk.logprobs.tokens]
    assert tokens == [f"token_id:{one}" for chunk in chunks for one in chunk.token_ids]
    assert [one for chunk in chunks for one in chunk.token_ids] == choice.token_ids
    without = complete(client, prompt, {"return_token_ids": False}).choices[0]
    assert (without.token_ids, without.prompt_token_ids) == (None, None)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (None, "Either prompt or prompt_embeds must be provided and non-empty."),
        ([999999], "out of vocabulary"),
        ([[-1]], "greater than or equal to 0"),
        ([-1], "out of vocabulary"),
        ([], "prompt=[]"),
        ("a " * 9000, "maximum context length is 2048 tokens"),
    ],
    ids=["none", "unknown", "negative in a list", "negative", "empty", "long"],
)
def test_a_prompt_that_cannot_be_is_refused_in_words_that_clients_know(
    client: openai.OpenAI, prompt: Any, text: str
) -> None:
    assert text in refuse(client, prompt, {"prompt_embeds": []})


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"type": "object", "properties": {"foo": "bar"}}},
        {"regex": "[.*"},
        {"grammar": "root ::= undefined_rule and_more"},
        {"regex": {"1": "Python"}},
    ],
    ids=["schema", "regex", "grammar", "type"],
)
def test_what_no_answer_can_follow_is_refused(client: openai.OpenAI, asked: Any) -> None:
    assert "structured_outputs" in refuse(client, "x", {"structured_outputs": asked})
