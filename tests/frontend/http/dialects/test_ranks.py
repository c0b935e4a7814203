"""/score and the routes that rank, over a scripted engine: a cross-encoder's and an embedding model's."""

from __future__ import annotations

from typing import Any

import pytest
from openai_fakes import AsgiClient, FakeLLM
from quire.frontend.http.serving import Serving
from quire.frontend.http.text_process.jobs import PoolingJob
from quire.frontend.text.tokenizer import Tokenizer

# A fake score is the number of tokens, so that the longest document is the best one.
DOCUMENTS = ["a", "a much longer document", "a longer document"]
ASKED: dict[str, Any] = {"model": "fake", "query": "Which?", "documents": DOCUMENTS}
RERANKER: dict[str, Any] = {"tasks": ("classify", "token_classify", "score")}


@pytest.mark.app(**RERANKER)
async def test_many_documents_are_joined_with_their_query_by_one_job(
    llm: FakeLLM, client: AsgiClient, serving: Serving
) -> None:
    documents = [f"Document number {number}" for number in range(40)]
    many = (await client.post("/v1/rerank", ASKED | {"documents": documents})).json["results"]
    ((job, _),) = serving.text.jobs  # type: ignore[attr-defined]
    assert isinstance(job, PoolingJob)
    assert job.queries == ["Which?"]
    few = (await client.post("/v1/rerank", ASKED | {"documents": documents[7:8]})).json["results"]
    assert next(one for one in many if one["index"] == 7) == few[0] | {"index": 7}
    assert len(llm.pooled) == 2


@pytest.mark.app(**RERANKER)
async def test_a_query_that_is_too_long_is_refused_before_it_is_joined(
    client: AsgiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode_pairs", lambda *_: pytest.fail("it was joined"))
    asked = {"query": "word " * 300, "documents": ["a"] * 40, "truncate_prompt_tokens": -1}
    error = (await client.post("/v1/rerank", ASKED | asked)).error
    assert (error["param"], error["code"]) == ("documents[0]", "context_length_exceeded")
    assert "'more than 3" in error["message"]
