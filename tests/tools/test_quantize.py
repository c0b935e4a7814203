"""`quire quantize`: what it writes is what GPTQ says, and loads as a checkpoint of those numbers."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import RECIPES, Recipe, make_checkpoint
from quire import LLM, SamplingParams
from quire.frontend.cli.entry import run_command
from quire.frontend.cli.parser import ExitCode
from quire.frontend.models.model_folder import pocket_folder
from quire.ipc.errors import InputError, ModelError
from quire.tools.quantize import layers as layer_stream
from quire.tools.quantize import quantize
from quire.tools.quantize.folder import FolderWriter
from quire.tools.quantize.quantize import QuantizeOptions, load_plain, quantize_folder
from quire.tools.quantize.rounding import choose_scales, factor_gram, round_by_gptq, round_to_nearest
from quire.tools.quantize.texts import draw_sequences
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB_SIZE = 2048  # the pocket model's, whose tokenizer the tiny models are given
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def make_plain(tmp_path: Path, recipe: Recipe) -> Path:
    wide = replace(recipe, hidden_size=64, intermediate_size=128, vocab_size=VOCAB_SIZE)
    folder = make_checkpoint(tmp_path / "plain", wide).folder
    shutil.copy(pocket_folder() / "tokenizer.json", folder)
    return folder


def options_for(folder: Path, out: Path, format: str = "gptq-int4", **fields: Any) -> QuantizeOptions:
    return QuantizeOptions(str(folder), out, format, num_samples=6, sample_length=64, **fields)  # type: ignore[arg-type]


def run_quantize(folder: Path, out: Path, format: str = "gptq-int4", **fields: Any) -> Path:
    options = options_for(folder, out, format, **fields)
    quantize_folder(options, load_plain(options), lambda _: None)
    return out


def dequantize_folder(folder: Path, plain: Path, out: Path) -> Path:
    """A plain checkpoint of the numbers in a pack-quantized one, read word by word."""
    shutil.copytree(plain, out)
    stored, tensors = load_file(folder / "model.safetensors"), load_file(plain / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    bits = config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"]
    packed = [name for name in stored if name.endswith(".weight_packed")]
    assert packed
    for name in packed:
        base = name.removesuffix("_packed")
        words, scales = stored[name], stored[f"{base}_scale"].float()
        shifts = torch.arange(0, 32, bits)
        codes = (words.unsqueeze(2) >> shifts & (1 << bits) - 1).flatten(1)
        assert list(codes.shape) == stored[f"{base}_shape"].tolist()
        size = codes.shape[1] // scales.shape[1]
        tensors[base] = (codes - (1 << bits - 1)) * scales.repeat_interleave(size, 1)
    (out / "model.safetensors").unlink()
    save_file(tensors, out / "model.safetensors")
    return out


def say(folder: Path) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    arguments = {"dtype": "float32", "distributed_executor_backend": "uni", "skip_tokenizer_init": True}
    with LLM(str(folder), max_model_len=128, **arguments) as llm:
        return llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("format", quantize.FORMATS)
@pytest.mark.parametrize(
    "name",
    ["qwen3-moe", *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3", "gemma2", "qwen2"))],
)
def test_an_engine_says_the_tokens_of_the_same_numbers(tmp_path: Path, name: str, format: str) -> None:
    plain = make_plain(tmp_path, RECIPES[name])
    out = run_quantize(plain, tmp_path / "out", format)
    assert say(out) == say(dequantize_folder(out, plain, tmp_path / "wide"))


def test_fused_projections_keep_their_names_and_order(tmp_path: Path) -> None:
    plain = make_plain(tmp_path, Recipe(family="phi3"))
    out = run_quantize(plain, tmp_path / "out", group_size=32)
    assert "model.layers.0.mlp.gate_up_proj.weight_packed" in load_file(out / "model.safetensors")
    assert say(out) == say(dequantize_folder(out, plain, tmp_path / "wide"))


def test_what_is_not_quantized_is_listed_and_kept(tmp_path: Path) -> None:
    plain = make_plain(tmp_path, RECIPES["qwen3-moe"])
    out = run_quantize(plain, tmp_path / "out", "int8")
    config = json.loads((out / "config.json").read_text())
    routers = ["model.layers.0.mlp.gate", "model.layers.2.mlp.gate"]
    assert config["quantization_config"]["ignore"] == ["lm_head", *routers]
    before, after = load_file(plain / "model.safetensors"), load_file(out / "model.safetensors")
    kept = before.keys() & after.keys()
    assert {"model.embed_tokens.weight", "lm_head.weight", f"{routers[0]}.weight"} <= kept
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert (out / "tokenizer.json").read_bytes() == (plain / "tokenizer.json").read_bytes()


def make_problem(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight, and inputs that depend on each other."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(512, 24, generator=generator) @ torch.randn(24, 192, generator=generator)
    inputs += 0.3 * torch.randn(inputs.shape, generator=generator)
    return torch.randn(40, 192, generator=generator), inputs


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_leaves_less_error_in_the_outputs_than_rounding_to_nearest(act_order: bool) -> None:
    weight, inputs = make_problem()
    scales = choose_scales(weight, 4, 64, torch.float32)
    nearest = round_to_nearest(weight, scales, 4, 64)
    rounded = round_by_gptq(weight, scales, *factor_gram(inputs.T @ inputs, act_order), 4, 64)
    errors = [float(((each.dequantize() - weight) @ inputs.T).square().sum()) for each in (rounded, nearest)]
    assert errors[0] < 0.4 * errors[1]


def test_inputs_that_do_not_depend_on_each_other_are_rounded_to_nearest() -> None:
    weight, _ = make_problem()
    scales = choose_scales(weight, 4, 32, torch.bfloat16)
    factor = factor_gram(torch.diag(torch.rand(192)), True)
    assert torch.equal(
        round_by_gptq(weight, scales, *factor, 4, 32).codes, round_to_nearest(weight, scales, 4, 32).codes
    )


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_inputs_that_say_nothing_are_rounded_to_nearest(value: float) -> None:
    weight, _ = make_problem()
    gram = torch.full((192, 192), value)
    scales = choose_scales(weight, 4, 64, torch.float32)
    rounded = round_by_gptq(weight, scales, *factor_gram(gram, False), 4, 64)
    assert torch.equal(rounded.codes, round_to_nearest(weight, scales, 4, 64).codes)


def test_scales_clip_where_that_is_less_error() -> None:
    weight = torch.cat([torch.linspace(-1, 1, 127), torch.tensor([2.0])]).unsqueeze(0)
    clipped = round_to_nearest(weight, choose_scales(weight, 4, 128, torch.float32), 4, 128)
    whole = round_to_nearest(weight, torch.tensor([[-0.25]]), 4, 128)
    errors = [float((each.dequantize() - weight).square().sum()) for each in (clipped, whole)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize(
    ("fields", "content", "reason"),
    [
        (
            {"group_size": 128},
            b"",
            r"group_size=128: expected one of 64, 32: model\.layers\.0\.self_attn\.q_proj has 64",
        ),
        (
            {"calibration": Path("/no/such/file")},
            b"",
            "calibration='/no/such/file': expected a file that can be read",
        ),
        ({}, b"Once upon a time. " * 100, r"text': expected a text of at least 1408 tokens"),
        ({}, b"fine\x8b\x08" * 10000, r"text': expected a text in UTF-8 \(its byte 4 is none\)"),
        ({"num_samples": 10**11}, b"", "samples=100000000000: expected at most 65536 of 64 tokens"),
    ],
)
def test_what_does_not_go_is_named_and_leaves_nothing(
    tmp_path: Path, fields: dict[str, Any], content: bytes, reason: str
) -> None:
    plain, text = make_plain(tmp_path, RECIPES["qwen2"]), tmp_path / "text"
    text.write_bytes(content)
    options = replace(options_for(plain, tmp_path / "out", calibration=text), **fields)
    with pytest.raises(InputError, match=reason):
        quantize_folder(options, load_plain(options), lambda _: None)
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "text"}


def test_a_long_text_may_be_cut_within_a_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, file = make_plain(tmp_path, RECIPES["qwen2"]), tmp_path / "text.txt"
    monkeypatch.setattr(f"{draw_sequences.__module__}._MAX_TEXT_BYTES", 9001)
    file.write_text("é" * 5000)
    assert run_quantize(plain, tmp_path / "out", calibration=file).is_dir()


@pytest.mark.parametrize("target", ["empty", "missing"])
def test_a_link_to_where_the_folder_belongs_is_followed(tmp_path: Path, target: str) -> None:
    plain, link = make_plain(tmp_path, RECIPES["qwen2"]), tmp_path / "link"
    (tmp_path / "empty").mkdir()
    link.symlink_to(target)
    assert quantize_by_command(plain, link) == 0
    assert link.is_symlink()
    assert (tmp_path / target / "model.safetensors").is_file()


@pytest.mark.parametrize("out", ["file/out", "circle/out", "/proc/none/out", "n" * 300])
def test_a_folder_that_cannot_be_made_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], out: str
) -> None:
    plain = make_plain(tmp_path, RECIPES["qwen2"])
    (tmp_path / "file").write_text("kept")
    (tmp_path / "circle").symlink_to("circle")
    capfd.readouterr()
    assert quantize_by_command(plain, tmp_path / out) == ExitCode.USAGE
    said = capfd.readouterr().err
    assert said.startswith("quire: error: OUT=")
    assert "a folder that can be made" in said


def quantize_by_command(folder: Path, out: Path, *arguments: str) -> int:
    fields = ["--samples", "2", "--sample-length", "32", "--no-measure", *arguments]
    return run_command(["quantize", str(folder), str(out), *fields])


def fail_to_save(*_: Any, **__: Any) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("broken", "how", "code", "said"),
    [
        (f"{FolderWriter.__module__}.save_file", fail_to_save, ExitCode.FAILED, "0: No space left on device"),
        (
            f"{FolderWriter.__module__}.FolderWriter._write_config",
            lambda *_: signal.raise_signal(signal.SIGTERM),
            128 + signal.SIGTERM,
            "",
        ),
    ],
    ids=["full disk", "SIGTERM"],
)
def test_nothing_is_left_of_what_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *, broken: str,
    how: Callable[..., None], code: int, said: str,
) -> None:  # fmt: skip
    plain = make_plain(tmp_path, RECIPES["qwen2"])
    monkeypatch.setattr(broken, how)
    capfd.readouterr()
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert quantize_by_command(plain, tmp_path / "out") == code
    finally:
        signal.signal(signal.SIGTERM, before)
    shown = capfd.readouterr().err
    assert said in shown
    assert "Traceback" not in shown
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_sequences_of_one_token_are_refused(tmp_path: Path) -> None:
    assert quantize_by_command(tmp_path, tmp_path / "out", "--sample-length", "1") == ExitCode.USAGE


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path) -> None:
    plain = make_plain(tmp_path, RECIPES["qwen2"])
    out = run_quantize(plain, tmp_path / "out", "int8")
    with pytest.raises(ModelError, match=r"pack-quantized 8-bit\)': expected a plain checkpoint"):
        load_plain(options_for(out, tmp_path / "again"))


def test_nothing_is_left_of_what_fails_in_the_middle(tmp_path: Path) -> None:
    plain = make_plain(tmp_path, RECIPES["qwen2"])
    tensors = load_file(plain / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.inf
    (plain / "model.safetensors").unlink()
    save_file(tensors, plain / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.down_proj\.weight=inf: expected finite"):
        run_quantize(plain, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_many_tensors_go_into_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{FolderWriter.__module__}._SHARD_BYTES", 100_000)
    plain = make_plain(tmp_path, RECIPES["qwen2"])
    out = run_quantize(plain, tmp_path / "out")
    names = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(names) > 1
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert len(say(out)) == 16


def test_a_model_in_bfloat16_is_calibrated_in_it(tmp_path: Path) -> None:
    """Layers are computed in the model's type, and what follows them is close to what float32 gives."""
    plain = make_plain(tmp_path, RECIPES["qwen3"])
    narrow = tmp_path / "narrow"
    shutil.copytree(plain, narrow)
    tensors = {name: each.bfloat16() for name, each in load_file(plain / "model.safetensors").items()}
    (narrow / "model.safetensors").unlink()
    save_file(tensors, narrow / "model.safetensors")
    config = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    grams: list[Tensor] = []
    for folder in (plain, narrow):
        stream = layer_stream.LayerStream(
            load_plain(options_for(folder, tmp_path / "out")), torch.arange(128).view(2, 64), 2
        )
        name = "model.layers.0.mlp.down_proj"
        weight = stream.weights.read_stored(f"{name}.weight", (64, 128)).float()
        stream.advance(0, {f"{name}.weight": 2 * weight})
        gram = stream.record(1)[0].gram
        assert gram is not None
        grams.append(gram)
    assert float((grams[0] - grams[1]).norm() / grams[0].norm()) < 0.02
    stored = load_file(run_quantize(narrow, tmp_path / "out") / "model.safetensors")
    assert stored["model.layers.0.mlp.down_proj.weight_scale"].dtype == torch.bfloat16


