"""LLM's calls that compute vectors, over an engine that answers with what it was sent."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frontend_fakes import FakeClient, use_client, write_encoder_folder
from quire.frontend.llm import LLM
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.errors import InputError, PoolingParamsError, PromptError
from quire.ipc.params.pooling_params import PoolingParams
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.token_ids import decode_token_ids
from refusals import Refusal, refusals

EMBEDS = ("embed", "score", "token_embed")
CLASSIFIES = ("classify", "score", "token_classify")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder_folder(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def make_llm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An LLM whose engine does these tasks."""

    def make(*tasks: str, **facts: Any) -> LLM:
        values = {
            "tokenizer": str(folder),
            "model": str(folder),
            "num_gpu_blocks": 0,
            "embedding_size": 3,
            "vocab_size": 500,
        }
        client = FakeClient(lambda _request: [2], tasks=tasks, **(values | facts))
        use_client(monkeypatch, client)
        return LLM(tokenizer=str(folder))

    return make


def sent(llm: LLM) -> list[Any]:
    client: Any = llm.llm_engine._client  # pyright: ignore[reportPrivateUsage]
    return client.engine.added


@pytest.mark.parametrize(
    ("prompts", "count"),
    [("the fox", 1), (["the", "fox"], 2), ([5, 6], 1), ([[5], [6]], 2), ([], 0), ({"prompt": "fox"}, 1)],
    ids=str,
)
def test_embeddings_come_in_the_prompts_order(make_llm: Any, prompts: Any, count: int):
    llm = make_llm(*EMBEDS)
    outputs = llm.embed(prompts, use_tqdm=False)
    assert len(outputs) == count
    for output in outputs:
        ids = output.prompt_token_ids
        assert output.outputs.embedding == [sum(ids), len(ids), -1]
        assert output.outputs.hidden_size == 3
        assert (output.finished, output.finish_reason, output.num_cached_tokens) == (True, "stop", 0)
    assert [one.pooling_params.task for one in sent(llm)] == ["embed"] * count


