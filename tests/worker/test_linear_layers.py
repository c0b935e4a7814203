"""Which form a linear layer takes, what it says of itself, and narrow weights in a whole model."""

from __future__ import annotations

import pytest
import torch
from checkpoints import Checkpoint, Recipe, find_tolerance, make_checkpoint
from paged import assert_same_logits, compute_alone
from quire.ipc.errors import ConfigError
from quire.ipc.spec.weight_format import WeightFormat, make_online_formats
from quire.worker.layers import linear
from quire.worker.layers.linear import NativeLinear, TorchLinear, TorchNarrowLinear, make_linear
from quire.worker.models import load_model
from quire.worker.weights.integer_weight import dequantize
from quire.worker.weights.online import quantize

CPU = torch.device("cpu")
INT4, INT8, FP8 = (make_online_formats(name, name).default for name in ("int4", "int8", "fp8"))  # type: ignore[arg-type]
RECIPES = {
    "llama": Recipe(attention_bias=True, mlp_bias=True),
    "qwen3-tied": Recipe(family="qwen3", tied=True, hidden_size=160, intermediate_size=336, vocab_size=600),
}


@pytest.fixture(scope="module", params=RECIPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), RECIPES[request.param])


def run_alone(
    checkpoint: Checkpoint,
    token_ids: list[int],
    dtype: str,
    quantization: str | None,
    chunk: int | None = None,
) -> torch.Tensor:
    config = checkpoint.engine_config(dtype, quantization=quantization)
    return compute_alone(load_model(config, CPU), config, token_ids, chunk)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_multiplies_exactly_in_one_copy_of_the_weight(dtype: torch.dtype) -> None:
    weight = torch.ones(64, 128, dtype=dtype)
    layer = make_linear(weight, torch.ones(64, dtype=dtype))
    assert isinstance(layer, NativeLinear)
    assert layer.is_exact
    assert layer.size_bytes == weight.nbytes + 64 * weight.itemsize
    for format in (INT4, INT8, FP8):
        assert format is not None
        narrow = make_linear(quantize(weight, format), None, dtype)
        assert narrow.is_exact
        assert narrow.size_bytes == format.count_bytes(64, 128)


@pytest.mark.parametrize("format", [INT4, INT8, FP8])
def test_without_native_kernels_torch_multiplies_narrow_weights(
    format: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "choose_linear", lambda *_arguments: "torch")
    monkeypatch.setattr(linear, "_WIDE_SIZE", 64 * 7)
    weight, bias, x = torch.randn(40, 64).half(), torch.randn(40).half(), torch.randn(3, 64).half()
    narrow = quantize(weight, format)
    layer = make_linear(narrow, bias, torch.float16)
    assert isinstance(layer, TorchNarrowLinear)
    assert not layer.is_exact
    expected = torch.nn.functional.linear(x, dequantize(narrow).half()) + bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-2, atol=1e-2)
    assert isinstance(make_linear(weight, bias), TorchLinear)


@pytest.mark.parametrize(("quantization", "deviation"), [("int4", 0.12), ("int8", 0.01), ("fp8", 0.03)])
def test_narrow_logits_stay_near_and_do_not_depend_on_chunks(
    checkpoint: Checkpoint, quantization: str, deviation: float
) -> None:
    """`deviation`: how far rounding moves a weight, in the weights' own deviation.

    Of int8 it is sigma / 127 * 3 / sqrt(12) where a row's largest is 3 or 4 sigma; of fp8 2^-4 / sqrt(3) of a
    weight; of int4 a step of 3 sigma / 8 / sqrt(12). 7 products a layer and the last one add up as a random
    walk over 15; the factor 2 leaves room for what attention and norms do with it.
    """
    token_ids = checkpoint.draw_tokens(40)
    wide = run_alone(checkpoint, token_ids, "float32", None)
    narrow = run_alone(checkpoint, token_ids, "bfloat16", quantization)
    relative = ((narrow - wide).norm() / wide.norm()).item()
    assert relative < 2 * deviation * 15**0.5
    assert relative > deviation / 100  # quantized at all
    config = checkpoint.engine_config("bfloat16")
    for chunk in (1, 17):
        part = run_alone(checkpoint, token_ids, "bfloat16", quantization, chunk)
        assert_same_logits(part, narrow, config)


@pytest.mark.parametrize("quantization", ["int4", "fp8"])
def test_narrow_logits_are_those_of_the_rounded_weights(checkpoint: Checkpoint, quantization: str) -> None:
    """The oracle is transformers with every projection replaced by what its codes stand for."""
    token_ids = checkpoint.draw_tokens(40)
    formats = checkpoint.engine_config(quantization=quantization).model.weight_formats
    actual = run_alone(checkpoint, token_ids, "float32", quantization)
    state = {name: tensor.clone() for name, tensor in checkpoint.reference.state_dict().items()}

    def rounded(name: str, weight: torch.Tensor) -> torch.Tensor:
        format = formats.find(name)
        assert format is not None
        return dequantize(quantize(weight.detach(), format))

    try:
        with torch.no_grad():
            for name, module in checkpoint.reference.named_modules():
                if isinstance(module, torch.nn.Linear) and name != "lm_head":
                    module.weight.copy_(rounded(name, module.weight))
            hidden = checkpoint.reference.model(torch.tensor([token_ids])).last_hidden_state[0]
            expected = hidden @ rounded("lm_head", checkpoint.reference.lm_head.weight).t()
    finally:
        checkpoint.reference.load_state_dict(state)
    torch.testing.assert_close(actual, expected, rtol=0, atol=find_tolerance(checkpoint, expected))


def test_an_unknown_quantization_is_refused_with_what_is_allowed(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="quantization='awq': expected one of int4, int8, fp8"):
        checkpoint.engine_config(quantization="awq")
    with pytest.raises(
        ConfigError, match="lm_head_quantization='int2': expected one of none, int4, int8, fp8"
    ):
        checkpoint.engine_config(quantization="int4", lm_head_quantization="int2")
    with pytest.raises(ConfigError, match="lm_head_quantization='int4': expected None without quantization"):
        checkpoint.engine_config(lm_head_quantization="int4")
