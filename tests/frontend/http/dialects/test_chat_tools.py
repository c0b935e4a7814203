"""Tools and thoughts in chats: what is offered, refused, parsed and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai_fakes import CHAT, Answer, AsgiClient, FakeLLM, run_with_app
from quire.frontend.http.serving import Serving
from tool_template import PLAIN_TEMPLATE, TEMPLATE

USER = {"role": "user", "content": "How warm is it?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = ("<tool_call>\n", '{"name": "weather", "argu', 'ments": {"city": ', '"Rome"}}', "\n</tool_call>")
CALL_2 = ("\n<tool_call>\n", '{"name": "f", "arguments": {}}', "\n</tool_call>")
THOUGHTS = ("<think>\n", "Hm", ", so.", "\n</think>\n\n")


def tool(name: str = "weather", **fields: Any) -> dict[str, Any]:
    function = {"name": name, "description": "What it does.", "parameters": SCHEMA} | fields
    return {"type": "function", "function": function}


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "tools": [tool(), tool("f", parameters=None)]} | fields


def run(pieces: tuple[str, ...], *bodies: dict[str, Any], template: str = TEMPLATE) -> list[Answer]:
    """The answers of a model that says `pieces`."""
    answers: list[Answer] = []

    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        llm.pieces = pieces
        for one in bodies:
            answers.append(await client.post(CHAT, one))
            assert answers[-1].status == 200, answers[-1].body

    run_with_app(scenario, template=template, max_model_len=2000)
    return answers


def join(answer: Answer) -> dict[str, Any]:
    """The message that a stream adds up to, as OpenAI's clients join it, and how it ended."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    last: dict[str, Any] = {}
    for event in answer.events[:-1]:
        for choice in event["choices"]:
            last = choice
            for name, value in choice["delta"].items():
                if name != "tool_calls":
                    message[name] = message.get(name, "") + value
                    continue
                (call,) = value
                if call["index"] == len(calls):
                    assert call["type"] == "function"
                    assert call["function"]["arguments"] == ""
                    calls.append(call)
                else:
                    assert call["index"] == len(calls) - 1
                    assert set(call) == {"index", "function"}
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return message | {"tool_calls": calls, "finish_reason": last["finish_reason"]}


@pytest.mark.parametrize(
    ("pieces", "content", "reasoning", "names", "reason"),
    [
        (("Let me ", "see. ", *CALL), "Let me see.", None, ["weather"], "tool_calls"),
        ((*CALL, *CALL_2), None, None, ["weather", "f"], "tool_calls"),
        ((*THOUGHTS, *CALL), None, "Hm, so.", ["weather"], "tool_calls"),
        ((*THOUGHTS, "20 degrees"), "20 degrees", "Hm, so.", [], "stop"),
        (("20 ", "degrees"), "20 degrees", None, [], "stop"),
    ],
)
def test_a_stream_adds_up_to_the_whole_answer(
    pieces: tuple[str, ...], content: str | None, reasoning: str | None, names: list[str], reason: str
):
    whole, streamed = run(pieces, body(), body(stream=True))
    (choice,) = whole.json["choices"]
    message, joined = choice["message"], join(streamed)
    assert (message["content"], message.get("reasoning")) == (content, reasoning)
    assert message.get("reasoning_content") == reasoning
    assert [call["function"]["name"] for call in message.get("tool_calls", [])] == names
    assert choice["finish_reason"] == joined["finish_reason"] == reason
    assert (joined["content"] or None, joined.get("reasoning")) == (content, reasoning)
    assert joined.get("reasoning_content") == reasoning
    told = [(call["type"], call["function"]) for call in message.get("tool_calls", [])]
    assert [(call["type"], call["function"]) for call in joined["tool_calls"]] == told
    for call in message.get("tool_calls", []):
        assert call["id"].startswith("call_")
        json.loads(call["function"]["arguments"])
    assert "tool_parse_error" not in choice


def test_a_turn_whose_only_call_is_cut_off_does_not_end_for_its_calls():
    pieces = ("<tool_call>\n", '{"name": "weather", "arguments": {"city"')
    whole, streamed = run(pieces, body(), body(stream=True))
    (choice,), joined = whole.json["choices"], join(streamed)
    assert choice["finish_reason"] == joined["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city"'


def test_each_of_several_answers_has_its_own_calls():
    whole, streamed = run(CALL, body(n=2), body(n=2, stream=True))
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in whole.json["choices"]]
    assert len(set(ids)) == 2
    begun = [
        choice["index"]
        for event in streamed.events[:-1]
        for choice in event["choices"]
        if "id" in choice["delta"].get("tool_calls", [{}])[0]
    ]
    assert begun == [0, 1]