def test_a_layer_is_given_what_the_quantized_ones_before_it_make(tmp_path: Path) -> None:
    """The hidden states of a whole model's pass, so that layers follow each other as they do when served."""
    plain = make_plain(tmp_path, RECIPES["qwen2"])
    config = load_plain(options_for(plain, tmp_path / "out"))
    tokens = torch.arange(128).view(2, 64)
    one_by_one = layer_stream.LayerStream(config, tokens, 1)
    together = layer_stream.LayerStream(config, tokens, 2)
    for stream in (one_by_one, together):
        stream.advance(0, {})
    grams = [stream.record(1)[0].gram for stream in (one_by_one, together)]
    assert grams[0] is not None
    assert grams[1] is not None
    torch.testing.assert_close(grams[0], grams[1])
    assert float(grams[0].diagonal().min()) > 0


@pytest.mark.slow
def test_the_command_tells_what_it_cost(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain, text = make_plain(tmp_path, RECIPES["qwen2"]), tmp_path / "text.txt"
    (plain / "tokenizer_config.json").write_text("{}")
    tokenizer = json.loads((plain / "tokenizer.json").read_text())
    (plain / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))  # not the pocket model's file
    text.write_text("".join(f"{number} plus {number + 1} is {2 * number + 1}. " for number in range(2000)))
    arguments = ["--samples", "4", "--sample-length", "64", "--calibration", str(text)]
    code = run_command(["quantize", str(plain), str(tmp_path / "out"), *arguments])
    said, shown = capfd.readouterr()
    assert code == 0, shown
    assert "layer 2 of 2" in shown
    assert "perplexity" in said
    assert "of 1008 positions" in said


def test_a_folder_that_is_there_is_refused_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    assert run_command(["quantize", "pocket", str(tmp_path)]) != 0
    assert "a folder that is not there yet, or an empty one" in capfd.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "kept"
