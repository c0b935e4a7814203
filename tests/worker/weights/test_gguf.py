"""Tensors of GGUF files against the checkpoint that they were converted from, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from quire.core.stats.engine_facts import StartupClock, make_engine_facts
from quire.frontend.models.gguf import folder as gguf_folder
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.errors import ModelError
from quire.ipc.protocol.step import WorkerReady
from quire.ipc.spec.config import EngineConfig
from quire.ipc.spec.weight_format import WeightFormat
from quire.kernels.group.shared_group import SharedGroup
from quire.worker.models import load_model
from quire.worker.models.builder import open_weights
from quire.worker.weights.gguf import GgufSource, read_blocks
from quire.worker.weights.integer_weight import dequantize
from quire.worker.weights.weights import WHOLE, TensorSlice

from ...checkpoints import Recipe, find_tolerance, make_checkpoint
from ...decoders import make_decoder
from ...gguf_files import GgufWriter, convert_checkpoint
from ...paged import compute_alone
from ...ranks import Pipeline, run_ranks, with_ranks

CPU = torch.device("cpu")
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi3"),
    *("olmo2", "smollm3"),
)


# llama.cpp has one number for both, and no angles are scaled then.
_EQUAL_MSCALES: dict[str, Any] = {
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
        **{"mscale": 0.9, "mscale_all_dim": 0.9},
    }
}


_PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
# The settings that all files have.
_LLAMA3: dict[str, Any] = {
    **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}


@pytest.fixture(autouse=True)
def _cache(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path / "cache")


def read(path: Path, **args: Any) -> EngineConfig:
    """The config of a folder or file, without a tokenizer."""
    return EngineArgs(model=str(path), skip_tokenizer_init=True, **args).create_engine_config()


@pytest.mark.parametrize("family", [*FAMILIES, "phi3-longrope"])
def test_a_file_is_the_model_that_it_was_converted_from(family: str, tmp_path: Path):
    folder = tmp_path / family
    has_window = family in ("mistral", "gemma2", "gemma3_text", "phi3")
    window: dict[str, Any] = {"sliding_window": 13} if has_window else {}
    if family == "phi3-longrope":
        family, window = "phi3", {"rope": "longrope"}
    if family == "smollm3":  # whose file does not say which layers rotate nothing
        window = {"num_layers": 5}
    make_checkpoint(
        folder,
        Recipe(
            family=family,
            tied=family in ("gemma", "gemma2", "gemma3_text", "qwen2"),
            hidden_size=64,
            **window,
        ),
    )
    theirs = read(folder).model
    ours = read(convert_checkpoint(folder).write(tmp_path / "model.gguf")).model
    rope = theirs.spec.rope
    assert ours.spec.rope.attention_factor == pytest.approx(rope.attention_factor)
    # Two numbers are of float32 in the file.
    rope = replace(ours.spec.rope, attention_factor=rope.attention_factor)
    spec = replace(ours.spec, norm_eps=theirs.spec.norm_eps, rope=rope)
    if family in ("gemma2", "gemma3_text"):  # whose scale is in no key
        layers = [replace(layer, attention=replace(layer.attention, scale=24**-0.5)) for layer in spec.layers]
        spec = replace(spec, layers=tuple(layers))
    assert spec == theirs.spec
    assert ours.dtype == "float32"
    judge, source = (open_weights(model, torch.float32, CPU) for model in (theirs, ours))
    assert isinstance(source, GgufSource)
    for name, shape in _list_tensors(folder):
        expected, got = judge.take(name, shape), source.take(name, shape)
        if (
            family.startswith("gemma") and "norm" in name
        ):  # stored as 1 + w, so the last bits of a small w are gone
            assert torch.allclose(got, expected, rtol=0, atol=2**-23)
        else:
            assert torch.equal(got, expected), name
    source.finish()


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gpt-oss", {}),
        ("olmoe", {}),
        ("qwen2-moe", {"use_sliding_window": False, "mlp_only_layers": []}),
        ("qwen3-next", {"mlp_only_layers": []}),
        ("qwen3.5", {}),
        ("qwen3.5-moe", {}),
        ("dots1", {"sliding_window": None, "n_group": 1, "topk_group": 1}),
        ("arcee", {"mlp_bias": False}),
        ("cohere", {}),
        ("cohere2", {}),
        ("ernie4_5", {"use_bias": False}),
        ("exaone4", {"rope_parameters": _PLAIN}),
        ("exaone4-full", {}),
        ("gemma4", {}),
        ("gemma4-experts", {}),
        ("gemma4-inputs", {}),
        ("glm4", {}),
        ("granite", {"attention_bias": False}),
        ("granite-moe", {"attention_bias": False}),
        ("hunyuan", {}),
        ("minimax-m2", {}),
        ("ministral3", {}),
        ("seed_oss", {"attention_out_bias": False}),
        ("starcoder2", {"sliding_window": None}),
        ("apertus", {"rope_parameters": _LLAMA3}),
        ("ernie4.5-moe", {"use_bias": False, "rope_parameters": _PLAIN}),
        ("falcon", {}),
        ("falcon-groups", {}),
        ("glm4-moe", {}),
        ("gpt2", {}),
        ("gpt_neox", {}),
        ("gpt_neox-sequential", {}),
        ("hunyuan-moe", {}),
        (
            "llama4",
            {
                **{"no_rope_layer_interval": 4, "floor_scale": 8192, "attn_scale": 0.1},
                **{"attention_bias": False, "rope_parameters": {**_LLAMA3, "high_freq_factor": 1.0}},
            },
        ),
        (
            "mistral4",
            {
                "rope_parameters": {
                    **_EQUAL_MSCALES["rope_parameters"],
                    **{"llama_4_scaling_beta": 0.5, "partial_rotary_factor": 8 / 24},
                }
            },
        ),
        (
            "minicpm3",
            {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256, "is_old": True},
        ),
        ("nemotron", {}),
        ("olmo", {}),
        ("olmo3", {}),
        ("phi", {}),
        ("phimoe", {"router_jitter_noise": 0.01}),
        ("gpt_bigcode", {}),
        ("jais2", {}),
        ("stablelm", {}),
        ("stablelm-parallel", {}),
        ("deepseek_v2", _EQUAL_MSCALES),
        ("deepseek_v3", _EQUAL_MSCALES),
        ("deepseek_v3", {**_EQUAL_MSCALES, "is_old": True}),
    ],
)
@pytest.mark.usefixtures("library", "restored_torch")
def test_a_file_computes_what_its_checkpoint_does(family: str, fields: dict[str, Any], tmp_path: Path):
    is_old = fields.get("is_old", False)
    more = {key: value for key, value in fields.items() if key != "is_old"}
    checkpoint = make_decoder(tmp_path / family, family, **more)
    writer = convert_checkpoint(checkpoint.folder, is_old=is_old)
    configs = [
        read(path, dtype="float32", max_model_len=64)
        for path in (checkpoint.folder, writer.write(tmp_path / "model.gguf"))
    ]
    prompt = checkpoint.draw_tokens(45)
    theirs, ours = (compute_alone(load_model(config, CPU), config, prompt) for config in configs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=find_tolerance(checkpoint, theirs))


@pytest.mark.parametrize(
    ("family", "name"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")]
)
def test_the_text_of_qwens_vision_models_is_that_of_the_plain_ones(
    family: str, name: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / family, Recipe(family=family, hidden_size=64))
    writer = convert_checkpoint(tmp_path / family)
    plain = read(writer.write(tmp_path / "plain.gguf")).model
    theirs = writer.metadata["general.architecture"]
    writer.metadata = {key.replace(f"{theirs}.", f"{name}."): value for key, value in writer.metadata.items()}
    writer.metadata |= {"general.architecture": name, f"{name}.rope.dimension_sections": [2, 3, 3, 0]}
    writer.metadata[f"{name}.n_deepstack_layers"] = 3
    model = read(writer.write(tmp_path / "model.gguf")).model
    assert (model.spec, model.gguf_tensors) == (
        plain.spec,
        tuple(
            replace(each, offset=each.offset + model.gguf_tensors[0].offset - plain.gguf_tensors[0].offset)
            for each in plain.gguf_tensors
        ),
    )


@pytest.mark.usefixtures("library", "restored_torch")
def test_fused_projections_and_layers_that_predict_are_read_and_left_out(tmp_path: Path):
    """Newer converters may write queries, keys and values, or experts' gates and projections up, as one."""
    checkpoint = make_decoder(tmp_path / "plain", "glm4-moe")
    writer = convert_checkpoint(checkpoint.folder, type_="F16")
    whole = read(writer.write(tmp_path / "whole.gguf"), dtype="float32", max_model_len=64)
    for layer in range(2):
        for end in ("weight", "bias"):
            parts = [writer.tensors.pop(f"blk.{layer}.attn_{letter}.{end}") for letter in "qkv"]
            rows = sum(shape[0] for _, shape, _ in parts)
            fused = parts[0][0], (rows, *parts[0][1][1:]), b"".join(data for _, _, data in parts)
            writer.tensors[f"blk.{layer}.attn_qkv.{end}"] = fused
    writer.metadata |= {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    writer.add("blk.2.nextn.eh_proj.weight", torch.ones(48, 96))
    writer.add("blk.2.attn_norm.weight", torch.ones(48))
    parted = read(writer.write(tmp_path / "fused.gguf"), dtype="float32", max_model_len=64)
    prompt = checkpoint.draw_tokens(45)
    expected, actual = (compute_alone(load_model(config, CPU), config, prompt) for config in (whole, parted))
    assert torch.equal(actual, expected)


@pytest.mark.usefixtures("library", "restored_torch")
def test_experts_in_mxfp4_keep_their_four_bits(tmp_path: Path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4}
    checkpoint = make_decoder(tmp_path / "plain", "gpt-oss", **sizes)
    writer = convert_checkpoint(checkpoint.folder)
    stacks = [name for name in writer.tensors if name.endswith("_exps.weight")]
    for seed, name in enumerate(stacks):
        writer.add_blocks(name, "MXFP4", writer.tensors[name][1], seed)
    config = read(writer.write(tmp_path / "blocks.gguf"), dtype="float32", max_model_len=64)
    formats = config.model.weight_formats
    assert formats.find("model.layers.1.mlp.experts.3.down_proj") == WeightFormat(
        bits=4, group_size=32, has_codebook=True, scale_dtype="bfloat16", layout="gguf"
    )
    model = load_model(config, CPU)
    for name in stacks:
        _, shape, data = writer.tensors[name]
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape[0] * shape[1], -1)
        writer.add(name, dequantize(read_blocks(rows, "MXFP4")).view(shape))
    plain = read(writer.write(tmp_path / "plain.gguf"), dtype="float32", max_model_len=64)
    prompt = checkpoint.draw_tokens(45)
    expected = compute_alone(load_model(plain, CPU), plain, prompt)
    actual = compute_alone(model, config, prompt)
    torch.testing.assert_close(actual, expected, rtol=0, atol=find_tolerance(checkpoint, expected))