def test_a_text_that_the_vocabulary_cannot_hold_is_refused(make_llm: Any, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise Exception("WordLevel error: Missing [UNK] token")

    llm = make_llm(*EMBEDS)
    monkeypatch.setattr(Tokenizer, "encode_texts", fail)
    with pytest.raises(
        PromptError, match=r"prompt='the fox': expected a text that can be tokenized \(WordLevel"
    ):
        llm.embed("the fox")


def test_all_other_calls_give_vllms_outputs(make_llm: Any):
    llm = make_llm(*EMBEDS, *CLASSIFIES)
    assert llm.classify([7, 5], use_tqdm=False)[0].outputs.probs == [12, 2, -1]
    (output,) = llm.encode([7, 5], pooling_task="token_embed", use_tqdm=False)
    assert output.outputs.data.shape == (2, 2)
    assert np.asarray(output.outputs.data).tolist() == [[7, 0.5], [5, 0.5]]
    (reward,) = llm.reward([7, 5], use_tqdm=False)
    assert reward.outputs.data.tolist() == [[7, 0.5], [5, 0.5]]
    assert [one.pooling_params.task for one in sent(llm)] == ["classify", "token_embed", "token_classify"]


def test_vectors_of_tokens_are_rows(make_llm: Any):
    llm = make_llm(*EMBEDS)
    (output,) = llm.encode([7, 5], pooling_task="token_embed", use_tqdm=False)
    rows = output.outputs.data
    assert (len(rows), rows[0].tolist(), rows[-1][0]) == (2, [7, 0.5], 5)
    assert [row.tolist() for row in rows] == [row.tolist() for row in rows[:]] == rows.tolist()
    assert [row.tolist() for row in rows[1:]] == [[5, 0.5]]
    array = np.array(rows)
    assert (array.dtype, array.tolist()) == (np.float32, rows.tolist())
    with pytest.raises(IndexError):
        rows[2]
    assert "outputs=PoolingOutput(shape=(2, 2))" in repr(output)
    (whole,) = llm.encode([7, 5], use_tqdm=False)
    assert repr(whole.outputs) == "PoolingOutput(shape=(3,))"


def test_encode_takes_the_params_task_and_else_embeds(make_llm: Any):
    llm = make_llm(*EMBEDS, *CLASSIFIES)
    llm.encode([5], PoolingParams(task="classify"), use_tqdm=False)
    llm.encode([5], use_tqdm=False)
    assert [one.pooling_params.task for one in sent(llm)] == ["classify", "embed"]
    with pytest.raises(
        PoolingParamsError, match="task='classify': expected absent or 'embed', which is the call's"
    ):
        llm.embed([5], pooling_params=PoolingParams(task="classify"))


def test_a_models_default_prompt_is_for_embeddings(make_llm: Any, tmp_path: Path):
    folder = write_encoder_folder(tmp_path)
    described = {"prompts": {"query": "the "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(described))
    llm = make_llm(*EMBEDS, model=str(folder))
    (with_prompt,) = llm.embed("fox", use_tqdm=False)
    (whole,) = llm.embed("the fox", prompt="", use_tqdm=False)
    assert with_prompt.prompt_token_ids == whole.prompt_token_ids
    judge = make_llm(*CLASSIFIES, model=str(folder))
    for options in ({}, {"prompt_name": "query"}):
        (output,) = judge.encode("fox", pooling_task="classify", use_tqdm=False, **options)
        assert (output.prompt_token_ids == whole.prompt_token_ids) is bool(options)


def test_params_may_be_one_a_prompt(make_llm: Any):
    llm = make_llm(*EMBEDS)
    each = [PoolingParams(use_activation=False), PoolingParams()]
    llm.embed([[5], [6]], pooling_params=each, use_tqdm=False)
    assert [one.pooling_params.is_activated for one in sent(llm)] == [False, True]
    with pytest.raises(InputError, match="pooling_params='2 of them': expected one, or 1"):
        llm.embed([5], pooling_params=each)


def test_what_a_model_cannot_do_is_said_with_what_it_can(make_llm: Any):
    llm = make_llm("classify", "token_classify")
    said = r"task='embed': expected one of what this model does: classify \(LLM.classify\), token_"
    with pytest.raises(PoolingParamsError, match=said):
        llm.embed("fox")
    with pytest.raises(PoolingParamsError, match="task='score'"):
        llm.score("fox", "fox")
    with pytest.raises(
        InputError, match=r"task='generate': expected one of what this model does: classify \(LLM.cl"
    ):
        llm.generate("fox", SamplingParams())
    with pytest.raises(InputError, match=r"task='generate': expected one of"):
        llm.chat([{"role": "user", "content": "fox"}])
    decoder = make_llm("generate", num_gpu_blocks=8)
    said = r"generate .*started with runner='generate', convert='embed' it does this too"
    with pytest.raises(PoolingParamsError, match=said):
        decoder.embed("fox")
    with pytest.raises(PoolingParamsError, match=r"\(LLM.generate\)$"):  # the words yes and no are not there
        decoder.classify("fox")


@pytest.mark.parametrize(
    ("facts", "asked", "allowed"),
    [
        ({}, 2, "absent or 3: this model's embeddings cannot be cut"),
        ({"is_matryoshka": True}, 4, "absent or an integer from 1 to 3"),
        ({"is_matryoshka": True, "matryoshka_dimensions": (1, 2)}, 4, "absent or one of 1, 2"),
    ],
)
def test_dimensions_that_the_model_does_not_have_are_refused(
    make_llm: Any, facts: dict[str, Any], asked: int, allowed: str
):
    llm = make_llm(*EMBEDS, **facts)
    with pytest.raises(PoolingParamsError, match=f"dimensions={asked}: expected {allowed}"):
        llm.embed("fox", pooling_params=PoolingParams(dimensions=asked))


def test_dimensions_that_the_model_has_are_sent(make_llm: Any):
    llm = make_llm(*EMBEDS, is_matryoshka=True)
    llm.embed("fox", pooling_params=PoolingParams(dimensions=2), use_tqdm=False)
    assert sent(llm)[0].pooling_params.dimensions == 2


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers_or_cut(make_llm: Any):
    llm = make_llm(*EMBEDS)
    for prompts, name in (("fox " * 70, "prompt"), (["fox", "fox " * 70], r"prompts\[1\]")):
        with pytest.raises(
            PromptError, match=rf"{name}='72 tokens': expected at most 64 \(max_model_len=64\)"
        ):
            llm.embed(prompts)
    assert len(llm.embed("fox " * 62, use_tqdm=False)[0].prompt_token_ids) == 64  # all of it
    for most, count in ((-1, 64), (9, 9)):
        (output,) = llm.embed("fox " * 70, truncate_prompt_tokens=most, use_tqdm=False)
        assert len(output.prompt_token_ids) == count
        assert (output.prompt_token_ids[0], output.prompt_token_ids[-1]) == (2, 3)  # [CLS] and [SEP] stay
    params = PoolingParams(truncate_prompt_tokens=2, truncation_side="left")
    assert llm.embed([[4, 5, 6]], pooling_params=params, use_tqdm=False)[0].prompt_token_ids == [5, 6]
    assert sent(llm)[-1].pooling_params == PoolingParams(task="embed")  # the rest has been done
    with pytest.raises(PoolingParamsError, match="=65: expected -1, or from 1 to max_model_len=64"):
        llm.embed("fox", truncate_prompt_tokens=65)


def test_arguments_of_vllm_alone_may_be_none_and_are_refused_by_name(make_llm: Any):
    llm = make_llm(*EMBEDS)
    llm.embed([5], tokenization_kwargs=None, lora_request=None, use_tqdm=False)
    for name, value, said in (
        ("tokenization_kwargs", {"truncation": True}, "expected None: truncate_prompt_tokens cuts a prompt"),
        ("lora_request", "one", "expected None: Quire has no LoRA adapters yet"),
        ("promptname", "query", "no such argument, did you mean 'prompt_name'?"),
    ):
        for call in llm.embed, llm.encode, llm.classify:
            with pytest.raises(InputError) as caught:
                call([5], **{name: value})
            assert str(caught.value).startswith(f"{name}={value!r}: {said}")


def test_bad_prompts_are_refused_before_anything_is_sent(make_llm: Any):
    llm = make_llm(*EMBEDS)
    for prompts, said in (
        (["fox", ""], r"prompts\[1\]=''"),
        ([[1], [9999]], r"prompts\[1\]=9999: expected token ids from 0 to 499"),
        (["\ud800"], r"prompts\[0\]=.* UTF-8"),
        ([[]], r"prompts\[0\]=\[\]: expected at least one token"),
        (5, "prompt=5: expected a text, a list of token ids"),
    ):
        with pytest.raises(PromptError, match=said):
            llm.embed(prompts)
    with pytest.raises(
        InputError, match="='query': expected absent or the name of a prompt of this model: none"
    ):
        llm.embed("fox", prompt_name="query")
    with pytest.raises(InputError, match=r"prompt_name=\['query'\]: expected absent or the name"):
        llm.embed("fox", prompt_name=["query"])
    with pytest.raises(InputError, match="priority='1 entries'"):
        llm.embed(["fox", "fox"], priority=[1])
    assert sent(llm) == []


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [("the", "fox", 1), ("the", ["fox", "dog"], 2), (["the"], ["fox"], 1), (["the", "a"], ["x", "fox"], 2)],
)
def test_pairs_are_judged_together_by_a_model_that_can(make_llm: Any, first: Any, second: Any, count: int):
    llm = make_llm(*CLASSIFIES)
    scores = llm.score(first, second, use_tqdm=False)
    assert len(scores) == count
    for score, request in zip(scores, sent(llm), strict=True):
        ids = score.prompt_token_ids
        assert score.outputs.score == sum(ids)
        assert request.type_start == ids.index(3) + 1  # behind the first [SEP]
        assert request.pooling_params.task == "classify"


def test_a_model_without_types_of_tokens_is_not_told_of_them(make_llm: Any):
    llm = make_llm(*CLASSIFIES, has_token_types=False)
    llm.score("the", "fox", use_tqdm=False)
    assert sent(llm)[0].type_start is None


def test_a_decoders_classifier_passes_over_padding_at_the_end(make_llm: Any, tmp_path: Path):
    folder = write_encoder_folder(tmp_path)
    config = {"architectures": ["LlamaForSequenceClassification"], "pad_token_id": 3}
    (folder / "config.json").write_text(json.dumps(config))
    llm = make_llm(*CLASSIFIES, model=str(folder))
    classified = llm.classify([[7, 3, 5, 3, 3], [3, 3], [3], [5]], use_tqdm=False)
    assert [one.prompt_token_ids for one in classified] == [[7, 3, 5], [3], [3], [5]]
    assert [decode_token_ids(one.prompt_token_ids) for one in sent(llm)] == [[7, 3, 5], [3], [3], [5]]
    (score,) = llm.score("the", "fox", use_tqdm=False)
    assert score.prompt_token_ids[-1] != 3  # [SEP]
    (each,) = llm.encode([7, 3], pooling_task="token_classify", use_tqdm=False)
    assert each.prompt_token_ids == [7, 3]
    for changed in {"architectures": ["BertForSequenceClassification"]}, {"is_causal": False}:
        (folder / "config.json").write_text(json.dumps(config | changed))
        (whole,) = make_llm(*CLASSIFIES, model=str(folder)).classify([7, 3], use_tqdm=False)
        assert whole.prompt_token_ids == [7, 3]


def test_other_models_compare_embeddings_and_embed_a_query_once(make_llm: Any):
    llm = make_llm(*EMBEDS)
    scores = llm.score("the fox", ["the fox", "dog"], use_tqdm=False)
    assert len(sent(llm)) == 3
    assert math.isclose(scores[0].outputs.score, 1.0)
    both = [decode_token_ids(sent(llm)[place].prompt_token_ids) for place in (0, 2)]
    first, second = ([sum(ids), len(ids), -1] for ids in both)
    expected = np.dot(first, second) / np.linalg.norm(first) / np.linalg.norm(second)
    assert math.isclose(scores[1].outputs.score, float(expected), rel_tol=1e-6)
    assert scores[1].request_id == "0_2"


@pytest.mark.parametrize("tasks", [EMBEDS, CLASSIFIES], ids=["embed", "classify"])
def test_an_empty_text_is_refused_whoever_names_it(make_llm: Any, tasks: tuple[str, ...]):
    with pytest.raises(InputError, match="=''"):
        make_llm(*tasks).score("", "b")


@refusals("scored_texts")
@pytest.mark.parametrize("tasks", [EMBEDS, CLASSIFIES], ids=["embed", "classify"])
def test_numbers_of_texts_that_do_not_go_together_are_refused(
    make_llm: Any, tasks: tuple[str, ...], refusal: Refusal
):
    llm = make_llm(*tasks)
    refusal.check(lambda texts: llm.score(*texts))
    assert sent(llm) == []


def test_of_a_pair_that_is_too_long_the_document_is_cut_if_asked(make_llm: Any):
    llm = make_llm(*CLASSIFIES)
    with pytest.raises(PromptError, match=r"data_2\[1\]='74 tokens': expected at most 64"):
        llm.score("the", ["fox", "fox " * 70])
    (score,) = llm.score("the", "fox " * 70, truncate_prompt_tokens=-1, use_tqdm=False)
    assert len(score.prompt_token_ids) == 64


def test_a_request_that_the_engine_fails_comes_back_with_its_cause(make_llm: Any):
    llm = make_llm(*EMBEDS)
    engine: LLMEngine = llm.llm_engine
    fake: Any = engine._client.engine  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    added = fake.add

    def add(request: Any) -> None:
        added(request)
        if len(fake.added) == 2:
            fake.failing[request.request_id] = "out of luck"

    fake.add = add
    good, bad = llm.embed(["the", "fox"], use_tqdm=False)
    assert (good.error, good.outputs.embedding[2]) == (None, -1)
    assert (bad.error, bad.finish_reason, bad.outputs.embedding) == ("out of luck", "error", [])
    fake.added.clear()
    first, second = llm.score("the", ["fox", "dog"], use_tqdm=False)
    assert first.error == "out of luck"
    assert math.isnan(first.outputs.score)
    assert second.error is None


def test_outputs_are_plain_to_compare_and_to_show(make_llm: Any):
    llm = make_llm(*EMBEDS)
    first, again = (llm.embed([4], use_tqdm=False)[0] for _ in range(2))
    assert first.outputs == again.outputs
    assert "EmbeddingRequestOutput" in repr(first)
    assert "outputs=EmbeddingOutput(hidden_size=3)" in repr(first)
    assert dataclasses.is_dataclass(first)
