"""/v1/responses where everything is in the request: items, sampling, events."""

from __future__ import annotations

from typing import Any

import openai
import pytest

PLAIN: dict[str, Any] = {"model": "pocket", "temperature": 0.0, "max_output_tokens": 8, "store": False}


def respond(client: openai.OpenAI, given: Any = "Say hello.", **fields: Any) -> Any:
    return client.responses.create(input=given, **(PLAIN | fields))


def say(role: str, text: str, **more: Any) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]} | more


def test_an_answer_is_complete_or_says_what_it_lacks(client: openai.OpenAI) -> None:
    whole = respond(client, "What is 12 plus 30?", max_output_tokens=40, reasoning={"effort": "none"})
    assert (whole.status, whole.incomplete_details) == ("completed", None)
    assert "42" in whole.output_text
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    cut = respond(client, max_output_tokens=2, extra_body={"ignore_eos": True})
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_raw_messages_are_the_prompts_and_the_answers_tokens(client: openai.OpenAI, stream: bool) -> None:
    more = {"enable_response_messages": True, "min_tokens": 4}
    answer = respond(client, "Hello?", stream=stream, extra_body=more)
    if stream:
        answer = list(answer)[-1].response
    ((told,), (said,)) = answer.input_messages, answer.output_messages
    assert told["type"] == said["type"] == "raw_message_tokens"
    assert "Hello?" in told["message"]
    assert (len(told["tokens"]), len(said["tokens"])) == (
        answer.usage.input_tokens,
        answer.usage.output_tokens,
    )
    assert answer.output_text in said["message"]
    assert "input_messages" not in respond(client, "Hello?").model_dump()


@pytest.mark.parametrize("more", [{}, {"id": "msg_1", "status": "completed"}], ids=["bare", "with ids"])
def test_past_turns_are_taken_with_and_without_their_ids(client: openai.OpenAI, more: dict[str, Any]) -> None:
    thoughts = {"type": "reasoning", "summary": [], "encrypted_content": None} | more
    items = [
        say("user", "Be brief."),
        say("assistant", "Acknowledged.", **more),
        thoughts,
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a greeting"}], "summary": []},
        say("user", "Reply with one short sentence."),
    ]
    assert respond(client, items).output_text is not None


def test_sampling_fields_of_the_other_routes_are_taken(client: openai.OpenAI) -> None:
    extra = {"top_k": 40, "repetition_penalty": 1.2, "seed": 42, "min_tokens": 4}
    answers = [respond(client, temperature=0.7, top_p=0.9, extra_body=extra) for _ in range(2)]
    assert answers[0].output[0].content[0].text
    assert answers[0].output_text == answers[1].output_text
    for seed, text in ((2**63, "less_than_equal"), (-(2**63) - 1, "greater_than_equal")):
        with pytest.raises(openai.BadRequestError, match=text):
            respond(client, extra_body={"seed": seed})


def test_events_are_nested_and_their_text_is_that_of_the_answer(client: openai.OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    events = list(respond(client, stream=True, top_logprobs=3, include=include, extra_body={"min_tokens": 3}))
    opened: list[str] = []
    ends = {"created": "completed", "output_item.added": "output_item.done"}
    ends |= {"content_part.added": "content_part.done", "output_text.delta": "output_text.done"}
    for event in events:
        kind = event.type.removeprefix("response.").replace("incomplete", "completed")
        if kind in ends and (kind != "output_text.delta" or opened[-1] != "output_text.done"):
            opened.append(ends[kind])
        elif kind in ends.values():
            assert opened.pop() == kind
    assert opened == []
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == events[-1].response.output_text
    tops = [one for event in deltas for one in event.logprobs]
    assert {len(one.top_logprobs) for one in tops} == {3}
    assert all(one.logprob <= 0.0 for one in tops)
