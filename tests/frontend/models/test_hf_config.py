"""config.json means to Quire what it means to transformers' own config classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES
from quire.frontend.models.families import read_model_spec
from quire.frontend.models.hf_config import (
    compute_max_model_len,
    read_default_sampling,
    read_dtype,
    read_eos_token_ids,
)
from quire.ipc.errors import ConfigError, ModelError
from quire.ipc.protocol.messages import MAX_EOS_TOKEN_IDS
from quire.ipc.spec.model_spec import DenseSpec, ExpertsSpec, ModelSpec
from refusals import ABSENT, Refusal, drop_absent, refusals

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def make_config(family: str = "llama", **values: Any) -> dict[str, Any]:
    config = {"architectures": [f"{FAMILIES[family]}ForCausalLM"], "model_type": family, **BASE, **values}
    return drop_absent(config)


def oracle_of(config: dict[str, Any]) -> Any:
    import transformers

    oracle_class = getattr(transformers, f"{FAMILIES[config['model_type']]}Config")
    return oracle_class(**{key: value for key, value in config.items() if key != "architectures"})


def check_against_transformers(config: dict[str, Any]) -> ModelSpec:
    spec = read_model_spec(config)
    oracle = oracle_of(config)
    head_size = getattr(oracle, "head_dim", None) or oracle.hidden_size // oracle.num_attention_heads
    attention = spec.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_size) == (
        oracle.num_attention_heads,
        oracle.num_key_value_heads,
        head_size,
    )
    assert spec.norm_eps == oracle.rms_norm_eps
    assert spec.max_position_embeddings == oracle.max_position_embeddings
    assert spec.tie_word_embeddings == oracle.tie_word_embeddings
    oracle.standardize_rope_params()  # as a model does when it builds its rotary embedding
    rope = oracle.rope_parameters
    assert spec.rope.theta == rope["rope_theta"]
    assert spec.rope.type == rope["rope_type"]
    for key in ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"):
        if rope.get(key) is not None:
            assert getattr(spec.rope, key) == rope[key]
    windows = [layer.attention.window for layer in spec.layers]
    if config["model_type"] in ("mistral", "mixtral", "qwen3_moe"):
        assert windows == [oracle.sliding_window] * len(spec.layers)
    elif hasattr(oracle, "layer_types"):
        sliding = [kind == "sliding_attention" for kind in oracle.layer_types]
        assert windows == [oracle.sliding_window if one else None for one in sliding]
    else:
        assert windows == [None] * len(spec.layers)
    return spec


GOLDEN = Path(__file__).parents[2] / "golden"
CONFIGS = json.loads((GOLDEN / "decoder_configs.json").read_bytes())
ROPES: dict[str, dict[str, Any]] = CONFIGS["ropes"]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name != "phi3"]
)  # which stretches none of them
def test_every_rope_spelling_reads_as_in_transformers(family: str, rope: str):
    import copy

    check_against_transformers(make_config(family, **copy.deepcopy(ROPES[rope])))


@pytest.mark.parametrize("kind", ["su", "longrope"])
@pytest.mark.parametrize(("partial", "count"), [({}, 8), ({"partial_rotary_factor": 0.75}, 6)])
def test_phi3s_factors_for_each_pair_read_as_in_transformers(kind: str, partial: dict[str, Any], count: int):
    import copy

    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    original = {"original_max_position_embeddings": 64}
    scaling = {"type": kind, "short_factor": [1.5] * count, "long_factor": [2.0] * count, **original}
    config = make_config("phi3", rope_scaling=scaling, **original, **partial)
    rope = check_against_transformers(copy.deepcopy(config)).rope
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](oracle_of(config))
    assert len(frequencies) == len(rope.short_factors) == (rope.rotated_size or 16) // 2
    assert (rope.short_factors[0], rope.long_factors[0]) == (1.5, 2.0)
    assert rope.attention_factor == attention_factor


@pytest.mark.parametrize("is_nested", [False, True])
def test_gemma3_has_a_rope_for_each_kind_of_layer(is_nested: bool):
    import transformers

    config = {**BASE, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 32}
    config |= {"num_hidden_layers": 7, "query_pre_attn_scalar": 24, "sliding_window": 64}
    scaling = {"rope_type": "linear", "factor": 8.0}
    if is_nested:
        full, sliding = {**scaling, "rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 2e4}
        config["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
    else:
        config |= {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": scaling}
    spec = read_model_spec(config)
    oracle = transformers.Gemma3TextConfig(
        **{key: value for key, value in config.items() if key != "architectures"}
    )
    ropes = oracle.rope_parameters
    assert (spec.rope.type, spec.rope.factor) == ("linear", 8.0)
    assert spec.rope.theta == ropes["full_attention"]["rope_theta"] == 5e5
    for layer, kind in zip(spec.layers, oracle.layer_types, strict=True):
        rope = layer.attention.rope or spec.rope
        assert (rope.type, rope.theta) == (ropes[kind]["rope_type"], ropes[kind]["rope_theta"])
        assert layer.attention.window == (64 if kind == "sliding_attention" else None)
        assert layer.attention.scale == 24**-0.5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "values",
    [
        {"num_key_value_heads": ABSENT},
        {"num_key_value_heads": None},
        {"head_dim": 32},
        {"head_dim": None},
        {"max_position_embeddings": ABSENT},
        {"tie_word_embeddings": True},
        {"rms_norm_eps": 1e-5},
        {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 128},
    ],
    ids=str,
)
def test_keys_that_may_be_absent_read_as_in_transformers(family: str, values: dict[str, Any]):
    [key] = list(values)[:1]
    refused = {
        "head_dim": ("qwen3", "gemma", "gemma2"),
        "num_key_value_heads": ("mistral", "gemma", "gemma2", "mixtral", "qwen3_moe"),
    }
    if values[key] is None and family in refused.get(key, ()):
        pytest.skip("transformers' config of this family refuses null here")
    if values == {"num_key_value_heads": ABSENT} and family != "llama":
        values = {**values, "num_attention_heads": 32, "hidden_size": 256}
    check_against_transformers(make_config(family, **values))


@pytest.mark.parametrize(("family", "values"), CONFIGS["windows"], ids=str)
def test_windows_fall_on_the_same_layers_as_in_transformers(family: str, values: dict[str, Any]):
    check_against_transformers(make_config(family, **values))


@pytest.mark.parametrize(
    "values", [{}, {"no_rope_layer_interval": 2}, {"no_rope_layers": [0, 1, 1, 0, 1]}], ids=str
)
def test_smollm3_rotates_nothing_on_the_same_layers_as_in_transformers(values: dict[str, Any]):
    config = make_config("smollm3", **values)
    spec, oracle = check_against_transformers(config), oracle_of(config)
    ropes = [(layer.attention.rope or spec.rope).type for layer in spec.layers]
    assert ropes == ["default" if flag else "none" for flag in oracle.no_rope_layers[:4]]


@pytest.mark.parametrize(
    "values", [{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 3]}, {"norm_topk_prob": True}], ids=str
)
def test_experts_are_in_the_layers_where_transformers_has_them(values: dict[str, Any]):
    import torch
    import transformers

    config = make_config(
        "qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, **values
    )
    spec = read_model_spec(config)
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(oracle_of(config))
    for layer, reference in zip(spec.layers, model.model.layers, strict=True):
        is_sparse = hasattr(reference.mlp, "experts")
        assert isinstance(layer.ffn, ExpertsSpec if is_sparse else DenseSpec)
        assert layer.ffn.intermediate_size == (24 if is_sparse else 128)
        if isinstance(layer.ffn, ExpertsSpec):
            router = reference.mlp.gate
            assert (layer.ffn.num_experts, layer.ffn.num_experts_per_tok) == (6, router.top_k)
            assert layer.ffn.norm_topk_prob == router.norm_topk_prob


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma", "olmo2"])
@pytest.mark.parametrize(
    "values",
    [
        {"rope_scaling": {"factor": 2.0}},
        {"rope_scaling": {"rope_type": "default", "factor": 2.0, "beta_fast": 3.0}},
        {"partial_rotary_factor": 0.5},
        {"logits_scaling": 8.0},
        {"sliding_window": 64},
        {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 2},
        {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        {"rotary_pct": 1.0, "rope_ratio": 1},
        {"layer_types": ["full_attention"] * 4},
    ],
    ids=str,
)
def test_what_transformers_computes_without_changes_nothing(model_type: str, values: dict[str, Any]):
    """The logits of a prompt: its numbers are the same with and without, and the spec is."""
    import torch
    import transformers

    plain, changed = make_config(model_type), make_config(model_type, **values)
    assert read_model_spec(changed) == read_model_spec(plain)
    logits: list[Any] = []
    for config in (plain, changed):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(oracle_of(config)).eval()
        with torch.no_grad():
            logits.append(model(torch.arange(1, 81)[None]).logits)
    assert torch.equal(*logits)


def test_a_switch_for_windows_is_for_families_that_have_it():
    switched = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    assert read_model_spec(make_config(**switched)) == read_model_spec(make_config())
    windows = [layer.attention.window for layer in read_model_spec(make_config("qwen2", **switched)).layers]
    assert windows == [None, None, 64, 64]
    with pytest.raises(ModelError, match="layer_types"):
        read_model_spec(make_config(layer_types=["full_attention", "linear_attention"] * 2))


def test_the_first_name_of_llama_is_known():
    config = make_config("llama")
    named = read_model_spec(config | {"architectures": ["LLaMAForCausalLM"]})
    assert named == read_model_spec(config)


@refusals("decoders")
def test_a_value_that_makes_no_sense_is_refused_by_its_key(refusal: Refusal):
    refusal.check(lambda values: read_model_spec(make_config(**values)))


@pytest.mark.parametrize(
    ("config", "stored", "expected"),
    [
        ({"dtype": "bfloat16"}, None, "bfloat16"),
        ({"torch_dtype": "float16"}, None, "float16"),
        ({"torch_dtype": "torch.float32"}, "bfloat16", "float32"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, None, "bfloat16"),
        ({}, "float16", "float16"),
        ({}, None, "float32"),
    ],
)
def test_the_number_format_is_the_checkpoints(config: dict[str, Any], stored: str | None, expected: str):
    assert read_dtype(config, stored) == expected


def test_a_number_format_without_kernels_is_refused():
    with pytest.raises(ModelError, match="float32, bfloat16, float16"):
        read_dtype({"torch_dtype": "float8_e4m3fn"}, None)


def test_end_tokens_are_those_of_both_files():
    assert read_eos_token_ids({"eos_token_id": 2}, {"eos_token_id": [5, 2, 5]}, 10) == (5, 2)
    assert read_eos_token_ids({"eos_token_id": 3}, {"eos_token_id": [5, None]}, 10) == (5, 3)
    assert read_eos_token_ids({"eos_token_id": 2}, {}, 10) == (2,)
    assert read_eos_token_ids({"eos_token_id": None}, {}, 10) == ()


@pytest.mark.parametrize("value", [-1, 10, [-1, 10], 2**80, []])
def test_an_id_that_no_output_can_hold_ends_none(value: Any):
    assert read_eos_token_ids({"eos_token_id": value}, {}, 10) == ()


@pytest.mark.parametrize("value", [True, [True, -1], 2.0, "2", {}])
def test_what_is_no_token_id_ends_no_sequence(value: Any):
    with pytest.raises(ModelError, match=r"^config\.json eos_token_id=.*: expected a token id"):
        read_eos_token_ids({"eos_token_id": value}, {}, 10)
    with pytest.raises(ModelError, match=r"^generation_config\.json eos_token_id="):
        read_eos_token_ids({"eos_token_id": 2}, {"eos_token_id": value}, 10)


def test_more_end_of_sequence_ids_than_a_request_carries_are_refused_at_the_start():
    assert len(read_eos_token_ids({"eos_token_id": list(range(MAX_EOS_TOKEN_IDS))}, {}, 5000)) == 1024
    with pytest.raises(ModelError, match=r"config.json eos_token_id='1025 ids': expected at most 1024"):
        read_eos_token_ids({"eos_token_id": list(range(MAX_EOS_TOKEN_IDS + 1))}, {}, 5000)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, 512),
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"type": "dynamic", "factor": 2.0}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"type": "yarn", "factor": 4.0}, 2048),
        ({"type": "linear", "factor": 1e20}, 2**31 - 1),
        (ROPES["old llama3"]["rope_scaling"], 512),
    ],
    ids=str,
)
def test_the_length_limit_counts_what_rope_scaling_adds(rope: dict[str, Any], expected: int):
    spec = read_model_spec(make_config(rope_scaling=rope))
    assert compute_max_model_len(spec, None) == expected
    assert compute_max_model_len(spec, expected) == expected
    with pytest.raises(ConfigError, match=f"max_model_len={expected + 1}: expected at most {expected}"):
        compute_max_model_len(spec, expected + 1)
    with pytest.raises(ConfigError, match="max_model_len"):
        compute_max_model_len(spec, 0)


def test_default_sampling_takes_what_the_generation_config_presets():
    generation = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 99, "do_sample": True, "top_p": None}
    assert read_default_sampling(generation) == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}


@pytest.mark.parametrize(
    "preset", [{"temperature": "hot"}, {"top_k": 1.5}, {"max_new_tokens": -1}, {"top_p": []}]
)
def test_a_bad_preset_is_refused_by_file_and_key(preset: dict[str, Any]):
    [(key, value)] = preset.items()
    with pytest.raises(ModelError, match=rf"generation_config\.json {key}=") as caught:
        read_default_sampling(preset)
    assert caught.value.value == value
