"""echo: the prompt in front of what was generated, whole and streamed, with logprobs and n."""

from __future__ import annotations

from typing import Any

import pytest
from openai_fakes import Answer, AsgiClient, FakeLLM, run_with_app
from quire.frontend.http.serving import Serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [7, 8, 9]


def join(answer: Answer) -> list[dict[str, Any]]:
    """The choices of a stream's chunks, as a whole answer has them."""
    choices: dict[int, dict[str, Any]] = {}
    for event in answer.events[:-1]:
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], choice)
            if whole is choice:
                continue
            whole["text"] += choice["text"]
            whole["token_ids"] += choice["token_ids"]
            whole["finish_reason"] = choice["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                whole["logprobs"][name] += values
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize(
    "asked", [{"logprobs": 1}, {"logprob_token_ids": [8]}, {"logprobs": 1, "n": 2}], ids=str
)
@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, [5, 6, 7, 8]]], ids=["one", "two"])
def test_every_choice_begins_with_the_prompt_and_its_logprobs(asked: Any, prompt: Any) -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        llm.pieces = ("one piece",)
        body = {"prompt": prompt, "echo": True, "prompt_logprobs": 0, "return_token_ids": True} | asked
        whole = (await client.post(COMPLETIONS, body)).json["choices"]
        streamed = join(await client.post(COMPLETIONS, body | {"stream": True}))
        assert streamed == whole
        prompts = [prompt] if prompt is PROMPT else prompt
        assert len(whole) == len(prompts) * asked.get("n", 1)
        for choice in whole:
            ids = prompts[choice["index"] // asked.get("n", 1)]
            text = llm.tokenizer.decode(ids, skip_special_tokens=False)
            assert choice["text"] == text + "one piece"
            assert len(choice["logprobs"]["tokens"]) == len(ids) + 1
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"]) == len(ids)
        expected = 0 if "logprob_token_ids" in asked else 1
        assert {call.params.logprobs for call in llm.calls} == {expected}

    run_with_app(scenario)


def test_a_prompt_is_scored_without_anything_generated() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}
        answer = await client.post(COMPLETIONS, body)
        (choice,) = answer.json["choices"]
        # The engine's one token ended with "stop", which nobody asked about.
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        assert choice["text"] == llm.tokenizer.decode(PROMPT, skip_special_tokens=False)
        assert {len(values) for values in choice["logprobs"].values()} == {len(PROMPT)}
        assert answer.json["usage"]["completion_tokens"] == 0

    run_with_app(scenario)


def test_the_echo_of_a_prompt_that_was_cut_is_what_was_left_of_it() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        text = "Once upon a time " * 500  # more than fits, and more than is tokenized in the event loop
        ids = llm.tokenizer.encode(text)
        for prompt in (text, ids, [ids, ids]):
            body = {"prompt": prompt, "echo": True, "max_tokens": 4, "truncate_prompt_tokens": 3}
            answer = await client.post(COMPLETIONS, body)
            begins = llm.tokenizer.decode(ids[-3:])
            assert {one["text"] for one in answer.json["choices"]} == {f"{begins}Hello there!"}
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "truncate_prompt_tokens": -1, "max_tokens": 8}
        assert (await client.post(CHAT, body)).status == 200
        response = {"input": text, "truncation": "auto", "max_output_tokens": 8}
        answer = await client.post("/v1/responses", response)
        assert answer.json["truncation"] == "auto"
        lengths = [len(call.prompt) for call in llm.calls]
        assert lengths == [3, 3, 3, 3, 120, 120]  # of 128
        refused = await client.post(CHAT, body | {"echo": True})
        assert refused.error["message"] == "echo=True: false with truncate_prompt_tokens"
        refused = await client.post(COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 128})
        assert refused.error["param"] == "truncate_prompt_tokens"

    run_with_app(scenario)


def test_an_answer_that_goes_on_with_the_assistants_message_begins_with_it() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        parts = [{"type": "text", "text": "Well, "}, {"type": "text", "text": "h"}]
        question = {"role": "user", "content": "Say hello"}
        for content, begins in (("Well, ", "Well, "), (parts, "Well, h"), (None, "")):
            said = {"role": "assistant", "content": content} if content else question
            body = {"messages": [question, said], "echo": True, "continue_final_message": bool(content)}
            whole = await client.post(CHAT, body | {"n": 2})
            texts = [choice["message"]["content"] for choice in whole.json["choices"]]
            assert texts == [f"{begins}Hello there!"] * 2
            streamed = await client.post(CHAT, body | {"stream": True})
            deltas = [choice["delta"] for event in streamed.events[:-1] for choice in event["choices"]]
            assert "".join(delta.get("content", "") for delta in deltas) == f"{begins}Hello there!"

    run_with_app(scenario)
