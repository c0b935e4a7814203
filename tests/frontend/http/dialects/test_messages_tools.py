"""Tools and thoughts over /v1/messages: blocks of whole answers and streams, and turns that come back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai_fakes import Answer, AsgiClient, FakeLLM, run_with_app
from quire.frontend.http.serving import Serving
from tool_template import PLAIN_TEMPLATE, TEMPLATE

PATH = "/v1/messages"
TOOL = {
    "name": "weather",
    "description": "Says how warm it is.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
OTHER = {"name": "f", "input_schema": {"type": "object"}}
CALL = ("<tool_call>\n", '{"name": "weather", "argu', 'ments": {"city": ', '"Rome"}}', "\n</tool_call>")
CALL_2 = ("\n<tool_call>\n", '{"name": "f", "arguments": {}}', "\n</tool_call>")
THOUGHTS = ("<think>\n", "Hm", ", so.", "\n</think>\n\n")
WEATHER = ("weather", {"city": "Rome"})


def ask(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "How warm is it?"}]
    return {"model": "fake", "max_tokens": 90, "messages": messages, "tools": [TOOL, OTHER], **fields}


def run(pieces: tuple[str, ...], *bodies: dict[str, Any], ending: str = "stop") -> list[Answer]:
    """The answers of a model that says `pieces`."""
    answers: list[Answer] = []

    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        llm.pieces, llm.ending = pieces, (ending, None)
        for one in bodies:
            answers.append(await client.post(PATH, one))
            assert answers[-1].status == 200, answers[-1].body

    run_with_app(scenario, template=TEMPLATE, max_model_len=2000)
    return answers


def join(answer: Answer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The blocks that a stream adds up to as Anthropic's clients join it, and what ends it."""
    types = pytest.importorskip("anthropic.types", reason="the judge: pip install -e '.[test]'")
    pydantic = pytest.importorskip("pydantic")
    adapter = pydantic.TypeAdapter(types.RawMessageStreamEvent)
    blocks: list[dict[str, Any]] = []
    end: dict[str, Any] = {}
    for event in answer.events:
        if event["type"] != "ping":
            adapter.validate_python(event, strict=True)
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(blocks)
                blocks.append(block | {"json": ""})
            case {"type": "content_block_delta", "index": index, "delta": {"type": kind, **rest}}:
                assert index == len(blocks) - 1
                ((name, value),) = rest.items()
                name = "json" if kind == "input_json_delta" else name
                blocks[-1][name] += value
            case {"type": "message_delta"}:
                end = event
            case _:
                pass
    for block in blocks:
        given = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(given or "{}")
    return blocks, end


def name_blocks(blocks: list[dict[str, Any]]) -> list[Any]:
    """What each block says."""
    return [block.get("text") or block.get("thinking") or (block["name"], block["input"]) for block in blocks]


@pytest.mark.parametrize(
    ("pieces", "blocks", "reason"),
    [
        (("Let me ", "see. ", *CALL), ["Let me see.", WEATHER], "tool_use"),
        ((*CALL, *CALL_2), [WEATHER, ("f", {})], "tool_use"),
        ((*THOUGHTS, *CALL), ["Hm, so.", WEATHER], "tool_use"),
        ((*THOUGHTS, "20 degrees"), ["Hm, so.", "20 degrees"], "end_turn"),
        (("20 ", "degrees"), ["20 degrees"], "end_turn"),
    ],
)
def test_a_stream_adds_up_to_the_blocks_of_the_whole_answer(
    pieces: tuple[str, ...], blocks: list[Any], reason: str
) -> None:
    whole, streamed = run(pieces, ask(), ask(stream=True))
    told = whole.json["content"]
    joined, end = join(streamed)
    assert [str(one).strip() for one in name_blocks(told)] == [str(one) for one in blocks]
    assert name_blocks(joined) == name_blocks(told)
    assert whole.json["stop_reason"] == end["delta"]["stop_reason"] == reason
    thinks = any(block["type"] == "thinking" for block in told)
    assert all(block["signature"] for block in (*told, *joined) if block["type"] == "thinking")
    assert (end["usage"]["output_tokens_details"]["thinking_tokens"] > 0) == thinks


