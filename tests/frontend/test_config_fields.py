"""config.json keys that nobody reads: harmless ones pass, those that would change arithmetic are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.models.families import ARCHITECTURES, read_model_spec
from quire.frontend.models.families.wrapped import WRAPPED_ARCHITECTURES
from quire.ipc.errors import ModelError
from quire.ipc.spec.model_spec import DenseSpec

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# What published checkpoints carry beside their models' numbers, in several generations of tools.
KEYS = json.loads((Path(__file__).parents[1] / "golden" / "config_keys.json").read_bytes())
TOOLS: dict[str, Any] = KEYS["of tools and training"]


def base_of(architecture: str) -> dict[str, Any]:
    if architecture == "GraniteMoeHybridForCausalLM":
        return {**BASE, "num_local_experts": 0, "layer_types": ["full_attention"] * 2}
    if architecture == "NemotronHForCausalLM":  # by default some of its layers are experts
        return {**BASE, "layers_block_type": ["linear_attention", "full_attention"]}
    experts = {"n_routed_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    if architecture in ("Dots1ForCausalLM", "Glm4MoeForCausalLM", "SolarOpenForCausalLM"):
        return {**BASE, **experts}
    if architecture == "MiniCPM3ForCausalLM":
        return {**BASE, "num_key_value_heads": BASE["num_attention_heads"]}
    if architecture.startswith(("Deepseek", "Glm4MoeLite", "GlmMoeDsa", "Mistral4")):
        latent = {"num_key_value_heads": BASE["num_attention_heads"], "n_group": 1, "topk_group": 1}
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        ropes = {"rope_parameters": rope} if architecture.startswith("Mistral4") else {}
        return {**BASE, **experts, **latent, **ropes}
    if architecture == "FalconForCausalLM":
        return {key: value for key, value in BASE.items() if "key_value" not in key}
    if architecture == "OPTForCausalLM":
        return {**{key: value for key, value in BASE.items() if "key_value" not in key}, "ffn_dim": 128}
    if architecture in ("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTJForCausalLM"):
        heads = {"n_embd": 256} if architecture == "GPTJForCausalLM" else {}  # of 64 numbers, all rotated
        names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        base = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
        return {names.get(key, key): value for key, value in base.items()} | heads
    return BASE


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_of_tools_and_training_change_nothing(architecture: str) -> None:
    config = {"architectures": [architecture], **base_of(architecture)}
    tools = {**TOOLS, "router_jitter_noise": None}  # which Phi-3.5-MoE's router knows
    assert read_model_spec({**config, **tools}) == read_model_spec(config)
    neutral = dict.fromkeys(KEYS["of arithmetic"]) | {"logits_scaling": 1.0, "residual_multiplier": 1}
    del neutral["final_logit_softcapping"]  # which Gemma 2 knows
    assert read_model_spec({**config, **neutral}) == read_model_spec(config)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_transformers_writes_for_a_family_is_read(architecture: str) -> None:
    import transformers

    config_class = getattr(transformers, architecture).config_class
    # Of these heads have hidden_size / heads numbers.
    sizes = {} if architecture in ("FalconForCausalLM", "GPTJForCausalLM") else {"head_dim": 16}
    config = config_class(**sizes, **base_of(architecture), architectures=[architecture])
    spec = read_model_spec(config.to_dict())
    written = config.to_dict()
    assert spec == read_model_spec(
        {**written, **TOOLS, **{key: written[key] for key in TOOLS if key in written}}
    )
    assert spec.architecture == architecture


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Dots1ForCausalLM", {"first_k_dense_replace": 2}),
        ("Glm4MoeForCausalLM", {"first_k_dense_replace": 5, "n_shared_experts": 1, "norm_topk_prob": True}),
        ("GraniteMoeHybridForCausalLM", {"position_embedding_type": "nope", "rope_theta": 10000.0}),
    ],
)
def test_settings_of_parts_that_a_model_has_not_decide_nothing(
    architecture: str, settings: dict[str, Any]
) -> None:
    spec = read_model_spec({**base_of(architecture), "architectures": [architecture], **settings})
    assert all(isinstance(layer.ffn, DenseSpec) for layer in spec.layers)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 0.0}),
        ("VaultGemmaForCausalLM", {"attn_logit_softcapping": 0}),
        ("MiniCPM3ForCausalLM", {"scale_depth": 0.0}),
        ("PhimoeForCausalLM", {"partial_rotary_factor": 0.5}),
        ("PhimoeForCausalLM", {"num_experts_per_tok": 3}),
        ("OPTForCausalLM", {"do_layer_norm_before": False}),
        ("OPTForCausalLM", {"word_embed_proj_dim": 32}),
        ("GPTBigCodeForCausalLM", {"scale_attn_weights": False}),
        ("CwmForCausalLM", {"attention_bias": True}),
        ("FalconForCausalLM", {"alibi": True}),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 0.5}),
        ("GPTJForCausalLM", {"rotary_dim": 17}),
    ],
)
def test_what_other_numbers_would_compute_is_refused_by_name(
    architecture: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=rf"^config\.json {next(iter(settings))}="):
        read_model_spec({**base_of(architecture), "architectures": [architecture], **settings})


def test_a_cap_that_the_class_around_a_text_model_leaves_out_is_refused() -> None:
    text = {**BASE, "head_dim": 16, "final_logit_softcapping": 0.5}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    with pytest.raises(
        ModelError, match=r"^config\.json text_config\.final_logit_softcapping=0\.5: expected null"
    ):
        read_model_spec(config)


@pytest.mark.parametrize("architecture", WRAPPED_ARCHITECTURES)
def test_absent_keys_of_a_text_model_inside_have_its_class_s_defaults(architecture: str) -> None:
    import transformers

    text = {**BASE, "head_dim": 16, "pad_token_id": 0}
    whole = getattr(transformers, architecture).config_class(text_config=text).to_dict()
    whole["architectures"] = [architecture]
    spec = read_model_spec(whole)
    for key in ("rms_norm_eps", "rope_parameters", "max_position_embeddings"):
        rest = {name: value for name, value in whole["text_config"].items() if name != key}
        assert read_model_spec({**whole, "text_config": rest}) == spec, key


def test_gpt_oss_without_a_rope_object_has_transformers_yarn_with_its_own_theta() -> None:
    base = {**BASE, "architectures": ["GptOssForCausalLM"], "head_dim": 16}
    assert read_model_spec(base).rope.theta == 150000.0
    rope = read_model_spec({**base, "rope_theta": 10000.0}).rope
    assert (rope.type, rope.theta, rope.factor, rope.truncate) == ("yarn", 10000.0, 32.0, False)
    for key, other in (("swiglu_limit", 6.0), ("swiglu_alpha", 1.5)):
        with pytest.raises(ModelError, match=rf"{key}={other}: expected"):
            read_model_spec({**base, key: other})
