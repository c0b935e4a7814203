"""sentence-transformers' folders, of old and new versions, and what runner and convert make of any folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.models.model_files import MAX_JSON_BYTES
from quire.frontend.models.pooling_head import has_score_tokens
from quire.frontend.models.sentence_transformers import read_modules, read_text_encoding
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.errors import ConfigError, ModelError
from quire.ipc.spec.config import EngineConfig
from quire.ipc.spec.model_spec import PoolingSpec
from refusals import Refusal, refusals

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
QWEN3: dict[str, Any] = {
    **BERT,
    "architectures": ["Qwen3ForCausalLM"],
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
OLD, NEW = "sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules."
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": f"{OLD}Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{OLD}Pooling"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": f"{OLD}Dense"}
NORMALIZE = {"idx": 3, "name": "3", "path": "3_Normalize", "type": f"{OLD}Normalize"}
SCORE = {
    "idx": 1,
    "path": "1_LogitScore",
    "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
}
DENSE_CONFIG: dict[str, Any] = {
    "in_features": 48,
    "out_features": 32,
    "bias": False,
    "activation_function": "torch.nn.modules.linear.Identity",
}
VOCAB = {"model": {"vocab": {"no": 5, "yes": 7}}}


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in {"tokenizer.json": {}, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def make_engine_config(folder: Path, files: dict[str, Any], **arguments: Any) -> EngineConfig:
    write(folder, files)
    return EngineArgs(str(folder), load_format="dummy", **arguments).create_engine_config()


def read_head(folder: Path, files: dict[str, Any], **arguments: Any) -> PoolingSpec:
    spec = make_engine_config(folder, files, **arguments).model.spec
    assert spec.pooling is not None
    return spec.pooling


def test_prompts_and_lower_case_are_read_of_a_folder_and_of_a_transformers_own(tmp_path: Path) -> None:
    prompts = {"query": "Instruct: x\nQuery:", "document": ""}
    files = {
        "config.json": {"__version__": "0.2.0"},
        "modules.json": [{**TRANSFORMER, "path": "0_BERT"}, POOLING],
        "0_BERT/config.json": BERT,
        "0_BERT/tokenizer.json": {},
        "0_BERT/sentence_bert_config.json": {"max_seq_length": 128, "do_lower_case": True},
        "1_Pooling/config.json": {},
        "config_sentence_transformers.json": {"prompts": prompts},
    }
    model = make_engine_config(tmp_path, files).model
    assert (model.model, model.tokenizer) == (str(tmp_path), str(tmp_path / "0_BERT"))
    encoding = read_text_encoding(tmp_path)
    assert (encoding.do_lower_case, encoding.prompts) == (True, prompts)


def test_an_encoder_takes_no_more_than_its_positions_and_whole_prompts(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": BERT, "sentence_bert_config.json": {"max_seq_length": 256}})
    with pytest.raises(ConfigError, match="at most 512"):
        make_engine_config(tmp_path, {}, max_model_len=513)
    said = "max_num_batched_tokens=100: expected at least max_model_len=256 for an encoder"
    with pytest.raises(ConfigError, match=said):
        make_engine_config(tmp_path, {}, max_num_batched_tokens=100)


@pytest.mark.parametrize("modules", [{"modules.json": [TRANSFORMER]}, {}])  # {}: of a cross-encoder
def test_newer_files_have_the_limit_in_the_tokenizers_configuration(
    tmp_path: Path, modules: dict[str, Any]
) -> None:
    files = {**modules, "tokenizer_config.json": {"model_max_length": 77}}
    assert read_text_encoding(write(tmp_path, files)).max_seq_length == 77
    write(tmp_path, {"tokenizer_config.json": {"model_max_length": 10**30}})
    assert read_text_encoding(tmp_path).max_seq_length is None


def test_texts_are_read_as_sentence_transformers_wrote_them(tmp_path: Path) -> None:
    settings = {"prompts": {"query": "q: ", "document": None}, "default_prompt_name": "query"}
    files = {
        "config.json": {"id2label": {"0": "no", "1": "yes"}},
        "config_sentence_transformers.json": settings,
    }
    encoding = read_text_encoding(write(tmp_path, files))
    assert encoding.prompts == {"query": "q: ", "document": ""}
    assert encoding.default_prompt_name == "query"
    assert encoding.labels == ("no", "yes")


def test_a_folder_without_any_such_file_has_no_prompts_and_no_limit(tmp_path: Path) -> None:
    encoding = read_text_encoding(write(tmp_path, {"config.json": BERT}))
    assert (encoding.prompts, encoding.max_seq_length, encoding.labels) == ({}, None, ())
    assert read_modules(tmp_path) is None
    assert read_head(tmp_path, {}) == PoolingSpec(pools=("cls",), normalize=True)


@refusals("pooling_files")
def test_a_file_that_cannot_be_followed_is_refused_by_name(tmp_path: Path, refusal: Refusal) -> None:
    whole = {
        "config.json": BERT,
        "modules.json": [TRANSFORMER, POOLING, DENSE],
        "1_Pooling/config.json": {},
        "2_Dense/config.json": DENSE_CONFIG,
    }
    refusal.check(lambda files: make_engine_config(tmp_path, whole | files), tmp_path)


def test_what_changes_no_vector_may_be_said_of_modules(tmp_path: Path) -> None:
    files: dict[str, Any] = {
        "config.json": BERT,
        "modules.json": [TRANSFORMER, POOLING, DENSE, NORMALIZE],
        "1_Pooling/config.json": {},
        "2_Dense/config.json": {**DENSE_CONFIG, "module_input_name": "sentence_embedding"},
        "3_Normalize/config.json": {"module_output_name": "sentence_embedding"},
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            "module_output_name": "token_embeddings",
            "model_args": {"torch_dtype": "bfloat16", "trust_remote_code": True},
            "config_args": {"hidden_size": 48},
            "processing_kwargs": {"text": {"padding": True}, "image": {"size": 8}},
        },
    }
    assert read_head(tmp_path, files).normalize
    late = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    files["modules.json"] = [TRANSFORMER, DENSE, NORMALIZE]
    files |= {"2_Dense/config.json": DENSE_CONFIG | late, "3_Normalize/config.json": late}
    assert read_head(tmp_path, files).pools == ("all",)
    files["modules.json"] = [TRANSFORMER, POOLING, DENSE]
    files["2_Dense/config.json"] = {**DENSE_CONFIG, "out_features": 1, "module_output_name": "scores"}
    files["config_sentence_transformers.json"] = {"model_type": "CrossEncoder"}
    assert read_head(tmp_path, files).num_labels == 1


def test_a_template_for_pairs_is_qwen3_rerankers_or_refused(tmp_path: Path) -> None:
    judge = "Judge whether the Document meets the requirements"
    files: dict[str, Any] = {
        "config.json": QWEN3 | {"model_type": "qwen3"},
        "modules.json": [TRANSFORMER, SCORE],
        "1_LogitScore/config.json": {"true_token_id": 9, "false_token_id": 3},
        "sentence_bert_config.json": {
            "transformer_task": "text-generation",
            "modality_config": {
                "message": {"method": "forward", "method_output_name": "logits", "format": "flat"}
            },
            "module_output_name": "causal_logits",
        },
        "tokenizer_config.json": {"chat_template": judge},
    }
    assert read_head(tmp_path, files).num_labels == 1
    assert read_text_encoding(tmp_path).fills_template
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ModelError, match=r"modality_config=.*Qwen3-Reranker's"):
        read_head(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_text(judge)
    assert read_head(tmp_path, {}).num_labels == 1


def test_a_classifier_of_qwen3_reads_plain_pairs(tmp_path: Path) -> None:
    config = QWEN3 | {"model_type": "qwen3"}
    assert read_text_encoding(write(tmp_path, {"config.json": config})).fills_template
    config["architectures"] = ["Qwen3ForSequenceClassification"]
    assert not read_text_encoding(write(tmp_path, {"config.json": config})).fills_template


def test_dense_weights_are_safetensors_or_nothing(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    files = {
        "config.json": BERT,
        "modules.json": [TRANSFORMER, POOLING, DENSE],
        "1_Pooling/config.json": {},
        "2_Dense/config.json": DENSE_CONFIG,
    }
    write(tmp_path, files)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="safetensors only"):
        EngineArgs(str(tmp_path)).create_engine_config()
    (tmp_path / "2_Dense" / "model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(ModelError, match=r"2_Dense/model\.safetensors"):
        EngineArgs(str(tmp_path)).create_engine_config()


def test_a_file_beyond_its_bound_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": BERT})
    with (tmp_path / "modules.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ModelError, match=f"at most {MAX_JSON_BYTES} bytes"):
        read_modules(tmp_path)


@refusals("poolers")
def test_what_a_model_cannot_do_is_refused_with_what_it_can(tmp_path: Path, refusal: Refusal) -> None:
    def make(given: dict[str, Any]) -> EngineConfig:
        config = {"BERT": BERT, "QWEN3": QWEN3}[given["of"]] | given.get("config", {})
        return make_engine_config(tmp_path, {"config.json": config}, **given["arguments"])

    refusal.check(make)


def test_a_causal_reranker_needs_tokens_to_score(tmp_path: Path) -> None:
    files = {"config.json": QWEN3, "tokenizer.json": VOCAB}
    with pytest.raises(ModelError, match="'maybe': expected a token of the tokenizer"):
        read_head(tmp_path, files, hf_overrides={"classifier_from_token": ["no", "maybe"]})
    assert has_score_tokens(tmp_path)
    silent = files | {"tokenizer.json": {"model": {"vocab": {"no": 5, "No": 7}}}}
    with pytest.raises(
        ConfigError, match=r"convert='classify': expected hf_overrides=.* tokenizer has no 'yes'"
    ):
        read_head(tmp_path, silent, convert="classify")
    assert not has_score_tokens(tmp_path)


def test_a_causal_reranker_with_modules_names_tokens_that_there_are(tmp_path: Path) -> None:
    files = {
        "config.json": QWEN3,
        "modules.json": [TRANSFORMER, SCORE],
        "1_LogitScore/config.json": {"true_token_id": 100, "false_token_id": 3},
    }
    with pytest.raises(ModelError, match="LogitScore=100: expected a token id below 100"):
        read_head(tmp_path, files)
