"""config.json keys that nobody reads: harmless ones pass, those that would change arithmetic are refused."""

from __future__ import annotations

from typing import Any

import pytest
from quire.frontend.models.families import ARCHITECTURES, read_model_spec
from quire.ipc.errors import ModelError

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# What published checkpoints carry beside their models' numbers, in several generations of tools.
TOOLS: dict[str, Any] = {
    "_name_or_path": "meta-llama/Llama-3.1-8B",
    "_attn_implementation_autoset": True,
    "_flash_attn_2_enabled": True,
    "add_cross_attention": False,
    "attention_dropout": 0.1,
    "attn_implementation": "flash_attention_2",
    "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "bos_token_id": 1,
    "cache_implementation": "hybrid",
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "embd_pdrop": 0.0,
    "eos_token_id": [2, 3],
    "finetuning_task": None,
    "hidden_dropout": 0.1,
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "keys_to_ignore_at_inference": ["past_key_values"],
    "length_penalty": 1.0,
    "max_length": 20,
    "model_max_length": 4096,
    "num_beam_groups": 1,
    "num_beams": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "pruned_heads": {},
    "resid_pdrop": 0.0,
    "rope_interleaved": False,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "temperature": 1.0,
    "tie_encoder_decoder": False,
    "tokenizer_class": "LlamaTokenizer",
    "top_k": 50,
    "torch_dtype": "bfloat16",
    "torchscript": False,
    "transformers_version": "4.44.0",
    "unsloth_fixed": True,
    "use_bfloat16": False,
    "use_cache": True,
    "use_mrope": False,
}
ARITHMETIC: dict[str, Any] = {
    "attention_multiplier": 0.0078125,  # Granite
    "attn_temperature_tuning": True,  # Llama 4
    "embedding_multiplier": 12.0,
    "logit_scale": 0.0625,  # Cohere
    "logits_scaling": 8.0,
    "final_logit_softcapping": 30.0,
    "clip_qkv": 8.0,  # OLMo
    "no_rope_layers": [1, 0],  # SmolLM3
    "num_nextn_predict_layers": 1,
    "residual_multiplier": 0.22,
    "scale_emb": 12,  # MiniCPM
    "use_qk_norm": True,
    "parallel_residual": True,
    "rotary_dim": 32,
    "layer_norm_epsilon": 1e-5,
    "linear_conv_kernel_dim": 4,  # Qwen3-Next
    "n_shared_experts": 1,
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_of_tools_and_training_change_nothing(architecture: str) -> None:
    config = {"architectures": [architecture], **BASE}
    assert read_model_spec({**config, **TOOLS}) == read_model_spec(config)
    neutral = dict.fromkeys(ARITHMETIC) | {"logits_scaling": 1.0, "residual_multiplier": 1}
    del neutral["final_logit_softcapping"]  # which Gemma 2 knows
    assert read_model_spec({**config, **neutral}) == read_model_spec(config)


@pytest.mark.parametrize("key", ARITHMETIC)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_a_key_that_changes_arithmetic_and_is_not_known_is_refused_by_name(
    architecture: str, key: str
) -> None:
    config = {"architectures": [architecture], **BASE, key: ARITHMETIC[key]}
    with pytest.raises(ModelError, match=f"absent: {architecture} is computed without it") as caught:
        read_model_spec(config)
    assert caught.value.field == f"config.json {key}"


@pytest.mark.parametrize(
    "rope", [{"mrope_section": [2, 3, 3]}, {"rope_type": "linear", "factor": 2, "attn_factor": 0.5}]
)
def test_rotary_settings_that_are_not_known_are_refused_by_name(rope: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="rope_type") as caught:
        read_model_spec({"architectures": ["LlamaForCausalLM"], **BASE, "rope_parameters": rope})
    assert caught.value.field == f"config.json rope_parameters.{list(rope)[-1]}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_transformers_writes_for_a_family_is_read(architecture: str) -> None:
    import transformers

    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    config = config_class(head_dim=16, **BASE, architectures=[architecture])
    spec = read_model_spec(config.to_dict())
    assert spec == read_model_spec({**config.to_dict(), **TOOLS})
    assert spec.architecture == architecture


def test_a_number_of_layers_that_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(ModelError, match="num_hidden_layers=2147483647: an integer from 1 to 10000"):
        read_model_spec({"architectures": ["LlamaForCausalLM"], **BASE, "num_hidden_layers": 2**31 - 1})