@pytest.mark.parametrize(
    ("type_", "spoilt", "name"),
    [
        ("F32", b"\xff\xff\xff\x7f", "model.norm.weight"),
        ("Q4_0", b"\xff\x7f", "model.layers.1.mlp.down_proj scales"),
        ("Q4_1", b"\x00\x3c\x00\xfc", "model.layers.1.mlp.down_proj offsets"),
        ("MXFP4", b"\xff", "model.layers.1.mlp.down_proj scales"),
    ],
)
def test_a_scale_that_is_not_finite_is_refused_by_its_tensor(
    tmp_path: Path, type_: Any, spoilt: bytes, name: str
):
    _, writer = make_quantized(tmp_path, "Q8_0" if type_ == "F32" else type_)
    stored = "output_norm.weight" if type_ == "F32" else "blk.1.ffn_down.weight"
    kind, shape, data = writer.tensors[stored]
    writer.tensors[stored] = kind, shape, spoilt + bytes(data)[len(spoilt) :]
    config = read(writer.write(tmp_path / "model.gguf"))
    with pytest.raises(ModelError, match=rf"{name}=-?(nan|inf): expected finite numbers"):
        load_model(config, CPU)


def _list_tensors(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if name != "lm_head.weight"]  # noqa: SIM118
        has_head = "lm_head.weight" in file.keys()  # noqa: SIM118
        names += ["lm_head.weight"] if has_head else []
        return [(name, tuple(file.get_slice(name).get_shape())) for name in names]


