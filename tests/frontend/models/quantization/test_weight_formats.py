"""What config.json's quantization_config makes of a model's layers: as checkpoints write it, and wrong."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from golden_weights import GOLDEN_NAMES, GoldenWeight
from msgspec.structs import replace
from quire.frontend.models.families import read_model_spec
from quire.frontend.models.quantization import names, read_weight_formats
from quire.ipc.errors import ModelError
from quire.ipc.spec.linear_shapes import list_linears
from quire.ipc.spec.model_spec import ModelSpec
from quire.ipc.spec.weight_format import WeightFormat, WeightFormats

BASE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
DENSE = read_model_spec({"architectures": ["LlamaForCausalLM"], **BASE})
EXPERTS = read_model_spec(
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        **BASE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    }
)
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
INT4 = WeightFormat(bits=4, group_size=128, layout="gptq/4")
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8_BLOCKS = WeightFormat(kind="fp8", group_rows=128, group_size=128, layout="fp8")
NF4: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
TORCHAO: dict[str, Any] = {
    "quant_method": "torchao",
    "quant_type": {
        "default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"group_size": None}}
    },
}


def make_scheme(targets: list[str], **weights: Any) -> dict[str, Any]:
    defaults = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    return {"targets": targets, "weights": {**defaults, **weights}, "input_activations": None}


def make_schemes(format: str, *schemes: dict[str, Any], **fields: Any) -> dict[str, Any]:
    groups = {f"group_{index}": scheme for index, scheme in enumerate(schemes)}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, **fields}


PACKED = make_schemes("pack-quantized", make_scheme(["Linear"]), ignore=["lm_head"])


def read(config: dict[str, Any], spec: ModelSpec = DENSE) -> WeightFormats:
    return read_weight_formats({"quantization_config": config}, spec)


def test_a_plain_checkpoint_has_plain_layers() -> None:
    assert read_weight_formats({}, DENSE) == WeightFormats()
    assert read_weight_formats({"quantization_config": None}, DENSE) == WeightFormats()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPTQ, INT4),
        ({**GPTQ, "checkpoint_format": "gptq_v2", "sym": False, "meta": {"damp": 0.1}},
         WeightFormat(bits=4, group_size=128, has_offsets=True, layout="gptq_v2/4")),
        ({**GPTQ, "bits": 3, "desc_act": True},
         WeightFormat(bits=4, group_size=128, has_permutation=True, layout="gptq/3")),
        ({**GPTQ, "bits": 8, "group_size": -1, "desc_act": True}, WeightFormat(layout="gptq/8")),
        (AWQ, WeightFormat(bits=4, group_size=128, has_offsets=True, layout="awq")),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"},
         WeightFormat(bits=4, group_size=64, has_offsets=True, layout="awq")),
        (FP8, FP8_BLOCKS),
        ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
         WeightFormat(kind="fp8", layout="fp8")),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
         WeightFormat(kind="fp8", layout="fp8")),
        (NF4, WeightFormat(bits=4, group_size=64, has_codebook=True, layout="bnb-nf4")),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0},
         WeightFormat(layout="bnb-int8")),
        (PACKED, WeightFormat(bits=4, group_size=128, layout="pack-quantized/4")),
        (TORCHAO, WeightFormat(layout="torchao/8")),
    ],
)  # fmt: skip
def test_a_method_is_the_format_of_all_layers_but_the_projection_to_logits(
    config: dict[str, Any], expected: WeightFormat
) -> None:
    assert read(config) == WeightFormats(default=expected, exceptions={"lm_head": None})
    assert read(config, replace(DENSE, tie_word_embeddings=True)) == WeightFormats(default=expected)
    assert read(config, EXPERTS).find("model.layers.1.mlp.experts.3.down_proj") == expected


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_the_configs_of_the_formats_libraries_are_understood(name: str) -> None:
    assert GoldenWeight(name).format.layout is not None


def test_every_linear_layer_has_a_name_and_a_shape() -> None:
    names = [linear.name for together in list_linears(EXPERTS) for linear in together]
    assert len(names) == len(set(names)) == 2 * (4 + 4 * 3) + 1
    shapes = {linear.name: (linear.num_out, linear.num_in) for each in list_linears(DENSE) for linear in each}
    assert shapes["model.layers.0.self_attn.k_proj"] == (64, 128)
    assert shapes["model.layers.1.mlp.down_proj"] == (128, 256)
    assert shapes["lm_head"] == (320, 128)


# As the tools write them: transformers, GPTQModel, llm-compressor, unsloth.
WRITTEN: list[dict[str, Any]] = [
    {**GPTQ, "method": "gptq", "format": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32",
     "lm_head": False, "meta": {"mse": 0.0, "act_group_aware": True}},
    {**GPTQ, "batch_size": 1, "block_name_to_quantize": None, "cache_block_outputs": True, "dataset": "c4",
     "damp_percent": 0.01, "exllama_config": {"version": 1}, "modules_in_block_to_quantize": None,
     "true_sequential": True, "use_cuda_fp16": False, "use_exllama": True, "act_group_aware": True,
     "backend": "auto", "tokenizer": None},
    {**AWQ, "method": "awq", "format": "gemm", "checkpoint_format": "gemm", "zero_point": False,
     "lm_head": False, "pack_dtype": "int32", "meta": {"pack_impl": "auto"}, "desc_act": False},
    {**AWQ, "act_group_aware": True, "backend": "auto", "batch_size": 1, "cache_block_outputs": True,
     "damp_percent": 0.1, "true_sequential": True, "dataset": None, "format": "gemm", "sym": True},
    {**PACKED, "global_compression_ratio": 1.5, "kv_cache_scheme": None, "quantization_status": "compressed",
     "sparsity_config": {"format": "dense", "global_sparsity": 0.14, "ignore": [], "targets": [],
                         "registry_requires_subclass": False, "sparsity_structure": "unstructured"},
     "transform_config": {}, "version": "0.11.0"},
    {**NF4, "_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16",
     "bnb_4bit_quant_storage": "uint8", "bnb_4bit_use_double_quant": True, "llm_int8_threshold": 6.0,
     "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
     "llm_int8_skip_modules": ["lm_head", "multi_modal_projector"], "load_in_8bit": False},
    {**FP8, "fmt": "e4m3", "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]},
]  # fmt: skip


@pytest.mark.parametrize("config", WRITTEN)
def test_what_tools_write_beside_a_format_is_no_obstacle(config: dict[str, Any]) -> None:
    found = read(config)
    assert found.default is not None
    assert found.exceptions == {"lm_head": None}


def test_rules_of_gptq_leave_layers_out_and_give_others_another_width() -> None:
    rules = {
        r"-:.*\.layers\.0\.mlp\..*": {},
        r"+:.*layers\.\d+\.self_attn\.o_proj": {"bits": 8, "group_size": 32},
        r".*\.layers\.1\.mlp\.down_proj": {"desc_act": True},
    }
    found = read({**GPTQ, "dynamic": rules, "lm_head": True})
    assert found.default == INT4
    assert found.find("lm_head") == INT4
    assert found.find("model.layers.0.mlp.down_proj") is None
    assert found.find("model.layers.1.self_attn.o_proj") == WeightFormat(group_size=32, layout="gptq/8")
    assert found.find("model.layers.1.mlp.down_proj") == replace(INT4, has_permutation=True)


def test_a_rule_of_gptq_changes_only_what_it_gives() -> None:
    whole = {**GPTQ, "group_size": -1, "desc_act": True}
    found = read({**whole, "dynamic": {".*down_proj": {"bits": 8}, ".*o_proj": {"group_size": 32}}})
    assert found.find("model.layers.0.mlp.down_proj") == WeightFormat(layout="gptq/8")
    assert found.find("model.layers.0.self_attn.o_proj") == WeightFormat(
        bits=4, group_size=32, has_permutation=True, layout="gptq/4"
    )


def test_optimums_list_of_quantized_layers_leaves_the_others_plain() -> None:
    inside = [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["self_attn.o_proj"]]
    found = read({**GPTQ, "modules_in_block_to_quantize": inside})
    assert found.find("model.layers.0.self_attn.q_proj") == INT4
    assert found.find("model.layers.0.mlp.up_proj") is None


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_a_router_that_is_left_out_is_no_gate_projection(key: str) -> None:
    left_out = ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.self_attn", "re.*no"]
    found = read({**FP8, key: left_out})
    assert found.find("model.layers.0.mlp.gate_proj") == FP8_BLOCKS
    assert found.find("model.layers.0.self_attn.q_proj") is None
    assert found.find("model.layers.1.self_attn.q_proj") == FP8_BLOCKS


def test_people_see_the_method_and_its_bits() -> None:
    assert read(GPTQ).name == "gptq 4-bit"
    assert read({"quant_method": "fp8"}).name == "fp8"
    assert WeightFormats().name == ""


def test_awq_leaves_out_what_contains_a_text() -> None:
    found = read({**AWQ, "modules_to_not_convert": ["layers.0."]})
    assert found.find("model.layers.0.mlp.down_proj") is None
    assert found.find("model.layers.1.mlp.down_proj") is not None


def test_a_scheme_that_names_a_layer_counts_before_one_for_all() -> None:
    config = make_schemes(
        "mixed-precision",
        {**make_scheme(["Linear"]), "format": "pack-quantized"},
        {**make_scheme(["re:.*down_proj"], num_bits=8, strategy="channel", group_size=None),
         "format": "int-quantized"},
        {**make_scheme(["lm_head"], num_bits=8, type="float", strategy="tensor", group_size=None),
         "format": "float-quantized"},
        ignore=["re:.*layers.1.*self_attn.*"],
    )  # fmt: skip
    found = read(config)
    assert found.find("model.layers.0.mlp.up_proj") == WeightFormat(
        bits=4, group_size=128, layout="pack-quantized/4"
    )
    assert found.find("model.layers.0.mlp.down_proj") == WeightFormat(layout="int-quantized")
    assert found.find("lm_head") == WeightFormat(kind="fp8", layout="float-quantized")
    assert found.find("model.layers.1.self_attn.o_proj") is None


def test_of_several_schemes_the_one_that_the_library_chooses_counts() -> None:
    """A name before patterns, patterns by the alphabet; of one target in two schemes the last counts."""
    config = make_schemes(
        "pack-quantized",
        make_scheme(["re:.*proj", "model.layers.0.mlp.down_proj"]),
        make_scheme(["re:.*down_proj", "Linear"], group_size=64),
        make_scheme(["model.layers.0.mlp.down_proj", "Linear"], group_size=32),
    )
    found = read(config)
    sizes = {"0.mlp.down_proj": 32, "1.mlp.down_proj": 64, "0.self_attn.o_proj": 128}
    for layer, size in sizes.items():
        weight_format = found.find(f"model.layers.{layer}")
        assert weight_format is not None
        assert weight_format.group_size == size
    head = found.find("lm_head")
    assert head is not None
    assert head.group_size == 32


def test_a_layer_that_the_files_hold_in_floats_is_plain() -> None:
    plain = {"model.layers.0.mlp.down_proj.weight", "layers.1.mlp.down_proj.weight", "lm_head.weight"}
    packed = {"model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.weight.quant_map"}
    found = read_weight_formats({"quantization_config": NF4}, DENSE, frozenset(plain | packed))
    left_out = {"model.layers.0.mlp.down_proj": None, "model.layers.1.mlp.down_proj": None, "lm_head": None}
    assert found.exceptions == left_out


def test_torchao_leaves_out_what_transformers_does() -> None:
    """The end of a name leaves nothing out, unless the files say so."""
    left_out = ["lm_head", "down_proj", "model.layers.1.mlp"]
    config = {"quantization_config": {**TORCHAO, "modules_to_not_convert": left_out}}
    in_floats = frozenset({"model.layers.0.mlp.down_proj.weight"})
    found, plain = read_weight_formats(config, DENSE), read_weight_formats(config, DENSE, in_floats)
    assert found.find("model.layers.0.mlp.down_proj") == WeightFormat(layout="torchao/8")
    assert plain.find("model.layers.0.mlp.down_proj") is None
    assert found.find("model.layers.1.mlp.down_proj") is None
    assert found.find("lm_head") is None


def test_the_older_name_of_the_key_counts_too() -> None:
    assert read_weight_formats({"compression_config": PACKED}, DENSE) == read(PACKED)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "aqlm"}, "quant_method"),
    ({}, "quant_method"),
    ({**GPTQ, "bits": 5}, "bits"),
    ({**GPTQ, "bits": "4"}, "bits"),
    ({**GPTQ, "bits": True}, "bits"),
    ({**GPTQ, "group_size": 0}, "group_size"),
    ({**GPTQ, "group_size": 24}, "group_size"),
    ({**GPTQ, "group_size": 10**30}, "group_size"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format"),
    ({**GPTQ, "adapter": {"rank": 8}}, "adapter"),
    ({**GPTQ, "dynamic": {"(a+)+$": {}}}, "dynamic"),
    ({**GPTQ, "dynamic": {"(": {}}}, "dynamic"),
    ({**GPTQ, "dynamic": {".*": {"bits": 7}}}, "dynamic..*.bits"),
    ({**GPTQ, "dynamic": {".*": 3}}, "dynamic..*"),
    ({**GPTQ, "dynamic": [1]}, "dynamic"),
    ({**GPTQ, "modules_in_block_to_quantize": 5}, "modules_in_block_to_quantize"),
    ({**AWQ, "version": "gemv"}, "version"),
    ({**AWQ, "zero_point": 0}, "zero_point"),
    ({**AWQ, "method": "gptq"}, "method"),
    ({**AWQ, "desc_act": True}, "desc_act"),
    ({**GPTQ, "checkpoint_format": "gptq", "format": "marlin"}, "format"),
    ({**AWQ, "modules_to_not_convert": [1]}, "modules_to_not_convert"),
    ({**AWQ, "modules_to_not_convert": ["a"] * 1001}, "modules_to_not_convert"),
    ({**FP8, "ignored_layers": [r"(?:a|b).*?\.\d+"] * 1001}, "ignored_layers"),
    ({**FP8, "ignored_layers": [".*.*.*.*.*x"]}, "ignored_layers"),
    ({**FP8, "ignored_layers": ["[a-z.]?" * 40 + "x"]}, "ignored_layers"),
    ({**FP8, "ignored_layers": ["(?x:(?:.|..) *!)"]}, "ignored_layers"),
    ({**FP8, "ignored_layers": [r"(?:.|..|\\)*!"]}, "ignored_layers"),
    ({**FP8, "ignored_layers": ["(?:.|.)" * 40 + "!"]}, "ignored_layers"),
    ({**FP8, "ignored_layers": ["(?:[)].|.|.)" * 24 + "!"]}, "ignored_layers"),
    ({**GPTQ, "modules_in_block_to_quantize": [["a"] * 1001]}, "modules_in_block_to_quantize"),
    ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
    ({**FP8, "weight_block_size": [128, True]}, "weight_block_size"),
    ({**FP8, "fmt": "e5m2"}, "fmt"),
    ({**FP8, "activation_scheme": "sometimes"}, "activation_scheme"),
    ({**NF4, "load_in_8bit": True}, "load_in_4bit"),
    ({**NF4, "bnb_4bit_quant_type": "nf5"}, "bnb_4bit_quant_type"),
    ({**PACKED, "format": "nvfp4-pack-quantized"}, "format"),
    ({**PACKED, "format": "marlin-24"}, "format"),
    ({**PACKED, "config_groups": {}}, "config_groups"),
    ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format"),
    ({**PACKED, "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    (make_schemes("pack-quantized", make_scheme(["re:(x*)*"])), "config_groups.group_0.targets"),
    (make_schemes("pack-quantized", make_scheme(["Linear"], dynamic=True)),
     "config_groups.group_0.weights.dynamic"),
    (make_schemes("pack-quantized", make_scheme(["Linear"], strategy="tensor_group")),
     "config_groups.group_0.weights.strategy"),
    (make_schemes("float-quantized", make_scheme(["Linear"], type="float")),
     "config_groups.group_0.weights.type"),
    (make_schemes("pack-quantized", {**make_scheme(["Linear"]), "output_activations": {"num_bits": 8}}),
     "config_groups.group_0.output_activations"),
    ({**TORCHAO, "include_input_output_embeddings": True}, "include_input_output_embeddings"),
    ({**TORCHAO, "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {}}}},
     "quant_type.default._type"),
    ({**TORCHAO, "quant_type": "int8_weight_only"}, "quant_type"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "key"), REFUSED)
def test_what_is_not_understood_is_refused_by_key_and_value(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelError, match=f"quantization_config.{re.escape(key)}[ =]"):
        read(config)


def test_layers_that_are_multiplied_together_must_be_stored_alike() -> None:
    with pytest.raises(
        ModelError, match=r"layers\.0\.self_attn\.v_proj.*as model\.layers\.0\.self_attn\.q_proj"
    ):
        read({**FP8, "ignored_layers": ["v_proj"]})


def test_a_shape_that_does_not_go_with_a_format_names_the_layer() -> None:
    spec = read_model_spec({"architectures": ["LlamaForCausalLM"], **BASE, "intermediate_size": 200})
    with pytest.raises(ModelError, match=r"mlp\.down_proj inputs.*200.*multiple of 64"):
        read(NF4, spec)


def test_patterns_that_take_long_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "MAX_MATCHING_S", 1e-4)
    with pytest.raises(ModelError, match=r"ignored_layers='.*patterns that take less than"):
        read({**FP8, "ignored_layers": [".*.*.*.*!"] * 50})


def test_one_group_of_all_inputs_has_no_order_of_inputs() -> None:
    found = read(make_schemes("pack-quantized", make_scheme(["Linear"], group_size=-1, actorder="group")))
    assert found.default is not None
    assert (found.default.group_size, found.default.has_permutation) == (0, False)


def test_errors_are_one_line() -> None:
    for config, _ in REFUSED:
        with pytest.raises(ModelError) as caught:
            read(json.loads(json.dumps(config)))
        assert "\n" not in str(caught.value)
