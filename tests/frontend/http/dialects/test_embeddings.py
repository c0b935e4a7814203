"""/v1/embeddings, /pooling, /classify, /v2/embed and TEI's routes over a scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai_fakes import AsgiClient, FakeLLM
from quire.frontend.http.options import ServerOptions
from quire.frontend.http.serving import Serving
from quire.frontend.http.text_process.jobs import PoolingJob
from quire.frontend.requests.prompts import Truncation
from quire.frontend.requests.vectors.encoder import EncodedText
from quire.ipc.params.request_options import RequestOptions

PATH = "/v1/embeddings"
ENCODER: dict[str, Any] = {"tasks": ("embed", "token_embed", "score"), "embedding_size": 4}


def expected(ids: list[int], width: int = 4) -> list[float]:
    return [float(number) for number in [len(ids), *ids, 0, 0, 0, 0][:width]]


@pytest.mark.app(**ENCODER)
async def test_many_texts_are_tokenized_by_one_job_beside_the_event_loop(
    llm: FakeLLM, client: AsgiClient, serving: Serving
) -> None:
    texts = [f"Text number {number}" for number in range(300)]
    body = (await client.post(PATH, {"input": [*texts, texts[0]]})).json
    assert [len(item["embedding"]) for item in body["data"]] == [4] * 301
    ((job, _),) = serving.text.jobs  # type: ignore[attr-defined]
    assert isinstance(job, PoolingJob)
    assert job.names[299] == "input[299]"
    assert all(isinstance(one, EncodedText) for one in llm.pooled[0].prompts)
    assert body["data"][7]["embedding"] == expected(llm.tokenizer.encode(texts[7]))
    assert len(llm.pooled) == 1


@pytest.mark.app(num_gpu_blocks=6, block_size=16, **ENCODER)
async def test_a_text_process_cuts_to_what_the_kv_cache_holds(client: AsgiClient, serving: Serving) -> None:
    text = "word " * 900
    for given in ({"input": text}, {"messages": [{"role": "user", "content": text}]}):
        body = (await client.post(PATH, given | {"truncate_prompt_tokens": -1})).json
        assert body["usage"]["prompt_tokens"] == 96
        job, _ = serving.text.jobs[-1]  # type: ignore[attr-defined]
        assert job.truncation == Truncation(96, keeps_start=True)


@pytest.mark.app(**ENCODER)
async def test_what_a_model_can_do_is_listed(client: AsgiClient) -> None:
    (card,) = (await client.get("/v1/models")).json["data"]
    assert (card["tasks"], card["embedding_size"]) == (["embed", "token_embed", "score"], 4)
    info = (await client.get("/info")).json
    assert (info["model_type"], info["max_input_length"]) == ({"embedding": {}}, 128)
    assert info["max_client_batch_size"] == 2048


@pytest.mark.app(**ENCODER)
async def test_a_client_that_leaves_ends_its_request(
    llm: FakeLLM, client: AsgiClient, serving: Serving
) -> None:
    llm.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(client.post(PATH, {"input": ["One", "Two"]}))
        await llm.started.wait()
        assert serving.capacity.num_sequences == 1  # sixteen vectors take one place
        client.leave()
        assert (await asking).status == 499
    assert llm.num_pooled_ends == 1


@pytest.mark.app(options=ServerOptions(max_waiting=0), **ENCODER)
async def test_texts_that_are_being_tokenized_have_their_room(
    client: AsgiClient, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, gate = serving.text.run, asyncio.Event()

    async def run_late(job: Any, tenant: str) -> Any:
        await gate.wait()
        return await run(job, tenant)

    monkeypatch.setattr(serving.text, "run", run_late)
    asked = {"input": "word " * 900, "truncate_prompt_tokens": 8}
    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(client.post(PATH, asked)) for _ in range(5)]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)  # max_num_seqs is 4
        gate.set()
    assert sorted(one.result().status for one in asking) == [200, 200, 200, 200, 429]


@pytest.mark.app(**ENCODER)
async def test_callers_are_told_apart_in_the_engine(llm: FakeLLM, client: AsgiClient) -> None:
    fields = {"input": "One", "priority": -3, "timeout_s": 5.0, "cache_salt": "mine"}
    await client.post(PATH, fields, x_request_id="batch-7")
    (call,) = llm.pooled
    names = [call.request_id, "batch-7"]
    assert call.options == RequestOptions(-3, "mine", "/local", timeout_s=5.0, names=names)
