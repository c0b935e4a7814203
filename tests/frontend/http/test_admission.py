"""Whom routes answer, and how much at a time: errors, keys, places, clients that leave; without sockets."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import msgspec
import pytest
from openai_fakes import CHAT, AsgiClient, FakeLLM, chat
from quire.frontend.http.connections.auth import hash_key
from quire.frontend.http.dialects.completions import CompletionRequest
from quire.frontend.http.limits import Limits
from quire.frontend.http.options import ServerOptions
from quire.frontend.http.serving import Serving
from quire.ipc.errors import EngineDeadError, RequestFailedError


async def test_a_wrong_method_is_told_which_are_allowed(client: AsgiClient) -> None:
    for path, methods in (("/v1/responses/resp_1", "DELETE, GET, HEAD"), (CHAT, "POST")):
        assert (await client.call("PUT", path, b"", {})).headers["allow"] == methods


async def test_models_version_and_health_answer(llm: FakeLLM, client: AsgiClient) -> None:
    (card,) = (await client.get("/v1/models")).json["data"]
    assert (card["id"], card["root"], card["parent"]) == ("fake", llm.facts.model, None)
    assert (card["max_model_len"], card["permission"]) == (128, [])
    llm.facts = msgspec.structs.replace(llm.facts, weight_file="/models/model.gguf")
    assert (await client.get("/v1/models/fake")).json["root"] == "/models/model.gguf"
    assert (await client.get("/version")).json["version"]
    llm.die(EngineDeadError("killed"))
    assert [(await client.get(path)).status for path in ("/live", "/ready", "/health")] == [200, 503, 503]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestFailedError("full", "overloaded"), 429, "overloaded"),
        (RequestFailedError("late", "queue_timeout"), 503, "queue_timeout"),
        (RequestFailedError("never fits", "refused"), 400, "refused"),
        (RequestFailedError("too much", "bad_grammar"), 400, "bad_grammar"),
        (RequestFailedError("culprit", "poison_request"), 500, "poison_request"),
        (RequestFailedError("broken", "step_failed"), 500, "step_failed"),
        (RequestFailedError("nan", "bad_logits"), 500, "bad_logits"),
        (EngineDeadError("killed"), 503, "engine_away"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_says_becomes_a_status_also_of_a_stream_that_has_not_begun(
    llm: FakeLLM, client: AsgiClient, error: Exception, status: int, code: str, stream: bool
) -> None:
    llm.error = error
    answer = await client.post(CHAT, chat(stream=stream))
    assert (answer.status, answer.error["code"]) == (status, code)
    assert str(error) in answer.error["message"]
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    assert (answer.headers.get("x-should-retry") == "false") == (code == "poison_request")


async def test_a_request_that_forbids_every_token_is_to_blame_itself(
    llm: FakeLLM, client: AsgiClient
) -> None:
    llm.error = RequestFailedError("no token is left", "bad_logits")
    answer = await client.post(CHAT, chat(allowed_token_ids=[2], min_tokens=5))
    assert (answer.status, answer.error["param"]) == (400, "allowed_token_ids")
    assert "no token is left" in answer.error["message"]


async def test_an_unforeseen_error_is_logged_and_not_shown(
    llm: FakeLLM, client: AsgiClient, caplog: pytest.LogCaptureFixture
) -> None:
    llm.error = KeyError("secret")
    answer = await client.post(CHAT, chat())
    assert (answer.status, answer.error["code"]) == (500, "internal")
    assert "secret" not in answer.body.decode()
    assert "secret" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages"])
async def test_a_client_that_leaves_ends_its_requests_before_and_after_the_first_token(
    llm: FakeLLM, client: AsgiClient, path: str, stream: bool
) -> None:
    llm.gate.clear()
    prompt = {"prompt": ["a", "b"]} if path == "/v1/completions" else chat(max_tokens=9)
    for holds_first in (True, False):
        client.gone.clear()
        llm.holds_first = holds_first
        llm.started.clear()
        num_before = len(llm.calls)
        call = asyncio.create_task(client.post(path, prompt | {"stream": stream}))
        while len(llm.calls) < num_before + (2 if path == "/v1/completions" else 1):
            await asyncio.sleep(0)
        if not holds_first:
            await llm.started.wait()
        client.leave()
        await call
        assert len(llm.ended) == len(llm.calls)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("ending", ["the client leaves", "the engine refuses", "it is answered"])
async def test_what_a_request_held_goes_with_it_and_not_when_the_collector_comes(
    ending: str, n: int, stream: bool, llm: FakeLLM, client: AsgiClient
) -> None:
    body = {"prompt": ["a", "b"], "n": n, "stream": stream}
    await client.post("/v1/completions", body)  # what the first one leaves for all
    gc.freeze()  # neither that nor what other tests have left is looked through
    if ending == "the engine refuses":
        llm.error = RequestFailedError("full", code="overloaded")
    elif ending == "the client leaves":
        llm.gate.clear()
    num_before = len(llm.calls)
    call = asyncio.create_task(client.post("/v1/completions", body))
    await llm.wait_for_calls(num_before + 2)
    if ending == "the client leaves":
        client.leave()
    await call
    del call
    await asyncio.sleep(0)
    left = [one for one in gc.get_objects() if type(one) is CompletionRequest]
    assert [one for one in left if one.n == n] == []


@pytest.mark.app(options=ServerOptions(limits=Limits(ping_interval_s=0.05)))
async def test_a_stream_in_which_nothing_flows_is_kept_alive_by_comments(
    llm: FakeLLM, client: AsgiClient
) -> None:
    llm.gate.clear()
    llm.holds_first = True
    call = asyncio.create_task(client.post(CHAT, chat(stream=True)))
    loop = asyncio.get_running_loop()
    loop.call_later(0.2, llm.gate.set)
    answer = await call
    assert answer.body.startswith(b": ping\n\n: ping\n\n")
    assert answer.events[-1] == "[DONE]"


@pytest.mark.app(options=ServerOptions(max_waiting=2))
async def test_what_does_not_fit_is_refused_at_once_with_retry_after(
    llm: FakeLLM, client: AsgiClient
) -> None:
    llm.gate.clear()
    running = [asyncio.create_task(client.post(CHAT, chat(stream=i % 2 == 0))) for i in range(6)]
    while len(llm.calls) < 6:
        await asyncio.sleep(0)
    for stream in (False, True):
        refused = await client.post(CHAT, chat(stream=stream))
        assert (refused.status, refused.error["code"]) == (429, "overloaded")
        assert refused.headers["retry-after"] == "1"
    llm.num_engines = 2  # another one has joined
    running.append(asyncio.create_task(client.post(CHAT, chat())))
    await llm.wait_for_calls(7)
    llm.gate.set()
    assert {(await one).status for one in running} == {200}
    assert (await client.post(CHAT, chat())).status == 200


@pytest.mark.app(options=ServerOptions(max_waiting=2, api_key_hashes=(hash_key("one"), hash_key("two"))))
async def test_a_flood_by_one_key_leaves_another_its_share_of_the_places(
    llm: FakeLLM, client: AsgiClient, serving: Serving
) -> None:
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    llm.gate.clear()
    flood = [asyncio.create_task(client.post(CHAT, chat(n=2), **one)) for _ in range(3)]
    await llm.wait_for_calls(3)
    assert serving.capacity.num_sequences == 6  # max_num_seqs + max_waiting
    refused = await client.post(CHAT, chat(), **one)
    assert refused.status == 429
    assert "6 sequences are under way (6 of them yours)" in refused.error["message"]
    small = [asyncio.create_task(client.post(CHAT, chat(), **two)) for _ in range(3)]
    await llm.wait_for_calls(6)
    assert (await client.post(CHAT, chat(), **two)).status == 429  # beyond its half
    llm.gate.set()
    assert {(await call).status for call in flood + small} == {200}


@pytest.mark.app(max_model_len=8192)
async def test_an_answer_that_would_not_fit_is_refused_before_anything_is_generated(
    llm: FakeLLM, client: AsgiClient
) -> None:
    many = {"n": 128, "max_tokens": 2000, "logprobs": 20, "prompt": ["x"] * 8}
    answer = await client.post("/v1/completions", many)
    assert (answer.status, answer.error["code"]) == (413, "answer_too_large")
    assert "16646144000 bytes" in answer.error["message"]
    assert "268435456" in answer.error["message"]
    answer = await client.post(CHAT, chat(n=128, logprobs=True, top_logprobs=20))
    assert (answer.status, answer.error["code"]) == (413, "answer_too_large")
    echoed = {"max_tokens": 1, "logprobs": 5, "echo": True, "prompt": [[5] * 4000] * 30}
    answer = await client.post("/v1/completions", echoed)
    assert (answer.status, answer.error["code"]) == (413, "answer_too_large")
    assert not llm.calls
    assert (await client.post(CHAT, chat(n=2, max_tokens=100, logprobs=True))).status == 200


@pytest.mark.app(options=ServerOptions(limits=Limits(max_result_bytes=70_000)))
@pytest.mark.parametrize("repeats", ["echo", "return_token_ids"])
async def test_prompts_that_every_answer_would_repeat_are_refused_when_that_is_too_much(
    client: AsgiClient, repeats: str
) -> None:
    body = {"prompt": [[5] * 100] * 8, "n": 16, repeats: True, "max_tokens": 1}
    answer = await client.post("/v1/completions", body)
    assert (answer.status, answer.error["code"]) == (413, "answer_too_large")
    assert "n=16" in answer.error["message"]
    assert (await client.post("/v1/completions", body | {"n": 1})).status == 200


@pytest.mark.app(options=ServerOptions(api_key_hashes=(hash_key("one"), hash_key("two"))))
async def test_callers_with_different_keys_share_no_cache_and_have_names_of_their_own(
    llm: FakeLLM, client: AsgiClient
) -> None:
    for key in ("one", "two", "one"):
        await client.post(CHAT, chat(), authorization=f"Bearer {key}")
    await client.post(CHAT, chat(cache_salt="mine"), authorization="Bearer one")
    salts = [call.options.cache_salt for call in llm.calls]
    assert salts[0] == salts[2]
    assert len(set(salts)) == 3
    assert [call.options.tenant for call in llm.calls].count(hash_key("one")[:16]) == 3
    assert not any("one" in salt for salt in salts)


ABORTS: list[tuple[dict[str, Any], str]] = [
    ({}, "request_ids"),
    ({"request_ids": []}, "request_ids"),
    ({"request_ids": "x"}, "request_ids"),
    ({"request_ids": ["x" * 257]}, "request_ids[0]"),
    ({"request_ids": ["x"] * 2049}, "request_ids"),
    ({"request_id": "x"}, "request_id"),
]


@pytest.mark.app(options=ServerOptions(api_key_hashes=(hash_key("one"),)))
async def test_aborts_reach_the_engine_with_the_callers_key_and_requests_their_names(
    llm: FakeLLM, client: AsgiClient
) -> None:
    key = {"authorization": "Bearer one"}
    answer = await client.post(CHAT, chat(), **key, **{"x-request-id": "mine"})
    assert llm.calls[0].options.names == [answer.json["id"], "mine"]
    prompts = {"model": "fake", "prompt": ["a", "b"]}
    answer = await client.post("/v1/completions", prompts, **key, **{"x-request-id": "x" * 300})
    assert [call.options.names for call in llm.calls[1:]] == [[answer.json["id"]]] * 2
    assert (await client.post("/abort_requests", {"request_ids": ["a", "b"]}, **key)).status == 200
    assert llm.named_aborts == [(["a", "b"], hash_key("one")[:16])]
    for body, param in ABORTS:
        refused = await client.post("/abort_requests", body, **key)
        assert (refused.status, refused.error["param"]) == (400, param)
    assert (await client.post("/abort_requests", {"request_ids": ["a"]})).status == 401
    assert len(llm.named_aborts) == 1


async def test_a_draining_server_takes_nothing_new_and_finishes_what_runs(
    llm: FakeLLM, client: AsgiClient, serving: Serving
) -> None:
    llm.gate.clear()
    running = asyncio.create_task(client.post(CHAT, chat(stream=True)))
    await llm.started.wait()
    serving._parts.drain()
    refused = await client.post(CHAT, chat())
    assert (refused.status, refused.headers["connection"]) == (503, "close")
    assert (await client.get("/ready")).json == {"status": "draining"}
    assert (await client.get("/live")).status == 200
    llm.gate.set()
    assert (await running).events[-1] == "[DONE]"