def test_thoughts_are_counted_also_when_they_are_not_shown():
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    bodies = [body(), body(include_reasoning=False), body(include_reasoning=False, **fields)]
    answers: list[Answer] = []
    counted: list[int] = []

    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        llm.pieces = (*THOUGHTS, "20")
        answers.extend([await client.post(CHAT, one) for one in bodies])
        counted.extend(one.num_reasoning_tokens for one in llm.counts)

    run_with_app(scenario, template=TEMPLATE, max_model_len=2000)
    shown, hidden, streamed = answers
    assert "reasoning" in shown.json["choices"][0]["message"]
    assert set(hidden.json["choices"][0]["message"]) == {"role", "content", "refusal"}
    assert set(join(streamed)) == {"role", "content", "tool_calls", "finish_reason"}
    counts = streamed.events[-2]["usage"]["completion_tokens_details"]
    assert counts["reasoning_tokens"] == 3  # of THOUGHTS; what ends them counts as text
    assert counted[-1] == counts["reasoning_tokens"]


def test_thoughts_that_the_prompt_has_opened_are_thoughts_of_every_answer():
    begun = {"role": "assistant", "content": "<think>\nLet me"}
    fields = {"messages": [USER, begun], "continue_final_message": True, "n": 2}
    (answer,) = run((" see", "\n</think>\n\n", "20"), fields)
    messages = [choice["message"] for choice in answer.json["choices"]]
    assert [(one["reasoning"], one["content"]) for one in messages] == [("see", "20")] * 2


def test_a_call_that_cannot_be_read_stays_content_and_is_marked_and_counted():
    broken = ("<tool_call>\n", '{"name": "weather", "arguments": oops}', "\n</tool_call>")
    counted: list[int] = []

    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        llm.pieces = broken
        whole = await client.post(CHAT, body())
        (choice,) = whole.json["choices"]
        assert choice["message"]["content"] == "".join(broken)
        assert (choice["finish_reason"], choice["tool_parse_error"]) == ("stop", True)
        streamed = await client.post(CHAT, body(stream=True))
        assert join(streamed)["content"] == "".join(broken)
        assert streamed.events[-2]["choices"][0]["tool_parse_error"] is True
        counted.extend(one.num_tool_parse_errors for one in llm.counts)

    run_with_app(scenario, template=TEMPLATE, max_model_len=2000)
    assert counted == [1, 1]


def test_no_call_is_looked_for_with_tool_choice_none_and_a_grammar_keeps_it_out():
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        llm.pieces = CALL
        answer = await client.post(CHAT, body(tool_choice="none"))
        assert answer.json["choices"][0]["message"]["content"] == "".join(CALL)
        await client.post(CHAT, body(tool_choice="none", tools=[]))
        await client.post(CHAT, body(tool_choice="auto"))
        none, without, auto = llm.calls
        assert none.grammar != ""
        assert none.prompt == auto.prompt  # and so is its cache
        assert without.grammar == ""

    run_with_app(scenario, template=TEMPLATE, max_model_len=2000)


