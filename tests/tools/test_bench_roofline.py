"""The cost model beside numbers that were worked out by hand from the models' published shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import Recipe, make_checkpoint
from gguf_files import convert_checkpoint, fill_with_blocks
from msgspec.structs import replace
from quire.ipc.errors import InputError
from quire.ipc.spec.model_spec import ExpertsSpec
from quire.tools.bench.bench_model import load_spec
from quire.tools.bench.cli import run
from quire.tools.bench.cost_model import CARDS, StepShape, compute_step_work

pytestmark = pytest.mark.slow

ONE = StepShape(1, 208)


def test_a_decode_of_qwen3_600m_is_what_its_shape_says() -> None:
    # A layer: qkv 1024 x 4096, o 2048 x 1024, gate and up 1024 x 6144, down 3072 x 1024: 15,728,640 weights.
    # The head is the table of 151,936 x 1024. A token's KV: 28 layers x 2 x 8 heads x 128 x 2 bytes.
    params = 28 * 15_728_640 + 151_936 * 1024
    work = compute_step_work(load_spec("qwen3-0.6b"), "bfloat16", ONE)
    assert work.weight_bytes == 2 * params == 1_191_968_768
    assert work.kv_bytes == (208 + 1) * 114_688
    assert work.flops == 2 * params
    assert work.attention_flops == 28 * 4 * 16 * 128 * 208
    assert work.num_launches == 28 * 10 + 9
    assert work.find_floor_s(CARDS["h200"]) == pytest.approx(1_215_938_560 / 4.8e12)


def test_256_decodes_are_bound_by_their_keys_and_values_and_a_long_prompt_by_operations() -> None:
    spec, card = load_spec("qwen3-0.6b"), CARDS["h200"]
    many = compute_step_work(spec, "bfloat16", StepShape(256, 208))
    assert many.find_floor_s(card) == pytest.approx((1_191_968_768 + 256 * 209 * 114_688) / 4.8e12)
    prompt = compute_step_work(spec, "bfloat16", StepShape(0, 1, 8192))
    assert prompt.attention_flops == 28 * 4 * 16 * 128 * (8192 * 8193 // 2)
    assert prompt.flops == 2 * (28 * 15_728_640 * 8192 + 151_936 * 1024)
    assert prompt.find_floor_s(card) == pytest.approx((prompt.flops + prompt.attention_flops) / 989e12)


def test_a_decode_of_llama_8b_is_what_its_shape_says_in_bfloat16_int4_and_on_two_cards() -> None:
    # A layer: qkv 4096 x 6144, o 4096 x 4096, gate and up 4096 x 28672, down 14336 x 4096.
    layer = 4096 * (6144 + 4096 + 28_672 + 14_336)
    head = 128_256 * 4096
    work = compute_step_work(load_spec("llama-8b"), "bfloat16", ONE)
    assert work.weight_bytes == 2 * (32 * layer + head)
    assert work.find_floor_s(CARDS["h200"]) == pytest.approx(3.13e-3, rel=0.01)
    narrow = compute_step_work(load_spec("llama-8b", "int4"), "bfloat16", ONE)
    # Beside int4 the projection to logits has 8 bits, and a float32 scale a row.
    assert narrow.weight_bytes == 32 * layer * (4 + 16 / 64) // 8 + head + 4 * 128_256
    fp8 = compute_step_work(load_spec("qwen3-0.6b", "fp8"), "bfloat16", ONE)
    rows = 28 * (4096 + 1024 + 6144 + 1024) + 151_936  # of all matrices, the tied table's own copy too
    assert fp8.weight_bytes == 28 * 15_728_640 + 151_936 * 1024 + 4 * rows
    half = compute_step_work(load_spec("llama-8b"), "bfloat16", ONE, num_ranks=2)
    assert half.weight_bytes * 2 == work.weight_bytes
    assert half.kv_bytes * 2 == work.kv_bytes
    assert half.link_bytes == 2 * 32 * 4096 * 2
    with pytest.raises(InputError, match="tensor_parallel_size"):
        compute_step_work(load_spec("llama-8b"), "bfloat16", ONE, num_ranks=3)


def test_experts_are_read_as_far_as_a_step_is_expected_to_use_them() -> None:
    spec = load_spec("qwen3-0.6b")
    ffn = ExpertsSpec(num_experts=64, num_experts_per_tok=8, intermediate_size=768)
    spec = replace(spec, layers=tuple(replace(layer, ffn=ffn) for layer in spec.layers))
    attention = 28 * 1024 * (4096 + 2048)
    experts = 28 * 64 * 3 * 1024 * 768
    one = compute_step_work(spec, "bfloat16", ONE).weight_bytes
    all_of_them = compute_step_work(spec, "bfloat16", StepShape(256, 208)).weight_bytes
    assert one == pytest.approx(2 * (attention + experts / 8 + 151_936 * 1024), rel=1e-6)
    assert all_of_them == pytest.approx(2 * (attention + experts + 151_936 * 1024), rel=1e-6)


def test_a_step_that_cannot_be_a_graph_takes_as_long_as_the_host_does() -> None:
    spec, card = load_spec("qwen3-0.6b"), CARDS["h200"]
    ffn = ExpertsSpec(num_experts=8, num_experts_per_tok=2, intermediate_size=768)
    sparse = replace(spec, layers=tuple(replace(layer, ffn=ffn) for layer in spec.layers))
    dense, work = (compute_step_work(each, "bfloat16", ONE) for each in (spec, sparse))
    assert dense.estimate_s(card) < dense.estimate_host_s(is_graph=False)
    assert work.estimate_s(card) == work.estimate_host_s(is_graph=False)


def test_a_gguf_file_is_counted_by_its_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    make_checkpoint(folder, Recipe(hidden_size=256, intermediate_size=512, head_size=64, num_heads=4))
    file = fill_with_blocks(convert_checkpoint(folder)).write(tmp_path / "model.gguf")
    spec = load_spec(str(file))
    work = compute_step_work(spec, "bfloat16", ONE)
    plain = compute_step_work(load_spec(str(folder)), "bfloat16", ONE)
    assert spec.weight_formats.find("model.layers.0.mlp.gate_proj") is not None
    assert 0.28 < work.weight_bytes / plain.weight_bytes < 0.55  # 4 to 8 bits and their scales
    with pytest.raises(InputError, match="narrow already"):
        load_spec(str(file), "int4")


def test_a_window_bounds_what_is_read_and_multiplied() -> None:
    spec = load_spec("qwen3-0.6b")
    layers = tuple(replace(layer, attention=replace(layer.attention, window=100)) for layer in spec.layers)
    work = compute_step_work(replace(spec, layers=layers), "bfloat16", StepShape(2, 5000, 300))
    assert work.kv_bytes == (2 * 100 + 300 + 302) * 114_688
    assert work.attention_flops == 28 * 4 * 2048 * (2 * 100 + 100 * 101 // 2 + 200 * 100)


def test_the_command_prints_a_row_a_step_and_refuses_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    assert run(["roofline", "--card", "h200", "l4", "--batch", "1", "256", "--json", str(file)]) == 0
    assert "h200, 256 x 208" in capsys.readouterr().out
    assert [row["card"] for row in json.loads(file.read_text())] == ["h200", "h200", "l4", "l4"]
    with pytest.raises(InputError, match="context"):
        run(["roofline", "--context", "0"])
