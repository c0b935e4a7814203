"""/v1/messages over a scripted engine: answers, streams and counts, judged by Anthropic's own types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai_fakes import Answer, AsgiClient, FakeLLM, run_with_app
from quire.frontend.http.bodies.messages import MessageParam, MessagesRequest
from quire.frontend.http.caller import Caller
from quire.frontend.http.dialects.messages import create_message
from quire.frontend.http.serving import Serving
from quire.frontend.http.stream import EventStream
from quire.frontend.http.text_process.jobs import TokenizeJob
from quire.ipc.errors import RequestFailedError

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **fields}


def judge(value: Any, name: str) -> Any:
    """The value as a type of Anthropic's client, which takes nothing that is not in its form."""
    types = pytest.importorskip("anthropic.types", reason="the judge: pip install -e '.[test]'")
    pydantic = pytest.importorskip("pydantic")
    return pydantic.TypeAdapter(getattr(types, name)).validate_python(value, strict=True)


def list_events(answer: Answer) -> list[dict[str, Any]]:
    """The data of a stream's events, each of which has its data's name."""
    events = answer.events
    names = [line[7:] for line in answer.body.decode().split("\n") if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    return events


def test_a_message_is_answered_in_anthropics_form() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(PATH, ask(system="Be good."))
        assert answer.status == 200
        body = answer.json
        num_prompt = len(llm.calls[0].prompt)
        assert body == {
            "id": answer.headers["request-id"],
            "type": "message",
            "role": "assistant",
            "model": "fake",
            "content": [{"type": "text", "text": "Hello there!", "citations": None}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": num_prompt - 3,
                "cache_read_input_tokens": 3,
                "cache_creation_input_tokens": 0,
                "output_tokens": 3,
                "output_tokens_details": {"thinking_tokens": 0},
            },
        }
        assert body["id"].startswith("msg_")
        assert llm.calls[0].params.max_tokens == 9
        judge(body, "Message")

    run_with_app(scenario)


def test_a_stream_has_anthropics_events_and_says_what_the_whole_answer_does() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        whole = (await client.post(PATH, ask())).json
        answer = await client.post(PATH, ask(stream=True))
        assert answer.headers["content-type"].startswith("text/event-stream")
        start, ping, *blocks, end, stop = list_events(answer)
        assert (start["type"], ping, stop) == ("message_start", {"type": "ping"}, {"type": "message_stop"})
        assert start["message"]["content"] == []
        assert start["message"]["stop_reason"] is None
        assert start["message"]["id"] == answer.headers["request-id"]
        assert [block["type"].removeprefix("content_block_") for block in blocks] == [
            "start",
            *["delta"] * 3,
            "stop",
        ]
        text = "".join(block["delta"]["text"] for block in blocks[1:-1])
        assert [text] == [block["text"] for block in whole["content"]]
        assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert end["usage"] == whole["usage"]
        for event in (start, *blocks, end, stop):
            judge(event, "RawMessageStreamEvent")

    run_with_app(scenario)


def test_sampling_fields_reach_the_engine_under_its_names() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        fields: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "priority": 2}
        await client.post(f"{PATH}", ask(stop_sequences=["END"], cache_salt="x", **fields))
        call = llm.calls[0]
        asked = call.params
        assert (asked.stop, asked.temperature, asked.top_p, asked.top_k) == (["END"], 0.5, 0.9, 7)
        assert (asked.seed, call.options.priority, call.options.cache_salt) == (3, 2, "x")

    run_with_app(scenario)


def test_a_turn_at_the_end_is_continued() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        messages = [*ask()["messages"], {"role": "assistant", "content": "The answer is ("}]
        await client.post(PATH, ask(messages=messages))
        prompt = llm.tokenizer.decode(llm.calls[0].prompt)
        assert prompt.endswith("The answer is (")

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("finish_reason", "stop", "told"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 7, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
        ("repetition", None, ("end_turn", None)),
        ("abort", None, ("pause_turn", None)),
    ],
)
def test_every_end_has_a_reason_that_anthropics_clients_know(
    finish_reason: str, stop: Any, told: tuple[str, Any]
) -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        llm.ending = (finish_reason, stop)
        whole = (await client.post(PATH, ask())).json
        assert (whole["stop_reason"], whole["stop_sequence"]) == told
        judge(whole, "Message")
        *_, end, _ = (await client.post(PATH, ask(stream=True))).events
        assert (end["delta"]["stop_reason"], end["delta"]["stop_sequence"]) == told

    run_with_app(scenario)


