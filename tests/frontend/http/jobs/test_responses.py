"""/v1/responses over the app: whose they are, and what is done with those that run."""

from __future__ import annotations

import asyncio

import pytest
from openai_fakes import AsgiClient, FakeLLM
from quire.frontend.http.connections.auth import hash_key
from quire.frontend.http.options import ServerOptions
from quire.frontend.http.serving import Serving

PATH = "/v1/responses"


@pytest.mark.app(options=ServerOptions(api_key_hashes=(hash_key("one"), hash_key("other"))))
async def test_responses_are_each_keys_own_and_can_be_got_and_deleted(
    client: AsgiClient, serving: Serving
) -> None:
    one, other = {"authorization": "Bearer one"}, {"authorization": "Bearer other"}
    made = (await client.post(PATH, {"input": "Hi"}, **one)).json
    path = f"{PATH}/{made['id']}"
    for method, target in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
        for key, status in ((other, 404), ({}, 401)):
            assert (await client.call(method, target, b"", key)).status == status
    follow = {"input": "Hi", "previous_response_id": made["id"]}
    refused = await client.post(PATH, follow, **other)
    assert (refused.status, refused.error["code"]) == (400, "previous_response_not_found")
    assert (await client.get(path, **one)).json == made
    assert (await client.post(f"{path}/cancel", {}, **one)).error["code"] == "invalid_state"
    deleted = await client.call("DELETE", path, b"", one)
    assert deleted.json == {"id": made["id"], "object": "response", "deleted": True}
    gone = await client.get(path, **one)
    assert (gone.status, gone.error["code"]) == (404, "response_not_found")
    assert serving.responses.store.num_bytes == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_response_that_runs_can_be_seen_and_cancelled(
    llm: FakeLLM, client: AsgiClient, serving: Serving, stream: bool
) -> None:
    llm.gate.clear()
    running = asyncio.create_task(client.post(PATH, {"input": "Hi", "stream": stream}))
    await llm.started.wait()
    (response_id,) = serving.responses.store._records
    path = f"{PATH}/{response_id}"
    assert (await client.get(path)).json["status"] == "in_progress"
    follow = await client.post(PATH, {"input": "Hi", "previous_response_id": response_id})
    assert (follow.status, follow.error["param"]) == (400, "previous_response_id")
    for method, target in (("DELETE", path), ("GET", f"{path}/input_items")):
        assert (await client.call(method, target, b"", {})).error["code"] == "invalid_state"
    cancelled = await client.call("POST", f"{path}/cancel", b"", {})
    assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
    answer = await running
    ended = answer.events[-1]["response"] if stream else answer.json
    assert llm.aborted == {response_id}
    if stream:
        assert (ended["status"], answer.events[-1]["type"]) == ("cancelled", "response.incomplete")
    assert (await client.get(path)).json == ended


async def test_a_response_whose_client_leaves_is_not_kept(
    llm: FakeLLM, client: AsgiClient, serving: Serving
) -> None:
    llm.gate.clear()
    running = asyncio.create_task(client.post(PATH, {"input": "Hi", "stream": True}))
    await llm.started.wait()
    assert len(serving.responses.store) == 1
    client.leave()
    await running
    assert len(serving.responses.store) == 0