def test_markers_may_be_special_tokens_only_where_they_are_parsed():
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        await client.post(CHAT, body())
        await client.post(CHAT, {"messages": [USER]})
        assert [call.params.skip_special_tokens for call in llm.calls] == [False, False]

    run_with_app(scenario, template=TEMPLATE, max_model_len=2000)

    async def plain(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        await client.post(CHAT, {"messages": [USER]})
        assert llm.calls[0].params.skip_special_tokens

    run_with_app(plain, template=PLAIN_TEMPLATE)


def test_logprobs_stay_those_of_every_token():
    whole, streamed = run(CALL, body(logprobs=True), body(logprobs=True, stream=True))
    assert len(whole.json["choices"][0]["logprobs"]["content"]) == 1  # of the fake's one token
    texts = [
        entry["token"]
        for event in streamed.events[:-1]
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert texts == list(CALL)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [tool("")]}, "tools[0].function.name", "1 to 128"),
    ({"tools": [tool("a b")]}, "tools[0].function.name", "'a b'"),
    ({"tools": [tool("x" * 129)]}, "tools[0].function.name", "1 to 128"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name", "tools[0].function.name is the same"),
    ({"tools": [tool(f"f{n}") for n in range(257)]}, "tools", "at most 256"),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type", "'function'"),
    ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters.type", "'object'"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "object"),
    (
        {"tools": [tool(), tool("f", parameters={"properties": {"a": {"type": "strin"}}})]},
        "tools[1].function.parameters.properties.a.type",
        "one of null, boolean",
    ),
    (
        {"tools": [tool(parameters={"anyOf": [{"not": {"required": "a"}}]})], "tool_choice": "none"},
        "tools[0].function.parameters.anyOf[0].not.required",
        "a list of names",
    ),
    ({"tool_choice": named("wether")}, "tool_choice", "did you mean 'weather'"),
    ({"tool_choice": "some"}, "tool_choice", "'required'"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "name"),
    ({"tool_choice": {**named("weather"), "strict": True}}, "tool_choice.strict", "one of type, function"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "weather", "nam": 1}}},
        "tool_choice.function.nam",
        "one of name",
    ),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice", "mode"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "'none' or 'auto' without tools"),
    ({"tools": None, "tool_choice": named("f")}, "tool_choice", "there are none"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
    ({"echo": True}, "echo", "false with tools"),
    ({"use_beam_search": True}, "use_beam_search", "false with tools"),
    ({"reasoning_effort": "lots"}, "reasoning_effort", "'minimal'"),
    (
        {"messages": [USER, {"role": "tool", "tool_call_id": "call_1", "content": "20"}]},
        "messages[1].role",
        "after a message with tool_calls",
    ),
    (
        {
            "messages": [{"role": "assistant", "tool_calls": [{**named("f"), "id": "a", "type": "function"}]}]
            * 5000
        },
        "messages",
        "max_messages",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [named("f")] * 5000}]},
        "messages.tool_calls",
        "at most",
    ),
]


@pytest.mark.parametrize(("fields", "param", "text"), BAD, ids=[f"{param}-{text}" for _, param, text in BAD])
def test_what_is_wrong_with_tools_is_refused_with_its_field_and_what_is_allowed(
    fields: dict[str, Any], param: str, text: str
):
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(CHAT, body(**fields))
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
        assert text in answer.error["message"]
        assert not llm.calls

    run_with_app(scenario, template=TEMPLATE, max_model_len=2000)


@pytest.mark.parametrize(
    ("template", "fields", "param", "text"),
    [
        (PLAIN_TEMPLATE, body(), "tools", "this model's chat template shows none"),
        ("{{ tools }}" + PLAIN_TEMPLATE, body(), "tools", "how this model writes calls is not known"),
        (PLAIN_TEMPLATE, {"messages": [USER], "reasoning_effort": "high"}, "reasoning_effort", "not think"),
        (
            PLAIN_TEMPLATE,
            {"messages": [USER], "thinking_token_budget": 9},
            "thinking_token_budget",
            "not think",
        ),
    ],
)
def test_a_model_that_cannot_do_it_says_so(template: str, fields: dict[str, Any], param: str, text: str):
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(CHAT, fields)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
        assert text in answer.error["message"]
        assert not llm.calls

    run_with_app(scenario, template=template, max_model_len=2000)


def test_the_prompt_shows_tools_past_calls_and_thoughts():
    messages = [
        USER,
        {"role": "assistant", "content": None, "reasoning": "Hm.", "parsed": None,
         "provider_specific_fields": {"refusal": None}, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "20"}]},
    ]  # fmt: skip

    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        fields = body(messages=messages, chat_template_kwargs={"enable_thinking": False})
        assert (await client.post(CHAT, fields)).status == 200
        ids = llm.calls[0].prompt
        text = llm.tokenizer.decode(ids)
        assert '"name": "weather"' in text
        assert (
            '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
            in text
        )
        assert text.endswith("<|im_start|>tool\n20<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
        kept = ("messages", "tools", "chat_template_kwargs")
        counted = await client.post("/tokenize", {name: fields[name] for name in kept})
        assert counted.json["tokens"] == ids

    run_with_app(scenario, template=TEMPLATE, max_model_len=2000)


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True), (None, True)])
def test_an_effort_is_handed_to_the_template(effort: str | None, thinks: bool):
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        await client.post(CHAT, {"messages": [USER], "reasoning_effort": effort})
        text = llm.tokenizer.decode(llm.calls[0].prompt)
        assert text.endswith("</think>\n\n") is not thinks

    run_with_app(scenario, template=TEMPLATE, max_model_len=2000)