def make_quantized(folder: Path, type_: Any) -> tuple[EngineConfig, GgufWriter]:
    """A Llama whose matrices are random blocks, and what was written."""
    make_checkpoint(folder / "plain", Recipe(head_size=64, hidden_size=256, intermediate_size=256))
    writer = convert_checkpoint(folder / "plain")
    for seed, (name, (_, shape, _)) in enumerate(list(writer.tensors.items())):
        if len(shape) == 2:
            writer.add_blocks(name, type_, shape, seed)
    return read(writer.write(folder / "model.gguf")), writer


def _dequantize(writer: GgufWriter, name: str) -> torch.Tensor:
    type_, shape, data = writer.tensors[name]
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape[0], -1)
    return dequantize(read_blocks(rows, type_))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("type_", ["Q4_0", "Q6_K"])
@pytest.mark.parametrize(
    "cut", [WHOLE, TensorSlice(rows=(range(64, 96), range(200, 260))), TensorSlice(columns=range(32, 96))]
)
def test_a_quantized_tensor_comes_as_numbers_whole_and_cut(type_: Any, cut: TensorSlice, tmp_path: Path):
    config, writer = make_quantized(tmp_path, type_)
    source = open_weights(config.model, torch.bfloat16, CPU)
    names = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")]
    got = source.take_stacked(names, (256, 256), 256, cut)
    whole = torch.cat([_dequantize(writer, f"blk.1.ffn_{part}.weight") for part in ("gate", "up")])
    assert torch.equal(got, torch.cat(cut.find_pieces([whole])).bfloat16())
    assert config.model.dtype == "bfloat16"


