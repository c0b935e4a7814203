"""/v1/embeddings, /pooling, /classify, /v2/embed and TEI's routes over a scripted engine."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from openai_fakes import AsgiClient, FakeLLM, run_with_app
from quire.frontend.http.limits import Limits
from quire.frontend.http.options import ServerOptions
from quire.frontend.http.serving import Serving
from quire.frontend.http.text_process.jobs import PoolingJob
from quire.frontend.requests.prompts import Truncation
from quire.frontend.requests.vectors.encoder import EncodedText
from quire.ipc.errors import RequestFailedError
from quire.ipc.params.request_options import RequestOptions

PATH = "/v1/embeddings"
ENCODER: dict[str, Any] = {"tasks": ("embed", "token_embed", "score"), "embedding_size": 4}


def run_encoder(scenario: Any, options: ServerOptions | None = None, **facts: Any) -> None:
    run_with_app(scenario, options, **(ENCODER | facts))


def expected(ids: list[int], width: int = 4) -> list[float]:
    return [float(number) for number in [len(ids), *ids, 0, 0, 0, 0][:width]]


def test_texts_become_vectors_in_their_order_with_usage() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(PATH, {"model": "fake", "input": ["One", "Two words"], "user": "me"})
        ids = [llm.tokenizer.encode(text) for text in ("One", "Two words")]
        body = answer.json
        assert answer.headers["x-request-id"] == body["id"] == llm.pooled[0].request_id
        assert (body["object"], body["model"]) == ("list", "fake")
        for place, item in enumerate(body["data"]):
            assert item == {"object": "embedding", "index": place, "embedding": expected(ids[place])}
        num_tokens = sum(map(len, ids))
        assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert llm.pooled[0].params.task == "embed"

    run_encoder(scenario)


def test_base64_is_the_engines_bytes() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        body = (await client.post(PATH, {"input": "One", "encoding_format": "base64"})).json
        raw = base64.b64decode(body["data"][0]["embedding"])
        assert struct.unpack("<4f", raw) == tuple(expected(llm.tokenizer.encode("One")))

    run_encoder(scenario)


def test_token_ids_alone_or_in_lists_are_taken_as_they_are() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, serving: Serving) -> None:
        for given, wanted in (([5, 6], [[5, 6]]), ([[5, 6], [7]], [[5, 6], [7]])):
            body = (await client.post(PATH, {"input": given})).json
            assert [item["embedding"] for item in body["data"]] == [expected(ids) for ids in wanted]
        assert serving.text.jobs == []  # type: ignore[attr-defined]

    run_encoder(scenario)


def test_a_conversation_is_embedded_by_the_chat_template() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        body = (await client.post(PATH, {"messages": [{"role": "user", "content": "Hi"}]})).json
        ids = llm.pooled[0].prompts[0]
        assert "<|im_start|>user\nHi" in llm.tokenizer.decode(list(ids))  # type: ignore[arg-type]
        assert body["usage"]["prompt_tokens"] == len(ids)

    run_encoder(scenario)


def test_many_texts_are_tokenized_by_one_job_beside_the_event_loop() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, serving: Serving) -> None:
        texts = [f"Text number {number}" for number in range(300)]
        body = (await client.post(PATH, {"input": [*texts, texts[0]]})).json
        assert [len(item["embedding"]) for item in body["data"]] == [4] * 301
        ((job, _),) = serving.text.jobs  # type: ignore[attr-defined]
        assert isinstance(job, PoolingJob)
        assert job.names[299] == "input[299]"
        assert all(isinstance(one, EncodedText) for one in llm.pooled[0].prompts)
        assert body["data"][7]["embedding"] == expected(llm.tokenizer.encode(texts[7]))
        assert len(llm.pooled) == 1

    run_encoder(scenario)


@pytest.mark.parametrize("num_texts", [1, 20], ids=["inline", "by a job"])
@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "default: "),
        ({"prompt_name": "query"}, "find: "),
        ({"input_type": "search_query"}, "find: "),
        ({"input_type": "document"}, "text: "),
        ({"input_type": "clustering"}, "default: "),
    ],
)
def test_the_models_prompt_goes_before_each_text(
    tmp_path: Path, num_texts: int, fields: dict[str, Any], prompt: str
) -> None:
    prompts = {"query": "find: ", "passage": "text: ", "own": "default: "}
    described = {"prompts": prompts, "default_prompt_name": "own"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(described))

    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        body = (await client.post(PATH, {"input": ["One"] * num_texts} | fields)).json
        wanted = expected(llm.tokenizer.encode(prompt + "One"))
        assert [item["embedding"] for item in body["data"]] == [wanted] * num_texts

    run_encoder(scenario, model=str(tmp_path))


def test_a_text_process_cuts_to_what_the_kv_cache_holds() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, serving: Serving) -> None:
        text = "word " * 900
        for given in ({"input": text}, {"messages": [{"role": "user", "content": text}]}):
            body = (await client.post(PATH, given | {"truncate_prompt_tokens": -1})).json
            assert body["usage"]["prompt_tokens"] == 96
            job, _ = serving.text.jobs[-1]  # type: ignore[attr-defined]
            assert job.truncation == Truncation(96, keeps_start=True)

    run_encoder(scenario, num_gpu_blocks=6, block_size=16)


@pytest.mark.parametrize("text", ["word " * 200, "word " * 900], ids=["inline", "by a job"])
def test_a_long_text_is_cut_when_that_is_asked_and_else_refused_with_both_numbers(text: str) -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        ids = llm.tokenizer.encode(text)
        refused = (await client.post(PATH, {"input": text})).error
        assert refused["param"] == "input"
        assert f"{len(ids)} tokens" in refused["message"]
        assert "at most 128 (max_model_len=128)" in refused["message"]
        for most, num_tokens in ((-1, 128), (5, 5)):
            body = (await client.post(PATH, {"input": text, "truncate_prompt_tokens": most})).json
            assert body["usage"]["prompt_tokens"] == num_tokens
            assert body["data"][0]["embedding"] == expected(ids[:num_tokens])[:1] + expected(ids)[1:]
        fields = {"truncate_prompt_tokens": 3, "truncation_side": "left"}
        body = (await client.post(PATH, {"input": text} | fields)).json
        assert body["data"][0]["embedding"] == expected(ids[-3:])

    run_encoder(scenario)


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    (PATH, {"input": ""}, "input", "not empty"),
    (PATH, {"input": []}, "input", "at least one"),
    (PATH, {"input": ["One", ""]}, "input[1]", "not empty"),
    (PATH, {"input": [[]]}, "input[0]", "at least one token"),
    (PATH, {"input": [1, "One"]}, "input", "a text, texts, token ids"),
    (PATH, {"input": [[1, 5000]]}, "input[0]", "token ids from 0 to 2047"),
    (PATH, {"input": [[1, 5000]]}, "input[0]", "does the client tokenize for OpenAI's?"),
    (PATH, {"input": [2**40]}, "input", "does the client tokenize for OpenAI's?"),
    (PATH, {"input": ["One"] * 11}, "input", "at most 10 (max_inputs)"),
    (PATH, {}, "input", "input: required (a text, texts or token ids; or 'messages' instead)"),
    ("/v2/embed", {}, "texts", "texts: required"),
    (
        PATH,
        {"input": "One", "messages": [{"role": "user", "content": "Hi"}]},
        "input",
        "absent with 'messages'",
    ),
    (PATH, {"input": 5}, "input", "expected"),
    (PATH, {"input": "One", "dimensions": 2}, "dimensions", "no Matryoshka"),
    (PATH, {"input": "One", "dimensions": 0}, "dimensions", ">= 1"),
    (PATH, {"input": "One", "encoding_format": "int8"}, "encoding_format", '"float" or "base64"'),
    (PATH, {"input": "One", "prompt_name": "query"}, "prompt_name", "prompt"),
    (PATH, {"input": "One", "input_type": "image"}, "input_type", "'query'"),
    (PATH, {"input": "One", "truncate_prompt_tokens": 129}, "truncate_prompt_tokens", "max_model_len=128"),
    (PATH, {"input": "One", "truncation_side": "middle"}, "truncation_side", "left"),
    (PATH, {"input": "One", "temperature": 1}, "temperature", "no such field"),
    ("/pooling", {"input": "One", "task": "classify"}, "model", "/v1/embeddings"),
    ("/pooling", {"input": "One", "task": "score"}, "task", '"token_embed"'),
    ("/classify", {"input": "One"}, "model", "this one can embed"),
    ("/v1/completions", {"prompt": "One"}, "model", "this one can embed, token_embed, score: /v1/embeddings"),
    ("/v2/embed", {"texts": ["One", ""]}, "texts[1]", "not empty"),
    ("/v2/embed", {"texts": []}, "texts", "at least one"),
    ("/v2/embed", {"texts": ["One"], "embedding_types": ["float", "int8"]}, "embedding_types[1]", "base64"),
    ("/v2/embed", {"texts": ["One"], "output_dimension": 2}, "output_dimension", "no Matryoshka"),
    ("/v2/embed", {"texts": ["One"], "images": ["x"]}, "images", "only text"),
    ("/v2/embed", {"texts": ["One"], "max_tokens": 500}, "max_tokens", "max_model_len=128"),
    ("/embed", {"inputs": []}, "inputs", "at least one"),
    ("/embed", {"inputs": ["One"], "dimensions": 2}, "dimensions", "no Matryoshka"),
    (
        "/similarity",
        {"inputs": {"source_sentence": "", "sentences": ["One"]}},
        "inputs.source_sentence",
        "empty",
    ),
]


@pytest.mark.parametrize(("path", "body", "field", "allowed"), BAD)
def test_what_cannot_be_done_is_400_with_field_value_and_what_is_allowed(
    path: str, body: dict[str, Any], field: str, allowed: str
) -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(path, body)
        assert (answer.status, answer.error["param"]) == (400, field)
        assert answer.error["message"].startswith(field)
        assert allowed in answer.error["message"]

    run_encoder(scenario, ServerOptions(limits=Limits(max_inputs=10)))


def test_another_model_is_404_also_for_what_this_one_cannot_do() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        for path, fields in ((PATH, {"input": "One"}), ("/v1/completions", {"prompt": "One"})):
            assert (await client.post(path, fields | {"model": "other"})).status == 404

    run_encoder(scenario)


def test_a_model_that_generates_says_which_routes_it_has() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(PATH, {"input": "One"})
        assert (answer.status, answer.error["code"]) == (400, "unsupported_task")
        assert "this one can generate: /v1/chat/completions, /v1/completions" in answer.error["message"]
        assert "/pooling" not in answer.error["message"]

    run_with_app(scenario)


def test_what_a_model_can_do_is_listed() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        (card,) = (await client.get("/v1/models")).json["data"]
        assert (card["tasks"], card["embedding_size"]) == (["embed", "token_embed", "score"], 4)
        info = (await client.get("/info")).json
        assert (info["model_type"], info["max_input_length"]) == ({"embedding": {}}, 128)
        assert info["max_client_batch_size"] == 2048

    run_encoder(scenario)


def test_a_matryoshka_models_vectors_are_cut() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        body = (await client.post(PATH, {"input": "One", "dimensions": 2})).json
        assert len(body["data"][0]["embedding"]) == 2
        assert (await client.post(PATH, {"input": "One", "dimensions": 3})).status == 400

    run_encoder(scenario, is_matryoshka=True, matryoshka_dimensions=(2, 4))


def test_each_token_has_a_vector_where_that_is_asked() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        fields = {"input": [[7, 8, 9], [5]], "task": "token_embed"}
        body = (await client.post("/pooling", fields)).json
        assert [item["data"] for item in body["data"]] == [[[7.0] * 4, [8.0] * 4, [9.0] * 4], [[5.0] * 4]]
        assert body["data"][1]["object"] == "pooling"
        body = (await client.post("/pooling", fields | {"encoding_format": "base64"})).json
        assert len(base64.b64decode(body["data"][0]["data"])) == 3 * 4 * 4
        assert (await client.post("/pooling", {"input": "One"})).json["data"][0]["data"]
        assert llm.pooled[-1].params.task == "embed"

    run_encoder(scenario)


def test_classes_are_named_by_the_models_labels(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {"0": "bad", "1": "good"}}))

    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        llm.num_classes = 2
        body = (await client.post("/classify", {"input": [[7], [0]]})).json
        found = [(item["label"], item["probs"], item["num_classes"]) for item in body["data"]]
        assert found == [("good", [1.0, 7.0], 2), ("bad", [1.0, 0.0], 2)]
        info = (await client.get("/info")).json
        assert info["model_type"]["classifier"]["label2id"] == {"bad": 0, "good": 1}

    run_with_app(scenario, tasks=("classify", "token_classify"), model=str(tmp_path))


def test_a_classifiers_answer_is_priced_by_its_labels() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        assert (await client.post("/classify", {"input": ["One"]})).status == 200
        large = await client.post("/classify", {"input": ["One", "Two"]})
        assert (large.status, large.error["code"]) == (413, "answer_too_large")

    options = ServerOptions(limits=Limits(max_result_bytes=2 * 500 * 48 - 1))
    run_with_app(scenario, options, tasks=("classify",), num_labels=500)


def test_coheres_client_gets_each_form_that_it_asks_for() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        text = "word " * 200
        fields = {"texts": ["One", text], "input_type": "search_document"}
        forms = ["float", "base64"]
        body = (await client.post("/v2/embed", fields | {"embedding_types": forms, "model": "fake"})).json
        assert list(body["embeddings"]) == forms
        floats, packed = body["embeddings"]["float"], body["embeddings"]["base64"]
        assert floats[0] == expected(llm.tokenizer.encode("One"))
        assert [list(struct.unpack("<4f", base64.b64decode(one))) for one in packed] == floats
        assert floats[1][0] == 128.0  # it is cut, as Cohere does
        assert body["texts"] == ["One", text]
        assert body["meta"]["billed_units"]["input_tokens"] == 128 + len(llm.tokenizer.encode("One"))
        refused = await client.post("/v2/embed", fields | {"truncate": "NONE"})
        assert refused.error["param"] == "texts[1]"

    run_encoder(scenario)


def test_teis_client_gets_bare_lists() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        wanted = expected(llm.tokenizer.encode("One"))
        for given in ("One", ["One"]):
            assert (await client.post("/embed", {"inputs": given})).json == [wanted]
        fields = {"inputs": "word " * 200, "truncate": True, "truncation_direction": "Left"}
        ((length, *_rest),) = (await client.post("/embed", fields | {"normalize": False})).json
        assert length == 128.0
        assert llm.pooled[-1].params.use_activation is False
        assert llm.pooled[-1].params.truncation_side == "left"
        fields = {"inputs": {"source_sentence": "One", "sentences": ["One", "Two words"]}}
        first, second = (await client.post("/similarity", fields)).json
        assert first == pytest.approx(1.0)
        assert second < 1.0

    run_encoder(scenario)


def test_a_client_that_leaves_ends_its_request() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, serving: Serving) -> None:
        llm.gate.clear()
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(client.post(PATH, {"input": ["One", "Two"]}))
            await llm.started.wait()
            assert serving.room.num_sequences == 1  # sixteen vectors take one place
            client.leave()
            assert (await asking).status == 499
        assert llm.num_pooled_ends == 1

    run_encoder(scenario)


def test_texts_that_are_being_tokenized_have_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, serving: Serving) -> None:
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

    run_encoder(scenario, ServerOptions(max_waiting=0))


def test_overload_is_429_and_what_the_engine_fails_is_its_error() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        llm.error = RequestFailedError("no room", "overloaded")
        assert (await client.post(PATH, {"input": "One"})).status == 429
        llm.error = RequestFailedError("it waited too long", "queue_timeout")
        assert (await client.post(PATH, {"input": "One"})).status == 503
        llm.error = RequestFailedError("its time was over", None)
        late = await client.post(PATH, {"input": "One"})
        assert (late.status, late.error["code"]) == (408, "aborted")
        large = await client.post("/pooling", {"input": [[5] * 128] * 4, "task": "token_embed"})
        assert (large.status, large.error["code"]) == (413, "answer_too_large")

    run_encoder(scenario, ServerOptions(limits=Limits(max_result_bytes=4 * 128 * 4 * 48 - 1)))


def test_callers_are_told_apart_in_the_engine() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        fields = {"input": "One", "priority": -3, "timeout_s": 5.0, "cache_salt": "mine"}
        await client.post(PATH, fields, x_request_id="batch-7")
        (call,) = llm.pooled
        names = [call.request_id, "batch-7"]
        assert call.options == RequestOptions(-3, "mine", "/local", timeout_s=5.0, names=names)

    run_encoder(scenario)


def test_of_an_encoder_without_a_chat_template_texts_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, serving: Serving) -> None:
        monkeypatch.setattr(serving.tokenizer, "_template", None)
        answer = await client.post(PATH, {"messages": [{"role": "user", "content": "Hi"}]})
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert "texts instead: this model has no chat template" in answer.error["message"]

    run_encoder(scenario)
