"""What config.json's quantization_config makes of a model's layers: as checkpoints write it, and wrong."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from golden_weights import FOLDER, GOLDEN_NAMES, GoldenWeight
from msgspec.structs import replace
from quire.frontend.models.families import read_model_spec
from quire.frontend.models.quantization import names, read_weight_formats
from quire.ipc.errors import ModelError
from quire.ipc.spec.linear_shapes import list_linears
from quire.ipc.spec.model_spec import ModelSpec
from quire.ipc.spec.weight_format import WeightFormats
from refusals import Refusal, refusals

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
CASES: list[dict[str, Any]] = json.loads((FOLDER.parent / "weight_formats.json").read_bytes())
CONFIGS: dict[str, dict[str, Any]] = {case["case"]: case["config"] for case in CASES}
FP8, NF4 = CONFIGS["fp8 in blocks"], CONFIGS["bitsandbytes nf4"]


def read(config: dict[str, Any], spec: ModelSpec = DENSE) -> WeightFormats:
    return read_weight_formats({"quantization_config": config}, spec)


def test_a_plain_checkpoint_has_plain_layers() -> None:
    assert read_weight_formats({}, DENSE) == WeightFormats()
    assert read_weight_formats({"quantization_config": None}, DENSE) == WeightFormats()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_a_config_says_the_format_of_each_layer(case: dict[str, Any]) -> None:
    """`exceptions`: of the layers that have another format than `default`, or none."""
    expected = msgspec.convert({key: case[key] for key in ("default", "exceptions")}, WeightFormats)
    assert read(case["config"]) == expected


@pytest.mark.parametrize("name", ["gptq", "fp8 in blocks", "bitsandbytes nf4", "compressed-tensors"])
def test_a_method_is_the_format_of_experts_and_tied_tables_too(name: str) -> None:
    config = CONFIGS[name]
    default = read(config).default
    assert read(config, replace(DENSE, tie_word_embeddings=True)) == WeightFormats(default=default)
    assert read(config, EXPERTS).find("model.layers.1.mlp.experts.3.down_proj") == default


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


def test_people_see_the_method_and_its_bits() -> None:
    assert read(CONFIGS["gptq"]).name == "gptq 4-bit"
    assert read({"quant_method": "fp8"}).name == "fp8"
    assert WeightFormats().name == ""


def test_a_layer_that_the_files_hold_in_floats_is_plain() -> None:
    plain = {"model.layers.0.mlp.down_proj.weight", "layers.1.mlp.down_proj.weight", "lm_head.weight"}
    packed = {"model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.weight.quant_map"}
    found = read_weight_formats({"quantization_config": NF4}, DENSE, frozenset(plain | packed))
    left_out = {"model.layers.0.mlp.down_proj": None, "model.layers.1.mlp.down_proj": None, "lm_head": None}
    assert found.exceptions == left_out
    in_floats = frozenset({"model.layers.0.mlp.down_proj.weight"})
    # Of torchao's the end of a name leaves nothing out, but what the files say.
    config = {"quantization_config": CONFIGS["torchao"] | {"modules_to_not_convert": ["down_proj"]}}
    assert read_weight_formats(config, DENSE, in_floats).find("model.layers.0.mlp.down_proj") is None


def test_the_older_name_of_the_key_counts_too() -> None:
    config = CONFIGS["compressed-tensors"]
    assert read_weight_formats({"compression_config": config}, DENSE) == read(config)


@refusals("quantization")
def test_what_is_not_understood_is_refused_by_key_and_value(refusal: Refusal) -> None:
    refusal.check(read)


def test_a_shape_that_does_not_go_with_a_format_names_the_layer() -> None:
    spec = read_model_spec({"architectures": ["LlamaForCausalLM"], **BASE, "intermediate_size": 200})
    with pytest.raises(ModelError, match=r"mlp\.down_proj inputs.*200.*multiple of 64"):
        read(NF4, spec)


def test_patterns_that_take_long_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "MAX_MATCHING_S", 1e-4)
    with pytest.raises(ModelError, match=r"ignored_layers='.*patterns that take less than"):
        read({**FP8, "ignored_layers": [".*.*.*.*!"] * 50})