def test_rows_of_queries_and_keys_are_put_back_in_their_order(tmp_path: Path):
    config, writer = make_quantized(tmp_path, "Q4_K")
    source = open_weights(config.model, torch.float32, CPU)
    got = source.take("model.layers.0.self_attn.k_proj.weight", (128, 256))
    paired = _dequantize(writer, "blk.0.attn_k.weight")  # of 2 heads of 64
    assert torch.equal(got[64:96], paired[64:128:2])
    assert torch.equal(got[96:128], paired[65:128:2])


def test_a_file_that_has_become_shorter_is_refused(tmp_path: Path):
    config, writer = make_quantized(tmp_path, "Q8_0")
    (tmp_path / "model.gguf").write_bytes(writer.encode()[:-512])
    source = open_weights(config.model, torch.float32, CPU)
    with pytest.raises(ModelError, match="as when its header was read"):
        source.take("model.norm.weight", (256,))


def test_clients_are_told_which_file_was_loaded(tmp_path: Path):
    config, _ = make_quantized(tmp_path, "Q4_0")
    facts = make_engine_facts(config, WorkerReady(8, "cpu", []), {}, StartupClock("start", 0.0))
    assert facts.weight_file == str(tmp_path / "model.gguf")


def test_a_gguf_file_is_quantized_by_its_own_method_only(tmp_path: Path):
    config, _ = make_quantized(tmp_path, "Q4_0")
    file = tmp_path / "model.gguf"
    assert read(file, quantization="gguf") == config
    assert config.model.weights_name == "gguf Q4_0"
    with pytest.raises(
        ValueError, match="quantization='awq': expected one of int4, int8, fp8; gguf, what the"
    ):
        read(file, quantization="awq")
    with pytest.raises(
        ValueError, match="quantization='gguf': expected one of int4, int8, fp8; this checkpoint is"
    ):
        read(tmp_path / "plain", quantization="gguf")


def test_stages_of_a_pipeline_take_their_tensors_and_leave_the_others(tmp_path: Path):
    make_checkpoint(tmp_path / "plain", Recipe(num_layers=3))
    model = read(convert_checkpoint(tmp_path / "plain").write(tmp_path / "model.gguf")).model
    for stage in range(2):
        source = open_weights(replace(model, spec=model.spec.for_stage(stage, 2)), torch.float32, CPU)
        for name, shape in _list_tensors(tmp_path / "plain"):
            if not name.startswith(model.spec.for_stage(stage, 2).unused_tensors):
                source.take(name, shape)
        source.finish()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("type_", ["Q4_0", "Q8_0"])
def test_ranks_and_stages_of_a_quantized_file_say_what_one_worker_does(tmp_path: Path, type_: Any):
    config, _ = make_quantized(tmp_path, type_)
    config = replace(config, model=replace(config.model, dtype="float32"))

    shared, prompt = with_ranks(config, 2), [3, 1, 4, 1, 5, 9]
    whole = compute_alone(load_model(config, CPU), config, prompt)
    assert torch.equal(compute_alone(Pipeline(config, 2), config, prompt), whole)

    def compute(group: SharedGroup) -> torch.Tensor:
        return compute_alone(load_model(shared, CPU, group), shared.for_rank(), prompt)

    of_ranks = run_ranks(2, compute)[0]
    torch.testing.assert_close(of_ranks, whole, rtol=0, atol=1e-4 * float(whole.abs().max()))
