"""Decoders by transformers' code against transformers itself, on random tiny checkpoints in float32."""

from __future__ import annotations

import gc
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from generic_checkpoints import (
    VOCAB_SIZE,
    WINDOW,
    GenericCheckpoint,
    make_generic_checkpoint,
    make_tiny_config,
)
from paged import PagedRun
from quire.ipc.errors import ConfigError, ModelError
from quire.ipc.spec.config import EngineConfig, ParallelConfig
from quire.ipc.spec.linear_shapes import count_model_bytes
from quire.worker.models.decoder import Decoder
from quire.worker.models.generic import rows
from quire.worker.models.generic.load import load_generic
from quire.worker.models.generic.model import GenericModel
from quire.worker.models.generic.plan import limit_memory, plan
from quire.worker.models.model import Model

CPU = torch.device("cpu")
LENGTHS = {"long": 45, "short": 21}
TOLERANCE = 1e-5  # of the largest logit: roundings of some ten sums of a hundred terms


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory) -> GenericCheckpoint:
    return make_generic_checkpoint(tmp_path_factory.mktemp("olmo3"), "olmo3")


def draw_prompts() -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        for name, length in LENGTHS.items()
    }


def compute_together(model: Model, config: EngineConfig, chunk: int) -> dict[str, torch.Tensor]:
    """Logits of all prompts, so many tokens of each in a step."""
    run, parts = PagedRun(model, config), {name: list[torch.Tensor]() for name in LENGTHS}
    for name, tokens in draw_prompts().items():
        run.add(name, tokens)
    while step := {
        name: min(chunk, len(request.token_ids) - request.num_computed)
        for name, request in run.requests.items()
        if request.num_computed < len(request.token_ids)
    }:
        for name, logits in run.step(step).items():
            parts[name].append(logits)
    return {name: torch.cat(each) for name, each in parts.items()}


def assert_equals_transformers(checkpoint: GenericCheckpoint) -> None:
    config = checkpoint.engine_config()
    model = load_generic(config, CPU)
    for chunk in (1, 7, 64):
        actual = compute_together(model, config, chunk)
        for name, tokens in draw_prompts().items():
            expected = checkpoint.compute_reference(tokens)
            atol = TOLERANCE * expected.abs().max().item()
            torch.testing.assert_close(actual[name], expected, rtol=0, atol=atol)


def test_logits_equal_transformers_in_any_chunking_and_company(olmo: GenericCheckpoint) -> None:
    assert_equals_transformers(olmo)


@pytest.mark.parametrize(
    ("old", "most"),
    [
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 8 << 30),
        ((1 << 30, resource.RLIM_INFINITY), 1 << 30),
        ((resource.RLIM_INFINITY, 2 << 30), 2 << 30),
        ((1 << 40, 1 << 41), 8 << 30),
    ],
)
def test_a_limit_that_the_planner_has_already_is_kept(
    monkeypatch: pytest.MonkeyPatch, old: tuple[int, int], most: int
) -> None:
    limits = {resource.RLIMIT_DATA: old}
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    limit_memory()
    assert limits == {resource.RLIMIT_DATA: (most, most)}


def test_what_is_all_operations_here_has_the_same_bits_in_any_company(olmo: GenericCheckpoint) -> None:
    config = olmo.engine_config()
    model = load_generic(config, CPU)
    assert isinstance(model, Decoder)
    gc.collect()  # it keeps what its program has the addresses of
    results = [compute_together(model, config, chunk) for chunk in (1, 7, 64)]
    model.native = None  # the same layers, called one by one
    results.append(compute_together(model, config, 7))
    for name in LENGTHS:
        assert all(torch.equal(each[name], results[0][name]) for each in results)


def test_bfloat16_is_near_transformers_in_float32(tmp_path: Path) -> None:
    for model_type in ("glm", "diffllama"):  # as a program, by transformers' code
        checkpoint = make_generic_checkpoint(tmp_path / model_type, model_type)
        config = checkpoint.engine_config(dtype="bfloat16")
        actual = compute_together(load_generic(config, CPU), config, 7)
        for name, tokens in draw_prompts().items():
            expected = checkpoint.compute_reference(tokens)
            assert torch.nn.functional.cosine_similarity(actual[name], expected, dim=1).min() > 0.99


