"""What OpenAI's Python client does with a server, one function a scenario; `scenarios.mjs` does it in Node.

`python scenarios.py BASE_URL API_KEY` runs all of them against any server of the pocket model that wants this
key and prints a JSON line for each: name, ok, seconds, and error when it failed. Exit code 1 if one failed.
"""

from __future__ import annotations

import asyncio
import datetime
import enum
import functools
import json
import math
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import Annotated, Any, Literal

import openai
import pydantic

MODEL = "pocket"
STORY = "Once upon a time"
SUM = [{"role": "user", "content": "What is 12 plus 30?"}]
ENDLESS: dict[str, Any] = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}
TIMEOUT_S = 60.0
IDLE_WITHIN_S = 1.0  # what is promised after a disconnect
NUM_STREAMS = 32

Scenario = Callable[[openai.OpenAI], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """List the function under its name."""
    SCENARIOS[function.__name__] = function
    return function


def make_client(base_url: str, api_key: str) -> openai.OpenAI:
    """`base_url` ends with /v1. No retries: an error that a second try would hide is a failure here."""
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=TIMEOUT_S)


def get_stats(client: openai.OpenAI) -> dict[str, Any]:
    """The engine's numbers at this moment."""
    root = str(client.base_url).removesuffix("/").removesuffix("/v1")
    answer: Any = client.get(f"{root}/stats", cast_to=object)
    return answer["stats"]


def wait_until(client: openai.OpenAI, is_true: Callable[[dict[str, Any]], bool], within_s: float) -> None:
    """Ask the engine again and again until it is so."""
    deadline = time.monotonic() + within_s
    while not is_true(stats := get_stats(client)):
        assert time.monotonic() < deadline, f"not within {within_s} s: {stats}"


def is_idle(stats: dict[str, Any]) -> bool:
    """Nothing runs, nothing waits, every block is free."""
    return stats["num_running"] + stats["num_waiting"] + stats["kv_blocks_used"] == 0


