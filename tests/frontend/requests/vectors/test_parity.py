"""Vectors of texts and pairs against transformers, on random tiny models with tokenizers of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from frontend_fakes import CORPUS, write_encoder_folder
from quire import LLM, PoolingParams, SamplingParams
from quire.ipc.errors import InputError

TEXTS = [*CORPUS, "fox", "The Quick little DOG " * 5]
FLOAT32 = 1e-5


def save_model(folder: Path, kind: str, **fields: Any) -> Any:
    """A random tiny BERT beside a tokenizer of its own."""
    write_encoder_folder(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        **fields,
    )
    model = getattr(transformers, kind)(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def start(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", distributed_executor_backend="uni", num_threads=1)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any, Any]]:
    """A cross-encoder: its engine, transformers' model and tokenizer."""
    folder = tmp_path_factory.mktemp("judge")
    model = save_model(folder, "BertForSequenceClassification", num_labels=1)
    with start(folder) as llm:
        yield llm, model, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any, Any]]:
    """A model of sentence-transformers, with prompts, which takes 40 tokens."""
    folder = tmp_path_factory.mktemp("sentences")
    model = save_model(folder, "BertModel")
    names = ("Transformer", "Pooling", "Normalize")
    modules = [
        {
            "idx": n,
            "name": str(n),
            "path": f"{n}_{name}" if n else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for n, name in enumerate(names)
    ]
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling").mkdir()
    for name, content in {
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": True},
        "config_sentence_transformers.json": {"prompts": {"query": "the little "}},
    }.items():
        (folder / name).write_text(json.dumps(content))
    with start(folder) as llm:
        yield llm, model, transformers.AutoTokenizer.from_pretrained(folder)


def compute_score(model: Any, tokenizer: Any, *texts: str, most: int | None = None) -> float:
    cut = {"truncation": "only_second", "max_length": most} if most else {}
    encoded = tokenizer(*texts, return_token_type_ids=True, return_tensors="pt", **cut)
    with torch.no_grad():
        logits = model(encoded["input_ids"], token_type_ids=encoded["token_type_ids"]).logits
    return float(torch.sigmoid(logits[0, 0]))


def compute_embedding(model: Any, tokenizer: Any, text: str, most: int = 40) -> torch.Tensor:
    ids = tokenizer(text.lower(), truncation=True, max_length=most, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        mean = model(ids).last_hidden_state[0].mean(0)
    return mean / mean.norm()


def test_pairs_are_scored_as_transformers_does_with_types(judged: tuple[LLM, Any, Any]):
    llm, model, tokenizer = judged
    documents = TEXTS[1:]
    found = [one.outputs.score for one in llm.score(TEXTS[0], documents, use_tqdm=False)]
    assert found == pytest.approx(
        [compute_score(model, tokenizer, TEXTS[0], text) for text in documents], abs=FLOAT32
    )
    assert len(set(found)) == len(found)


def test_of_a_long_pair_the_document_is_cut_as_transformers_does(judged: tuple[LLM, Any, Any]):
    llm, model, tokenizer = judged
    (cut,) = llm.score(TEXTS[0], TEXTS[-1] * 9, truncate_prompt_tokens=-1, use_tqdm=False)
    expected = compute_score(model, tokenizer, TEXTS[0], TEXTS[-1] * 9, most=64)
    assert cut.outputs.score == pytest.approx(expected, abs=FLOAT32)
    with pytest.raises(InputError, match=r"data_2='\d+ tokens': expected at most 64 \(max_model_len=64\)"):
        llm.score(TEXTS[0], TEXTS[-1] * 9)


def test_single_texts_are_classified_and_raw_if_asked(judged: tuple[LLM, Any, Any]):
    llm, model, tokenizer = judged
    outputs = llm.classify(TEXTS, use_tqdm=False)
    expected = [compute_score(model, tokenizer, text) for text in TEXTS]
    assert [one.outputs.probs[0] for one in outputs] == pytest.approx(expected, abs=FLOAT32)
    (raw,) = llm.classify(TEXTS[0], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    assert torch.sigmoid(torch.tensor(raw.outputs.probs)).item() == pytest.approx(expected[0], abs=FLOAT32)


def test_embeddings_are_those_of_sentence_transformers_files(embedded: tuple[LLM, Any, Any]):
    llm, model, tokenizer = embedded
    outputs = llm.embed(TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, outputs, strict=True):
        expected = compute_embedding(model, tokenizer, text)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, atol=FLOAT32, rtol=0)
    (alone,) = llm.embed(TEXTS[1], use_tqdm=False)
    assert alone.outputs.raw == outputs[1].outputs.raw


def test_prompts_and_cuts_are_those_of_sentence_transformers_files(embedded: tuple[LLM, Any, Any]):
    llm, model, tokenizer = embedded
    (asked,) = llm.embed("Fox ", prompt_name="query", use_tqdm=False)
    expected = compute_embedding(model, tokenizer, "the little fox")
    torch.testing.assert_close(torch.tensor(asked.outputs.embedding), expected, atol=FLOAT32, rtol=0)
    with pytest.raises(InputError, match=r"prompt='\d+ tokens': expected at most 40 \(max_model_len=40\)"):
        llm.embed(TEXTS[-1] * 9)
    (cut,) = llm.embed(TEXTS[-1] * 9, truncate_prompt_tokens=-1, use_tqdm=False)
    expected = compute_embedding(model, tokenizer, TEXTS[-1] * 9)
    torch.testing.assert_close(torch.tensor(cut.outputs.embedding), expected, atol=FLOAT32, rtol=0)
    (score,) = llm.score("Fox", "a dog", use_tqdm=False)
    query, document = (compute_embedding(model, tokenizer, text) for text in ("the little fox", "a dog"))
    assert score.outputs.score == pytest.approx(float(query @ document), abs=FLOAT32)


def test_tokens_have_vectors_of_their_own(embedded: tuple[LLM, Any, Any]):
    llm, model, tokenizer = embedded
    params = PoolingParams(task="token_embed", use_activation=False)
    (output,) = llm.encode("the fox", params, use_tqdm=False)
    with torch.no_grad():
        expected = model(tokenizer("the fox", return_tensors="pt")["input_ids"]).last_hidden_state[0]
    found = torch.tensor(output.outputs.data.tolist())
    torch.testing.assert_close(found, expected, atol=FLOAT32, rtol=0)


def test_an_encoder_that_is_to_generate_says_what_it_does(embedded: tuple[LLM, Any, Any]):
    llm, _, _ = embedded
    with pytest.raises(
        InputError, match=r"task='generate': expected one of what this model does: embed \(LLM.embed\)"
    ):
        llm.generate("the fox", SamplingParams())
