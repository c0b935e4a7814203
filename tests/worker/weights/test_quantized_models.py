"""Whole models in every quantized format: the logits of the same numbers in a plain checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Recipe, make_checkpoint
from decoders import make_decoder
from paged import compute_alone
from quantized_checkpoints import FORMATS, quantize_checkpoint, write_gptq
from quire import LLM, SamplingParams
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.errors import ModelError
from quire.ipc.spec.config import EngineConfig
from quire.kernels.group.shared_group import SharedGroup
from quire.worker.models import load_model
from quire.worker.weights.compressed_tensors import make_mxfp4_weight
from quire.worker.weights.integer_weight import dequantize
from ranks import Pipeline, run_ranks, with_ranks
from safetensors.torch import load_file, save_file

CPU = torch.device("cpu")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "head_size": 16}
DENSE = Recipe(family="qwen3", num_layers=2, **SIZES)
EXPERTS = Recipe(family="qwen3_moe", num_layers=1, num_experts=4, num_experts_per_tok=2, **SIZES)
GPT_OSS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4}
TIED = Recipe(family="qwen2", num_layers=1, tied=True, attention_bias=True, **SIZES)


def read_config(folder: Path, **arguments: Any) -> EngineConfig:
    args = EngineArgs(str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=64, **arguments)
    return args.create_engine_config()


def logits_of(folder: Path, num_ranks: int = 1, **arguments: Any) -> torch.Tensor:
    config = with_ranks(read_config(folder, **arguments), num_ranks)

    def compute(group: SharedGroup | None) -> torch.Tensor:
        return compute_alone(load_model(config, CPU, group), config.for_rank(), PROMPT)

    return compute(None) if num_ranks == 1 else run_ranks(num_ranks, compute)[0]


def logits_of_stages(config: EngineConfig) -> torch.Tensor:
    return compute_alone(Pipeline(config, 2), config, PROMPT)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path)


def quantize(tmp_path: Path, recipe: Recipe, name: str, **config: Any) -> tuple[Path, Path]:
    """(plain, quantized): folders of the same numbers."""
    checkpoint, folder = make_checkpoint(tmp_path / "plain", recipe), tmp_path / "quantized"
    values, writer = FORMATS[name]
    quantize_checkpoint(checkpoint.folder, folder, checkpoint.spec, {**values, **config}, writer)
    return checkpoint.folder, folder


def assert_same(plain: Path, quantized: Path, num_ranks: int = 1) -> None:
    expected, found = logits_of(plain), logits_of(quantized, num_ranks)
    bound = 1e-4 * float(expected.abs().max())  # both round sums of some hundred terms in float32
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_model_computes_what_its_numbers_say(tmp_path: Path, name: str) -> None:
    assert_same(*quantize(tmp_path, DENSE, name))


@pytest.mark.parametrize("name", ["gptq-4-act-order", "fp8-block", "w8a8"])
def test_experts_are_read_one_by_one(tmp_path: Path, name: str) -> None:
    assert_same(*quantize(tmp_path, EXPERTS, name))


@pytest.mark.parametrize("name", ["awq", "nf4"])
def test_a_tied_table_stays_plain_and_biases_are_added(tmp_path: Path, name: str) -> None:
    assert_same(*quantize(tmp_path, TIED, name))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", ["gptq-4", "awq", "fp8-block", "w8a8", "nf4"])
def test_ranks_share_packed_weights_where_their_groups_divide(tmp_path: Path, name: str) -> None:
    assert_same(*quantize(tmp_path, DENSE, name), num_ranks=2)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", ["gptq-4-act-order", "awq", "mxfp4", "w8a8", "nf4"])
def test_stages_read_their_part_of_packed_weights_and_have_the_bits_of_all(tmp_path: Path, name: str) -> None:
    _, folder = quantize(tmp_path, DENSE, name)
    assert torch.equal(logits_of_stages(read_config(folder)), logits_of(folder))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_ranks_and_stages_quantize_while_they_read(tmp_path: Path, quantization: str) -> None:
    folder = make_checkpoint(tmp_path, DENSE).folder
    whole = logits_of(folder, quantization=quantization)
    assert torch.equal(logits_of_stages(read_config(folder, quantization=quantization)), whole)
    # A rank rounds what it has, with scales of its own: as near to the plain model, and always the same.
    shared, again = (logits_of(folder, 2, quantization=quantization) for _ in range(2))
    assert torch.equal(shared, again)
    plain = logits_of(folder)
    of_whole, of_ranks = (torch.cosine_similarity(one, plain, dim=-1).median() for one in (whole, shared))
    assert of_ranks > 0.95 * of_whole > 0.85


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("name", "num_ranks", "reason"),
    [("mxfp4", 4, "divides its groups"), ("gptq-4-act-order", 2, "another order")],
)
def test_a_weight_that_ranks_cannot_share_is_named(
    tmp_path: Path, name: str, num_ranks: int, reason: str
) -> None:
    _, folder = quantize(tmp_path, DENSE, name)
    with pytest.raises(ModelError, match=f"o_proj.*{reason}"):
        logits_of(folder, num_ranks)


def test_an_engine_says_the_tokens_of_the_same_numbers(tmp_path: Path) -> None:
    said: list[list[int]] = []
    for folder in quantize(tmp_path, DENSE, "gptq-4-act-order"):
        llm = LLM(str(folder), dtype="float32", skip_tokenizer_init=True, distributed_executor_backend="uni")
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        said.append(llm.generate({"prompt_token_ids": PROMPT}, params)[0].outputs[0].token_ids)
        llm.close()
    assert len(said[0]) == 16
    assert said[0] == said[1]


def test_layers_that_config_leaves_out_are_read_plain(tmp_path: Path) -> None:
    checkpoint, folder = make_checkpoint(tmp_path / "plain", DENSE), tmp_path / "quantized"
    values, writer = FORMATS["fp8-block"]
    left_out = ("lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj")
    config = {**values, "modules_to_not_convert": list(left_out)}
    quantize_checkpoint(checkpoint.folder, folder, checkpoint.spec, config, writer, left_out)
    assert_same(checkpoint.folder, folder)


def test_layers_of_several_widths_are_multiplied_together(tmp_path: Path) -> None:
    checkpoint, folder = make_checkpoint(tmp_path / "plain", DENSE), tmp_path / "quantized"
    values, writer = FORMATS["gptq-4"]
    config = {**values, "dynamic": {"+:.*v_proj": {"bits": 8}, "+:.*up_proj": {"bits": 3, "sym": False}}}
    others = {"v_proj": write_gptq(8, True, False, 1), "up_proj": write_gptq(3, False, False, 1)}
    quantize_checkpoint(checkpoint.folder, folder, checkpoint.spec, config, writer, others=others)
    assert_same(checkpoint.folder, folder)


def test_a_projection_to_logits_may_be_quantized_too(tmp_path: Path) -> None:
    checkpoint, folder = make_checkpoint(tmp_path / "plain", DENSE), tmp_path / "quantized"
    values, writer = FORMATS["gptq-4"]
    quantize_checkpoint(checkpoint.folder, folder, checkpoint.spec, {**values, "lm_head": True}, writer, ())
    assert_same(checkpoint.folder, folder)


def test_scales_of_activations_and_caches_and_a_bias_of_zeros_are_passed_over(tmp_path: Path) -> None:
    plain, folder = quantize(tmp_path, DENSE, "gptq-4")
    layer = "model.layers.0.self_attn"
    rewrite(
        folder,
        lambda tensors: tensors.update(
            {f"{layer}.q_proj.bias": torch.zeros(64), f"{layer}.k_scale": torch.ones(1)}
        ),
    )
    assert_same(plain, folder)
    rewrite(folder, lambda tensors: tensors.update({f"{layer}.q_proj.bias": torch.ones(64)}))
    with pytest.raises(ModelError, match=r"does not have, the first is .*q_proj.bias"):
        logits_of(folder)


def test_an_older_file_of_the_quantization_counts(tmp_path: Path) -> None:
    plain, folder = quantize(tmp_path, DENSE, "gptq-4")
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    quantization.pop("quant_method")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps(quantization))
    assert_same(plain, folder)


def test_a_missing_tensor_is_named_with_its_layer(tmp_path: Path) -> None:
    _, folder = quantize(tmp_path, DENSE, "gptq-4")
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.scales"))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.scales.*expected a tensor"):
        logits_of(folder)


@pytest.mark.parametrize("name", ["gptq-4-act-order", "w8a16-asymmetric", "fp8-block", "nf4"])
def test_dummy_weights_have_the_formats_width_and_give_finite_logits(tmp_path: Path, name: str) -> None:
    _, folder = quantize(tmp_path, DENSE, name)
    stored, dummy = (load_model(read_config(folder, load_format=kind), CPU) for kind in ("auto", "dummy"))
    assert dummy.weight_bytes == stored.weight_bytes
    assert bool(logits_of(folder, load_format="dummy").isfinite().all())


def test_what_is_quantized_already_is_not_quantized_again(tmp_path: Path) -> None:
    _, folder = quantize(tmp_path, DENSE, "gptq-4")
    with pytest.raises(ValueError, match=r"quantization.*int8"):
        read_config(folder, quantization="int8")
    for name in ("gptq", "gptq_marlin"):
        assert read_config(folder, quantization=name) == read_config(folder)
    with pytest.raises(
        ValueError, match=r"quantization='awq': expected one of int4, int8, fp8; gptq, what the chec"
    ):
        read_config(folder, quantization="awq")


def make_gpt_oss(tmp_path: Path) -> tuple[Path, Path]:
    """(plain, mxfp4): folders of the same numbers, as transformers and as OpenAI store them."""
    plain, folder = make_decoder(tmp_path / "plain", "gpt-oss", **GPT_OSS).folder, tmp_path / "mxfp4"
    shutil.copytree(plain, folder)
    generator = torch.Generator().manual_seed(2)
    tensors = load_file(plain / "model.safetensors")
    packed = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, num_in, num_out = tensors[name].shape
        shape = (experts, num_out, num_in // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 125, shape, generator=generator, dtype=torch.uint8)
        powers = torch.exp2(scales.float() - 127)
        weights = [
            dequantize(make_mxfp4_weight(*each)) for each in zip(blocks.flatten(2), powers, strict=True)
        ]
        tensors[name] = torch.stack(weights).transpose(1, 2).contiguous()
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    for target, each in ((plain, tensors), (folder, packed)):
        rewrite(target, lambda old, each=each: (old.clear(), old.update(each)))
    config = json.loads((folder / "config.json").read_text())
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    (folder / "config.json").write_text(json.dumps(config))
    return plain, folder


@pytest.mark.usefixtures("library", "restored_torch")
def test_experts_in_one_tensor_are_read_plain_and_in_blocks(tmp_path: Path) -> None:
    plain, folder = make_gpt_oss(tmp_path)
    assert_same(plain, folder)
    assert_same(plain, folder, num_ranks=2)
    formats = read_config(folder).model.weight_formats
    kept = {name for name, each in {"": formats.default, **formats.exceptions}.items() if each is not None}
    assert kept == {name for name in kept if "experts" in name or not name}


@pytest.mark.usefixtures("library", "restored_torch")
def test_tensors_of_all_experts_that_hold_fewer_or_other_ones_are_named(tmp_path: Path) -> None:
    _, folder = make_gpt_oss(tmp_path)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name][:3]}))
    with pytest.raises(ModelError, match=rf"{name}=\[3, .*a tensor of 4 experts"):
        logits_of(folder)
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=r"down_proj\.scales"):
        logits_of(folder)