def raised(kind: type[openai.APIError], call: Callable[[], object]) -> openai.APIError:
    """The error of that kind that the call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


@scenario
def completion_plain(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=STORY, max_tokens=8, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


@scenario
def completion_stream(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=STORY, max_tokens=24, seed=5)
    chunks = list(client.completions.create(model=MODEL, prompt=STORY, max_tokens=24, seed=5, stream=True))
    assert chunks
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
        "length"
    ]


@scenario
def completion_n(client: openai.OpenAI) -> None:
    def ask(seed: int) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt=STORY, n=3, seed=seed, max_tokens=20, temperature=1
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    first = ask(7)
    assert len(set(first)) == 3
    assert ask(7) == first
    assert ask(8) != first
    texts = ["", "", ""]
    for chunk in client.completions.create(
        model=MODEL, prompt=STORY, n=3, seed=7, max_tokens=20, temperature=1, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == first


@scenario
def completion_best_of(client: openai.OpenAI) -> None:
    def ask(n: int) -> Any:
        return client.completions.create(
            model=MODEL, prompt=STORY, n=n, best_of=4, seed=3, max_tokens=12, temperature=1, logprobs=0
        )

    def mean_logprob(choice: Any) -> float:
        logprobs = choice.logprobs.token_logprobs
        return math.fsum(logprobs) / len(logprobs)

    every, best = ask(4), ask(1)
    assert len(every.choices) == 4
    assert len(best.choices) == 1
    assert best.choices[0].text == max(every.choices, key=mean_logprob).text
    assert best.usage.completion_tokens == every.usage.completion_tokens == 48


@scenario
def completion_echo_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=STORY, echo=True, max_tokens=4, logprobs=2, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text.startswith(STORY)
    assert choice.logprobs
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert choice.logprobs.token_logprobs
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    places = zip(choice.logprobs.text_offset or [], choice.logprobs.tokens or [], strict=True)
    assert all(choice.text[offset:].startswith(token) for offset, token in places)
    only = client.completions.create(model=MODEL, prompt=STORY, echo=True, max_tokens=0)
    assert only.choices[0].text == STORY


@scenario
def completion_several_prompts(client: openai.OpenAI) -> None:
    prompts = [STORY, "The little fox", "One day"]
    together = client.completions.create(model=MODEL, prompt=prompts, n=2, seed=1, max_tokens=6)
    assert [choice.index for choice in together.choices] == list(range(6))
    for place, prompt in enumerate(prompts):
        alone = client.completions.create(model=MODEL, prompt=prompt, n=2, seed=1, max_tokens=6)
        texts = [choice.text for choice in together.choices[2 * place : 2 * place + 2]]
        assert [choice.text for choice in alone.choices] == texts


@scenario
def completion_token_ids(client: openai.OpenAI) -> None:
    root = str(client.base_url).removesuffix("/").removesuffix("/v1")
    tokenized: Any = client.post(f"{root}/tokenize", cast_to=object, body={"prompt": STORY})
    ids = tokenized["tokens"]
    by_text = client.completions.create(model=MODEL, prompt=STORY, max_tokens=8, temperature=0)
    by_ids = client.completions.create(model=MODEL, prompt=ids, max_tokens=8, temperature=0)
    twice = client.completions.create(model=MODEL, prompt=[ids, ids], max_tokens=8, temperature=0)
    assert [choice.text for choice in [*by_ids.choices, *twice.choices]] == [by_text.choices[0].text] * 3


@scenario
def chat_plain(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=SUM, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert "42" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


@scenario
def chat_system(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "You are a helpful assistant."}, *SUM]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=32)
    plain = client.chat.completions.create(model=MODEL, messages=SUM, temperature=0, max_tokens=32)
    assert answer.choices[0].message.content
    assert answer.usage
    assert plain.usage
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens


@scenario
def chat_multi_turn(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=SUM, temperature=0)
    more = [
        *SUM,
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "user", "content": [{"type": "text", "text": "What is 5 plus 6?"}]},
    ]
    second = client.chat.completions.create(model=MODEL, messages=more, temperature=0)
    assert "11" in (second.choices[0].message.content or "")
    assert second.usage
    assert second.usage.prompt_tokens_details
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > 0


@scenario
def chat_stream_with_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=SUM, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=SUM, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage
    assert whole.usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


@scenario
def chat_n(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me a story."}],
        n=4,
        seed=2,
        temperature=1.5,
        max_tokens=12,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in answer.choices}) > 1


@scenario
def chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=SUM, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs
    entries = answer.choices[0].logprobs.content or []
    assert "".join(entry.token for entry in entries).startswith(answer.choices[0].message.content or "?")
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob <= 0


@scenario
def chat_stop(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(model=MODEL, messages=SUM, temperature=0)
    stopped = client.chat.completions.create(model=MODEL, messages=SUM, temperature=0, stop=["42"])
    text = stopped.choices[0].message.content or ""
    assert "42" not in text
    assert (free.choices[0].message.content or "").startswith(text)
    assert stopped.choices[0].finish_reason == "stop"


@scenario
def chat_seed(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a story."}],
            seed=seed,
            temperature=1,
            max_tokens=24,
        )
        return answer.choices[0].message.content

    assert ask(11) == ask(11)
    assert len({ask(seed) for seed in range(11, 15)}) > 1


@scenario
def chat_max_completion_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=SUM, max_completion_tokens=3, extra_body={"ignore_eos": True}
    )
    assert answer.usage
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


@scenario
def chat_penalties(client: openai.OpenAI) -> None:
    def count_kinds(**penalties: Any) -> int:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=SUM,
            temperature=0,
            max_tokens=60,
            logprobs=True,
            extra_body={"ignore_eos": True, "logit_bias": {"100": 20}},
            **penalties,
        )
        assert answer.choices[0].logprobs
        return len({entry.token for entry in answer.choices[0].logprobs.content or []})

    plain = count_kinds()
    assert count_kinds(frequency_penalty=2.0, presence_penalty=2.0) > plain


@scenario
def chat_logit_bias(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=SUM, temperature=0, max_tokens=4, logprobs=True, logit_bias={"100": 100}
    )
    assert answer.choices[0].logprobs
    entries = answer.choices[0].logprobs.content or []
    assert len(entries) == 4
    assert len({entry.token for entry in entries}) == 1


@scenario
def responses_text(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL, instructions="You are a helpful assistant.", input=SUM[0]["content"], temperature=0
    )
    assert answer.status == "completed"
    assert answer.output_text
    cut = client.responses.create(model=MODEL, input=SUM, max_output_tokens=1)
    assert cut.status == "incomplete"
    assert cut.incomplete_details
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.usage
    assert cut.usage.output_tokens == 1


@scenario
def responses_stream(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input=SUM[0]["content"], temperature=0)
    events = list(client.responses.create(model=MODEL, input=SUM[0]["content"], temperature=0, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert "42" in text
    with client.responses.stream(model=MODEL, input=SUM[0]["content"], temperature=0) as helped:
        assert helped.get_final_response().output_text == text


@scenario
def responses_continue(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=SUM[0]["content"], temperature=0)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    items: Any = [*SUM, *first.output, {"role": "user", "content": "And 1 more?"}]
    whole = client.responses.create(model=MODEL, input=items, temperature=0, store=False)
    more = client.responses.create(
        model=MODEL, input="And 1 more?", previous_response_id=first.id, temperature=0
    )
    assert more.usage
    assert whole.usage
    assert (more.output_text, more.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
    listed = client.responses.input_items.list(more.id, order="asc")
    assert [item.type for item in listed] == ["message"] * 3
    client.responses.delete(first.id)
    for response_id in (first.id, whole.id):
        error = raised(openai.NotFoundError, functools.partial(client.responses.retrieve, response_id))
        assert error.code == "response_not_found"


@scenario
def responses_background(client: openai.OpenAI) -> None:
    """It goes on without its stream, is followed from a cursor, polled, and cancelled."""
    asked: dict[str, Any] = {"model": MODEL, "input": SUM[0]["content"], "temperature": 0, "background": True}
    expected = client.responses.create(**asked | {"background": False}).output_text
    first: list[Any] = []
    with client.responses.create(**asked, stream=True) as stream:
        for event in stream:
            first.append(event)
            if len(first) == 6:
                break
    response_id = first[0].response.id
    cursor = first[-1].sequence_number
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=cursor))
    assert [event.sequence_number for event in first + rest] == list(range(len(first) + len(rest)))
    text = "".join(event.delta for event in first + rest if event.type == "response.output_text.delta")
    assert text == expected == rest[-1].response.output_text
    assert client.responses.retrieve(response_id).output_text == expected
    polled = client.responses.create(**asked)
    assert polled.status == "queued"
    deadline = time.monotonic() + TIMEOUT_S
    while (polled := client.responses.retrieve(polled.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
    assert (polled.status, polled.output_text) == ("completed", expected)
    endless = client.responses.create(**asked, max_output_tokens=1900, extra_body={"ignore_eos": True})
    assert client.responses.cancel(endless.id).status == "cancelled"
    while client.responses.retrieve(endless.id).status != "cancelled":
        assert time.monotonic() < deadline
    assert client.responses.cancel(endless.id).status == "cancelled"  # once more changes nothing
    client.responses.delete(endless.id)
    raised(openai.NotFoundError, functools.partial(client.responses.retrieve, endless.id))


class Answer(pydantic.BaseModel):
    """Short enough to be whole whatever the model writes."""

    kind: Literal["sum", "difference"]
    value: int = pydantic.Field(ge=0, le=999)
    is_sure: bool | None


Digit = Annotated[int, pydantic.Field(ge=0, le=9)]
Food = Annotated[str, pydantic.Field(pattern="^(hay|milk)$")]


class Color(enum.Enum):
    """An enum becomes a schema that is referred to."""

    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    """One branch of a union that a property tells apart."""

    kind: Literal["cat"]
    lives: Digit


class Dog(pydantic.BaseModel):
    """The other one, which is recursive."""

    kind: Literal["dog"]
    born: datetime.date
    puppy: Dog | None = None


class Zoo(pydantic.BaseModel):
    """What OpenAI's library makes of pydantic's ways to say things."""

    first: Cat | Dog = pydantic.Field(discriminator="kind", description="the oldest")
    others: list[Cat | Dog] = pydantic.Field(max_length=2)
    size: tuple[Digit, Digit]
    color: Color
    food: dict[Food, Digit]
    secret: pydantic.SecretStr = pydantic.Field(max_length=4)

    model_config = pydantic.ConfigDict(extra="forbid")


def parse(client: openai.OpenAI, kind: type[pydantic.BaseModel]) -> pydantic.BaseModel | None:
    """What the first seed gives that ends; a text without a bound need not."""
    for seed in range(16):
        try:
            answer = client.chat.completions.parse(
                model=MODEL, messages=SUM, seed=seed, max_tokens=500, response_format=kind
            )
        except openai.LengthFinishReasonError:
            continue
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.parsed
    return None


@scenario
def chat_parse(client: openai.OpenAI) -> None:
    assert isinstance(parse(client, Answer), Answer)
    assert isinstance(parse(client, Zoo), Zoo)
    with client.chat.completions.stream(
        model=MODEL, messages=SUM, temperature=0, response_format=Answer
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Answer)


@scenario
def chat_structured_outputs(client: openai.OpenAI) -> None:
    for wanted, pattern in (({"choice": ["yes", "no"]}, "yes|no"), ({"regex": "[a-c]{3}"}, "[a-c]{3}")):
        answer = client.chat.completions.create(
            model=MODEL, messages=SUM, n=3, seed=1, extra_body={"structured_outputs": wanted}
        )
        assert all(re.fullmatch(pattern, choice.message.content or "") for choice in answer.choices)


@scenario
def responses_parse(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": SUM[0]["content"], "temperature": 0}
    answer = client.responses.parse(**asked, text_format=Answer)
    assert answer.status == "completed"
    assert isinstance(answer.output_parsed, Answer)
    with client.responses.stream(**asked, text_format=Answer) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Answer)


@scenario
def models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "quire"
    error = raised(openai.NotFoundError, lambda: client.models.retrieve("gpt-4"))
    assert error.code == "model_not_found"


@scenario
def error_unknown_model(client: openai.OpenAI) -> None:
    error = raised(openai.NotFoundError, lambda: client.chat.completions.create(model="gpt-4", messages=SUM))
    assert error.code == "model_not_found"
    assert error.param == "model"


@scenario
def error_wrong_key(client: openai.OpenAI) -> None:
    other = client.with_options(api_key="wrong")
    error = raised(openai.AuthenticationError, other.models.list)
    assert error.code == "invalid_api_key"


@scenario
def error_too_long(client: openai.OpenAI) -> None:
    error = raised(
        openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt="word " * 5000)
    )
    assert error.code == "context_length_exceeded"


@scenario
def error_bad_fields(client: openai.OpenAI) -> None:
    bad: dict[str, Any] = {
        "temperature": 9,
        "top_p": 0,
        "n": 0,
        "max_tokens": -2,
        "seed": "one",
        "presence_penalty": 3,
        "top_logprobs": 21,
        "stop": ["x"] * 99,
        "logit_bias": {"99999999": 1},
        "tools": [{"type": "function", "function": {"name": "no name"}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
        "no_such_field": 1,
    }
    for name, value in bad.items():
        error = raised(
            openai.BadRequestError,
            lambda body={name: value}: client.chat.completions.create(
                model=MODEL, messages=SUM, extra_body=body
            ),
        )
        assert re.split(r"[.\[]", error.param or "")[0] == name, f"{name}: {error.param}: {error.message}"
        assert name in error.message
    error = raised(openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt=[1, 99999]))
    assert error.param == "prompt"


@scenario
def cancel_stream(client: openai.OpenAI) -> None:
    wait_until(client, is_idle, 5.0)
    stream = client.chat.completions.create(model=MODEL, messages=SUM, stream=True, **ENDLESS)
    next(iter(stream))
    assert get_stats(client)["num_running"] == 1
    stream.close()
    wait_until(client, is_idle, IDLE_WITHIN_S)


@scenario
def timeout(client: openai.OpenAI) -> None:
    wait_until(client, is_idle, 5.0)
    hasty = client.with_options(timeout=0.3)
    raised(
        openai.APITimeoutError,
        lambda: hasty.completions.create(model=MODEL, prompt=STORY, n=16, temperature=1, **ENDLESS),
    )
    wait_until(client, is_idle, IDLE_WITHIN_S)


@scenario
def concurrency_of_32(client: openai.OpenAI) -> None:
    async def tell(asynchronous: openai.AsyncOpenAI, seed: int) -> str:
        stream = await asynchronous.completions.create(
            model=MODEL, prompt="One day", stream=True, seed=seed, max_tokens=24, temperature=1
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def tell_all() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=str(client.base_url), api_key=client.api_key, max_retries=0, timeout=TIMEOUT_S
        ) as asynchronous:
            return await asyncio.gather(*(tell(asynchronous, place % 8) for place in range(NUM_STREAMS)))

    texts = asyncio.run(tell_all())
    alone = client.completions.create(model=MODEL, prompt="One day", seed=0, max_tokens=24, temperature=1)
    assert texts[0] == alone.choices[0].text
    assert texts == texts[:8] * 4
    assert len(set(texts)) == 8


def run(name: str, client: openai.OpenAI) -> dict[str, Any]:
    """What happened, as the line that is printed."""
    began = time.monotonic()
    error = ""
    try:
        SCENARIOS[name](client)
    except Exception:  # whatever it is, it is this scenario's result
        error = traceback.format_exc()
    line: dict[str, Any] = {"name": name, "ok": not error, "seconds": round(time.monotonic() - began, 3)}
    return line | ({"error": error} if error else {})


def main() -> int:
    """Run all; the exit code."""
    base_url, api_key = sys.argv[1:]
    has_failed = False
    with make_client(base_url, api_key) as client:
        for name in SCENARIOS:
            line = run(name, client)
            has_failed |= not line["ok"]
            print(json.dumps(line), flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