def test_a_program_with_other_results_is_not_taken(
    olmo: GenericCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    pick = rows.pick
    monkeypatch.setattr(rows, "pick", lambda weights, index: pick(weights, index.roll(1)))
    assert isinstance(load_generic(olmo.engine_config(), CPU), GenericModel)


def test_the_spec_says_what_the_class_computes(olmo: GenericCheckpoint) -> None:
    spec = plan(olmo.config)
    heads = {
        (part.num_heads, part.num_kv_heads, part.head_size)
        for part in (layer.attention for layer in spec.layers)
    }
    assert heads == {(4, 2, 16)}
    assert [layer.attention.window for layer in spec.layers] == [WINDOW, None, WINDOW]
    assert (spec.architecture, spec.vocab_size, spec.hidden_size) == ("Olmo3ForCausalLM", VOCAB_SIZE, 64)
    assert spec.max_position_embeddings == 128
    assert not spec.tie_word_embeddings
    assert spec.generic is not None
    num_params = sum(each.numel() for each in olmo.reference.parameters())
    num_linear = sum(num_out * num_in * count for num_out, num_in, count in spec.generic.linears)
    assert num_linear + spec.generic.num_others + VOCAB_SIZE * 64 == num_params


@pytest.mark.parametrize(
    ("model_type", "sizes", "words"),
    [
        ("mamba", {}, "layer_types='linear_attention'"),
        ("bert", {"is_decoder": False}, "is_decoder=False"),
        ("bart", {}, "is_encoder_decoder"),
        ("llama", {"num_hidden_layers": 20_000}, "num_hidden_layers"),
        ("bloom", {}, "position_ids"),
        ("gpt_neox_japanese", {}, "'GPTNeoXJapaneseForCausalLM': .*; layer 0 does not"),
        ("llama4_text", {}, "layer_types='chunked_attention'"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(
    model_type: str, sizes: dict[str, object], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        plan(make_tiny_config(model_type, **sizes).to_dict() | {"model_type": model_type})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "paligemma", "text_config": {"model_type": "gemma"}}, "is_causal=False"),
        ({"model_type": "dac"}, "no ...ForCausalLM for model_type 'dac'"),
        ({"model_type": "own", "auto_map": {"AutoModel": "own.Own"}}, "(auto_map) is never run"),
        ({"model_type": "bamba", "time_step_limit": [0.0, {"__float__": "Infinity"}]}, "layer_types="),
    ],
)
def test_what_is_no_decoder_of_transformers_is_refused_by_its_reason(
    config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(words)):
        plan(config)


@pytest.mark.parametrize("field", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_several_ranks_are_refused_by_name(olmo: GenericCheckpoint, field: str) -> None:
    sizes: dict[str, Any] = {field: 2}
    with pytest.raises(ConfigError, match=f"{field}=2: expected 1 with a model that transformers computes"):
        EngineConfig(model=olmo.engine_config().model, parallel=ParallelConfig(**sizes))


def test_missing_unknown_and_misshapen_tensors_are_named(olmo: GenericCheckpoint, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(olmo.folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    broken = {
        f"must hold the tensor '{name}'": {key: each for key, each in tensors.items() if key != name},
        "model.layers.1.nothing": tensors | {"model.layers.1.nothing": torch.zeros(1)},
        r"the shape \[96, 64\]": tensors | {name: torch.zeros(95, 64)},
    }
    spec = plan(olmo.config)
    for words, changed in broken.items():
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=words):
            load_generic(olmo.engine_config(spec, model=str(tmp_path)), CPU)


def test_a_model_whose_tokens_meet_outside_attention_is_refused(
    olmo: GenericCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.olmo3.modeling_olmo3 import Olmo3DecoderLayer

    forward = Olmo3DecoderLayer.forward

    def mix(self: Olmo3DecoderLayer, x: torch.Tensor, **others: object) -> torch.Tensor:
        return forward(self, x + x.mean(1, keepdim=True), **others)  # pyright: ignore

    monkeypatch.setattr(Olmo3DecoderLayer, "forward", mix)
    with pytest.raises(ModelError, match="meet in attention alone"):
        load_generic(olmo.engine_config(), CPU)


def test_weights_are_made_narrower_while_they_are_read(olmo: GenericCheckpoint) -> None:
    config = olmo.engine_config(quantization="int8")
    plain, narrow = (load_generic(each, CPU) for each in (olmo.engine_config(), config))
    assert isinstance(narrow, Decoder)  # compared with the same narrow weights in transformers' code
    assert narrow.weight_bytes < plain.weight_bytes / 2
    expected, actual = (compute_together(model, config, 64)["long"] for model in (plain, narrow))
    assert torch.nn.functional.cosine_similarity(expected, actual, dim=1).min() > 0.99


def test_the_decoder_in_a_model_with_a_tower_is_read_alone(olmo: GenericCheckpoint, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(olmo.folder / "model.safetensors")
    config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": olmo.config,
        "vision_config": {"model_type": "clip_vision_model"},
    }
    for prefix in ("language_model.", "model.language_model."):
        names = {name: prefix + name.removeprefix("model." if "." in prefix[:-1] else "") for name in tensors}
        names["lm_head.weight"] = (
            "lm_head.weight" if prefix.startswith("model.") else prefix + "lm_head.weight"
        )
        wrapped = {names[name]: tensor for name, tensor in tensors.items()}
        save_file(wrapped | {"vision_tower.patch.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
        engine = olmo.engine_config(plan(config), model=str(tmp_path))
        actual = compute_together(load_generic(engine, CPU), engine, 64)["long"]
        expected = olmo.compute_reference(draw_prompts()["long"])
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


def test_longrope_goes_by_the_longest_sequence_of_the_engine(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + index for index in range(8)]}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32, "rope_theta": 1e4, **factors}
    checkpoint = make_generic_checkpoint(tmp_path, "phi3", rope_parameters=rope)
    tokens = {name: draw_prompts()["long"][:length] for name, length in {"long": 45, "short": 20}.items()}
    spec = plan(checkpoint.config)
    for max_model_len, name in ((128, "long"), (32, "short")):
        engine = checkpoint.engine_config(spec, max_model_len=max_model_len)
        run = PagedRun(load_generic(engine, CPU), engine)
        run.add(name, tokens[name])
        expected = checkpoint.compute_reference(tokens[name])
        atol = TOLERANCE * expected.abs().max().item()
        torch.testing.assert_close(run.run(name, 7), expected, rtol=0, atol=atol)


def test_experts_are_layers_of_ours_which_can_be_narrow(tmp_path: Path) -> None:
    checkpoint = make_generic_checkpoint(tmp_path, "dots1")
    assert_equals_transformers(checkpoint)
    spec = plan(checkpoint.config)
    plain, narrow = (
        load_generic(checkpoint.engine_config(spec, **fields), CPU)
        for fields in ({}, {"quantization": "int8"})
    )
    assert narrow.weight_bytes < plain.weight_bytes / 2
    for model, quantization in ((plain, None), (narrow, "int8")):
        counted = count_model_bytes(checkpoint.engine_config(spec, quantization=quantization).model)
        assert counted == pytest.approx(model.weight_bytes, rel=0.15)  # without what kernels pad