def test_fragments_of_arguments_leave_as_they_are_generated() -> None:
    (streamed,) = run(CALL, ask(stream=True))
    deltas = [event["delta"] for event in streamed.events if event["type"] == "content_block_delta"]
    assert len(deltas) > 1
    assert "".join(delta["partial_json"] for delta in deltas) == '{"city": "Rome"}'


def test_a_call_that_is_cut_off_has_what_it_had_and_one_that_cannot_be_read_is_text_with_a_mark() -> None:
    (cut,) = run(("So. ", *CALL[:3]), ask(), ending="length")
    assert cut.json["stop_reason"] == "max_tokens"
    assert [block["type"] for block in cut.json["content"]] == ["text", "tool_use"]
    broken = ("<tool_call>\n", "not JSON at all", "\n</tool_call>")
    whole, streamed = run(broken, ask(), ask(stream=True))
    assert whole.json["tool_parse_error"]
    assert whole.json["stop_reason"] == "end_turn"
    assert "not JSON at all" in whole.json["content"][0]["text"]
    assert join(streamed)[1]["delta"]["tool_parse_error"]


def test_thoughts_that_are_to_be_omitted_are_counted_and_signed() -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    for answer in run((*THOUGHTS, "20 degrees"), ask(thinking=thinking), ask(thinking=thinking, stream=True)):
        assert b"Hm" not in answer.body
        blocks = join(answer)[0] if answer.body.startswith(b"event") else answer.json["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text"]


def test_blocks_come_back_as_the_model_wrote_them() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        llm.pieces = (*THOUGHTS, "Let me see.", *CALL, *CALL_2)
        answer = (await client.post(PATH, ask())).json
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": f"of {block['name']}"}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        turns = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
        body = ask(messages=[*ask()["messages"], *turns])
        await client.post(PATH, body)
        prompt = llm.tokenizer.decode(llm.calls[-1].prompt, skip_special_tokens=False)
        assert "Says how warm it is." in prompt
        assert "<think>\nHm, so.\n</think>\n\nLet me see." in prompt
        assert '{"name": "weather", "arguments": {"city": "Rome"}}' in prompt
        assert "tool\nof weather<|im_end|>\n<|im_start|>tool\nof f<|im_end|>" in prompt
        del body["max_tokens"]
        counted = await client.post(f"{PATH}/count_tokens", body)
        assert counted.json["input_tokens"] == len(llm.calls[-1].prompt)

    run_with_app(scenario, template=TEMPLATE, max_model_len=2000)


def test_thinking_is_turned_off_in_the_template() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        for kind, ends in (("disabled", True), ("adaptive", False)):
            await client.post(PATH, ask(thinking={"type": kind}))
            prompt = llm.tokenizer.decode(llm.calls[-1].prompt)
            assert prompt.endswith("</think>\n\n") == ends

    run_with_app(scenario, template=TEMPLATE, max_model_len=2000)


def test_a_budget_of_thoughts_is_refused_by_its_name_where_nothing_could_keep_it() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        answer = await client.post(PATH, ask(thinking=thinking, max_tokens=1500))
        assert answer.status == 400
        assert answer.error["message"].startswith("thinking.budget_tokens=1024: ")
        assert not llm.calls

    run_with_app(scenario, template=TEMPLATE, max_model_len=2000)  # whose marker is several tokens


def test_a_bad_schema_of_a_tool_is_refused_by_its_place() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "nothing"}}}
        tools = [TOOL, OTHER | {"input_schema": schema, "strict": True}]
        answer = await client.post(PATH, ask(tools=tools))
        assert answer.status == 400
        assert answer.error["message"].startswith("tools[1].input_schema.properties.a.type='nothing': ")
        assert not llm.calls

    run_with_app(scenario, template=TEMPLATE, max_model_len=2000)


def test_tools_are_refused_where_the_template_shows_none() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        for path in (PATH, f"{PATH}/count_tokens"):
            body = {name: value for name, value in ask().items() if path == PATH or name != "max_tokens"}
            answer = await client.post(path, body)
            assert answer.status == 400
            assert answer.error["type"] == "invalid_request_error"
            assert "tools" in answer.error["message"]
        assert not llm.calls

    run_with_app(scenario, template=PLAIN_TEMPLATE, max_model_len=2000)