def test_tokens_are_counted_as_the_message_has_them() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, serving: Serving) -> None:
        fields = ask(system="Be good.")
        await client.post(PATH, fields)
        del fields["max_tokens"]
        answer = await client.post(COUNT, fields | {"thinking": {"type": "adaptive"}})
        assert answer.json == {"input_tokens": len(llm.calls[0].prompt)}
        judge(answer.json, "MessageTokensCount")
        long = [{"role": "user", "content": "word " * 1000}]
        assert (await client.post(COUNT, fields | {"messages": long})).json["input_tokens"] > 1000
        assert len(llm.calls) == 1
        jobs: list[Any] = serving.text.jobs  # type: ignore[attr-defined]
        assert isinstance(jobs[-1][0], TokenizeJob)
        assert jobs[-1][0].only_counts  # as many ids as there may be stay where they were made

    run_with_app(scenario)


REFUSED: list[tuple[str, dict[str, Any] | bytes, int, str]] = [
    (PATH, b"{", 400, "JSON"),
    (PATH, {"model": "fake", "messages": ask()["messages"]}, 400, "max_tokens: required"),
    (PATH, ask(model="claude"), 404, "model='claude'"),
    (COUNT, {"model": "claude", "messages": ask()["messages"]}, 404, "model='claude'"),
    (COUNT, ask(), 400, "max_tokens=9: no such field"),
    (PATH, ask(stop_sequences=[""]), 400, "stop_sequences"),
    (PATH, ask(messages=[{"role": "user", "content": "word " * 1000}]), 400, "max_model_len"),
    (PATH, ask(tools=[{"name": "no name", "input_schema": {}}]), 400, "tools[0].name"),
    (PATH, ask(tools=[{"name": "f", "input_schema": {"type": "array"}}]), 400, "tools[0].input_schema.type"),
    (PATH, ask(tool_choice={"type": "tool", "name": "f"}), 400, "tool_choice='f'"),
    (PATH, ask(max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 2000}), 400, "less than"),
    (PATH, ask(output_config={"format": {"type": "json_schema", "schema": {"type": 1}}}), 400, "schema.type"),
]


@pytest.mark.parametrize(("path", "body", "status", "said"), REFUSED)
def test_what_is_refused_is_told_in_anthropics_form(path: str, body: Any, status: int, said: str) -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(path, body)
        assert answer.status == status
        assert said in answer.error["message"]
        kind = "not_found_error" if status == 404 else "invalid_request_error"
        assert answer.json == {
            "type": "error",
            "error": {"type": kind, "message": answer.error["message"]},
            "request_id": answer.headers["request-id"],
        }
        assert not llm.calls

    run_with_app(scenario)


def test_what_goes_wrong_in_a_stream_is_an_event_of_its_own() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        llm.error, llm.error_after = RequestFailedError("it broke", "poison_request"), 2
        answer = await client.post(PATH, ask(stream=True))
        *_, last = list_events(answer)
        assert last == {
            "type": "error",
            "error": {"type": "api_error", "message": "it broke"},
            "request_id": answer.headers["request-id"],
        }
        llm.error_after = 0
        answer = await client.post(PATH, ask(stream=True))
        assert (answer.status, answer.error["type"]) == (500, "api_error")

    run_with_app(scenario)


def test_a_stream_holds_nothing_large_of_its_request() -> None:
    async def scenario(_llm: FakeLLM, _client: AsgiClient, serving: Serving) -> None:
        asked = MessagesRequest(
            model="fake",
            max_tokens=9,
            messages=[MessageParam("user", "Hi")],
            stream=True,
            metadata={"user_id": "x" * 100_000},
        )
        response = await create_message(serving, asked, Caller())
        assert isinstance(response, EventStream)
        await anext(response._events)
        assert not any((asked.messages, asked.metadata))
        assert [data async for data in response._events]

    run_with_app(scenario)


def test_the_document_describes_bodies_events_and_errors() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        document = (await client.get("/openapi.json")).json
        told = document["paths"][PATH]["post"]
        assert "MessagesErrorResponse" in json.dumps(told["responses"]["400"])
        events = told["responses"]["200"]["content"]["text/event-stream"]["schema"]["description"]
        assert "MessageStart, Ping, ContentBlockStart" in events
        assert {"MessagesRequest", "CountTokensRequest", "ContentBlockDelta"} <= set(
            document["components"]["schemas"]
        )

    run_with_app(scenario)
