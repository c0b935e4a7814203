"""/score and the routes that rank, over a scripted engine: a cross-encoder's and an embedding model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai_fakes import AsgiClient, FakeLLM, run_with_app
from quire.frontend.http.limits import Limits
from quire.frontend.http.options import ServerOptions
from quire.frontend.http.serving import Serving
from quire.frontend.http.text_process.jobs import PoolingJob
from quire.frontend.requests.vectors.encoder import TextPair
from quire.frontend.text.tokenizer import Tokenizer

# A fake score is the number of tokens, so that the longest document is the best one.
DOCUMENTS = ["a", "a much longer document", "a longer document"]
ASKED: dict[str, Any] = {"model": "fake", "query": "Which?", "documents": DOCUMENTS}
ROUTES = ["/rerank", "/v1/rerank", "/v2/rerank"]


def run_reranker(scenario: Any, options: ServerOptions | None = None, **facts: Any) -> None:
    reranker: dict[str, Any] = {"tasks": ("classify", "token_classify", "score")}
    run_with_app(scenario, options, **(reranker | facts))


@pytest.mark.parametrize("path", ROUTES)
def test_documents_come_back_the_best_first(path: str) -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        body = (await client.post(path, ASKED | {"top_n": 2})).json
        assert [result["index"] for result in body["results"]] == [1, 2]
        assert body["results"][0]["relevance_score"] > body["results"][1]["relevance_score"]
        texts = [result.get("document") for result in body["results"]]
        assert texts == (
            [None] * 2 if path == "/v2/rerank" else [{"text": DOCUMENTS[1]}, {"text": DOCUMENTS[2]}]
        )
        assert body["usage"]["total_tokens"] == body["meta"]["billed_units"]["input_tokens"] > 0
        (call,) = llm.pooled
        assert call.params.task == "classify"
        assert call.prompts == [TextPair("Which?", document) for document in DOCUMENTS]

    run_reranker(scenario)


@pytest.mark.parametrize(
    ("path", "asked", "shows"),
    [
        ("/v1/rerank", None, True),
        ("/v1/rerank", False, False),
        ("/v2/rerank", None, False),
        ("/v2/rerank", True, True),
    ],
)
def test_texts_are_shown_as_the_clients_of_a_route_expect(path: str, asked: bool | None, shows: bool) -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        fields = {"documents": [{"text": "a"}], "return_documents": asked}
        (result,) = (await client.post(path, ASKED | fields)).json["results"]
        assert result.get("document") == ({"text": "a"} if shows else None)

    run_reranker(scenario)


def test_what_has_texts_is_answered_as_tei_does() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        fields = {"query": "Which?", "texts": DOCUMENTS}
        plain = (await client.post("/rerank", fields)).json
        assert [(set(rank), rank["index"]) for rank in plain] == [({"index", "score"}, i) for i in (1, 2, 0)]
        assert llm.pooled[0].params.use_activation is None
        shown = (await client.post("/rerank", fields | {"raw_scores": True, "return_text": True})).json
        assert [rank["text"] for rank in shown] == [DOCUMENTS[1], DOCUMENTS[2], DOCUMENTS[0]]
        assert llm.pooled[1].params.use_activation is False
        best = (await client.post("/rerank", fields | {"top_n": 2})).json  # litellm asks TEI's so
        assert best == plain[:2]
        long = fields | {"texts": ["word " * 200]}
        assert (await client.post("/rerank", long)).error["param"] == "texts[0]"
        assert (await client.post("/rerank", long | {"truncate": True})).json[0]["score"] == 128.0

    run_reranker(scenario)


def test_many_documents_are_joined_with_their_query_by_one_job() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, serving: Serving) -> None:
        documents = [f"Document number {number}" for number in range(40)]
        many = (await client.post("/v1/rerank", ASKED | {"documents": documents})).json["results"]
        ((job, _),) = serving.text.jobs  # type: ignore[attr-defined]
        assert isinstance(job, PoolingJob)
        assert job.queries == ["Which?"]
        few = (await client.post("/v1/rerank", ASKED | {"documents": documents[7:8]})).json["results"]
        assert next(one for one in many if one["index"] == 7) == few[0] | {"index": 7}
        assert len(llm.pooled) == 2

    run_reranker(scenario)


def test_a_query_that_is_too_long_is_refused_before_it_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode_pairs", lambda *_: pytest.fail("it was joined"))

    async def scenario(_: FakeLLM, client: AsgiClient, __: Serving) -> None:
        asked = {"query": "word " * 300, "documents": ["a"] * 40, "truncate_prompt_tokens": -1}
        error = (await client.post("/v1/rerank", ASKED | asked)).error
        assert (error["param"], error["code"]) == ("documents[0]", "context_length_exceeded")
        assert "'more than 3" in error["message"]

    run_reranker(scenario)


def test_a_document_is_cut_to_its_own_tokens() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        cut = await client.post(
            "/v1/rerank", ASKED | {"documents": ["one two three four"] * 2, "max_tokens_per_doc": 2}
        )
        first = await client.post(
            "/v1/rerank",
            ASKED
            | {"documents": [llm.tokenizer.decode(llm.tokenizer.encode("one two three four", False)[:2])]},
        )
        scores = [result["relevance_score"] for result in cut.json["results"]]
        assert scores == [first.json["results"][0]["relevance_score"]] * 2

    run_reranker(scenario)


LONG = {"query": "Which?", "documents": ["a", "word " * 200]}


def test_cohere_s_second_version_cuts_documents_and_no_query_by_itself() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        cut, whole = [(await client.post(path, ASKED | LONG)) for path in ("/v2/rerank", "/v1/rerank")]
        assert cut.json["results"][0]["relevance_score"] == 128.0
        assert "truncate_prompt_tokens=-1" in whole.error["message"]
        asked = await client.post("/v2/rerank", ASKED | LONG | {"truncate_prompt_tokens": 60})
        assert asked.json["results"][0]["relevance_score"] == 60.0
        error = (await client.post("/v2/rerank", ASKED | {"query": "word " * 200})).error
        assert "a query is not cut" in error["message"]

    run_reranker(scenario)


def test_an_embedding_model_reads_queries_whole_and_cut_documents() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        for fields in ({}, {"max_tokens_per_doc": 2}):
            await client.post("/v2/rerank", ASKED | LONG | {"query": "One of many words?"} | fields)
        sizes = [[len(prompt.token_ids) for prompt in call.prompts] for call in llm.pooled]
        (query, *_, cut), (same, *_, cut_more) = sizes
        assert query == same > 4
        assert cut == 128 > cut_more
        error = (await client.post("/v2/rerank", ASKED | {"query": "word " * 200})).error
        assert (error["param"], error["code"]) == ("query", "context_length_exceeded")

    run_with_app(scenario, tasks=("embed", "score"), embedding_size=8)


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_pairs_are_scored_in_their_order(names: tuple[str, str]) -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        for path, first, second, pairs in (
            ("/score", "a", "b", [("a", "b")]),
            ("/v1/score", "a", ["b", {"text": "c c"}], [("a", "b"), ("a", "c c")]),
            ("/score", ["a", "d"], ["b", "c"], [("a", "b"), ("d", "c")]),
        ):
            body = (await client.post(path, dict(zip(names, (first, second), strict=True)))).json
            assert llm.pooled[-1].prompts == [TextPair(*pair) for pair in pairs]
            assert [(one["index"], one["object"]) for one in body["data"]] == [
                (place, "score") for place in range(len(pairs))
            ]
            assert body["usage"]["total_tokens"] == sum(one["score"] for one in body["data"])

    run_reranker(scenario)


def test_an_embedding_model_scores_by_the_cosine_of_vectors_behind_its_prompts(tmp_path: Path) -> None:
    prompts = {"query": "find: ", "document": "text: "}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))

    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        body = (await client.post("/score", {"text_1": "a", "text_2": ["a", "b b b"]})).json
        (call,) = llm.pooled
        assert call.prompts == ["find: a", "text: a", "text: b b b"]
        assert all(-1.0 <= one["score"] <= 1.000001 for one in body["data"])
        refused = (await client.post("/score", {"text_1": "a", "text_2": ["a", ""]})).error
        assert refused["param"] == "text_2[1]"

    run_with_app(scenario, tasks=("embed", "score"), embedding_size=8, model=str(tmp_path))


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/rerank", {"documents": []}, "documents", "at least one"),
    ("/v1/rerank", {"documents": ["a", ""]}, "documents[1]", "not empty"),
    ("/v1/rerank", {"documents": ["a"] * 6}, "documents", "at most 5 (max_inputs)"),
    ("/v1/rerank", {"documents": ["word " * 200]}, "documents[0]", "max_model_len=128"),
    ("/v1/rerank", {"documents": ["word " * 2000]}, "documents[0]", "max_model_len=128"),
    ("/v1/rerank", {"documents": [1]}, "documents[0]", "expected"),
    ("/v1/rerank", {"top_n": 0}, "top_n", ">= 1"),
    ("/v1/rerank", {"rank_fields": ["title"]}, "rank_fields", "['text']"),
    ("/v2/rerank", {"relevant_spans": {"a": 1}}, "relevant_spans", "none"),
    ("/v2/rerank", {"texts": ["a"]}, "texts", "no such field"),
    ("/rerank", {"documents": None}, "documents", "'texts'"),
    ("/rerank", {"texts": ["a"]}, "documents", "only without 'texts'"),
    ("/rerank", {"raw_scores": True}, "raw_scores", "only with 'texts'"),
    ("/score", {"text_1": "a"}, "text_2", "'documents'"),
    ("/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1", "'queries'"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "as many as text_2 (1)"),
    ("/score", {"text_1": "", "text_2": "a"}, "text_1", "not empty"),
    ("/v1/embeddings", {"input": "a"}, "model", "/rerank"),
]


@pytest.mark.parametrize(("path", "body", "field", "allowed"), BAD)
def test_what_cannot_be_ranked_is_400_with_field_value_and_what_is_allowed(
    path: str, body: dict[str, Any], field: str, allowed: str
) -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(path, (ASKED if "rerank" in path else {}) | body)
        assert (answer.status, answer.error["param"]) == (400, field)
        assert allowed in answer.error["message"]

    run_reranker(scenario, ServerOptions(limits=Limits(max_inputs=5)))
