"""Which form a linear layer takes, what it says of itself, and int8 weights in a whole model."""

from __future__ import annotations

import pytest
import torch
from checkpoints import Checkpoint, Recipe, make_checkpoint
from paged import PagedRun, assert_same_logits
from quire.ipc.errors import ConfigError
from quire.kernels.linear_int8 import quantize_int8
from quire.worker.layers import linear
from quire.worker.layers.linear import NativeLinear, TorchInt8Linear, TorchLinear, make_linear
from quire.worker.models import load_model

CPU = torch.device("cpu")
RECIPES = {
    "llama": Recipe(attention_bias=True, mlp_bias=True),
    "qwen3-tied": Recipe(family="qwen3", tied=True, hidden_size=160, intermediate_size=336, vocab_size=600),
}


@pytest.fixture(scope="module", params=RECIPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), RECIPES[request.param])


def tokens_of(checkpoint: Checkpoint, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(checkpoint.spec.vocab_size, (length,), generator=generator).tolist()


def run_alone(
    checkpoint: Checkpoint,
    token_ids: list[int],
    dtype: str,
    quantization: str | None,
    chunk: int | None = None,
) -> torch.Tensor:
    config = checkpoint.engine_config(dtype, quantization=quantization)
    run = PagedRun(load_model(config, CPU), config)
    run.add("a", token_ids)
    return run.run("a", chunk)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_multiplies_exactly_in_one_copy_of_the_weight(dtype: torch.dtype) -> None:
    weight = torch.ones(64, 128, dtype=dtype)
    layer = make_linear(weight, torch.ones(64, dtype=dtype))
    assert isinstance(layer, NativeLinear)
    assert layer.is_exact
    assert layer.size_bytes == weight.nbytes + 64 * weight.itemsize
    quantized = make_linear(weight, None, "int8")
    assert quantized.is_exact
    assert quantized.size_bytes == 64 * 128 + 64 * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_without_native_kernels_torch_multiplies_int8_weights(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "choose_linear", lambda *_arguments: "torch")
    weight, bias, x = torch.randn(40, 64).to(dtype), torch.randn(40).to(dtype), torch.randn(3, 64).to(dtype)
    layer = make_linear(weight, bias, "int8")
    assert isinstance(layer, TorchInt8Linear)
    assert not layer.is_exact
    quantized, scales = quantize_int8(weight)
    expected = x.double() @ (quantized.double() * scales.double().unsqueeze(1)).t() + bias.double()
    # A sum of 64 products, a scale and a bias, each rounded.
    bound = 66 * torch.finfo(dtype).eps * 64 * x.abs().max() * weight.abs().max()
    assert ((layer(x).double() - expected).abs() <= bound).all()
    assert isinstance(make_linear(weight, bias), TorchLinear)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_logits_stay_near_and_do_not_depend_on_chunks(checkpoint: Checkpoint, dtype: str) -> None:
    token_ids = tokens_of(checkpoint, 40)
    wide = run_alone(checkpoint, token_ids, "float32", None)
    quantized = run_alone(checkpoint, token_ids, dtype, "int8")
    # Rounding moves a weight by a uniform part of +-scale/2: sigma / 127 * 3 / sqrt(12), under 1 % of the
    # weights' own deviation where a row's largest is 3 or 4 of them. 7 products a layer and the last one
    # add up as a random walk over 15; the factor 2 leaves room for what attention and norms do with it.
    relative = ((quantized - wide).norm() / wide.norm()).item()
    assert relative < 2 * 0.01 * 15**0.5
    assert relative > 1e-4  # quantized at all
    config = checkpoint.engine_config(dtype)
    for chunk in (1, 17):
        assert_same_logits(run_alone(checkpoint, token_ids, dtype, "int8", chunk), quantized, config)


def test_int8_logits_are_those_of_the_rounded_weights(checkpoint: Checkpoint) -> None:
    """The oracle is transformers with every projection replaced by scales * q."""
    token_ids = tokens_of(checkpoint, 40)
    actual = run_alone(checkpoint, token_ids, "float32", "int8")
    state = {name: tensor.clone() for name, tensor in checkpoint.reference.state_dict().items()}
    try:
        with torch.no_grad():
            for name, module in checkpoint.reference.named_modules():
                if isinstance(module, torch.nn.Linear) and name != "lm_head":
                    module.weight.copy_(dequantize(module.weight))
            hidden = checkpoint.reference.model(torch.tensor([token_ids])).last_hidden_state[0]
            expected = hidden @ dequantize(checkpoint.reference.lm_head.weight).t()
    finally:
        checkpoint.reference.load_state_dict(state)
    atol = 8 * torch.finfo(torch.float32).eps * checkpoint.num_terms**0.5 * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def dequantize(weight: torch.Tensor) -> torch.Tensor:
    quantized, scales = quantize_int8(weight.detach())
    return quantized.float() * scales.unsqueeze(1)


def test_an_unknown_quantization_is_refused_with_what_is_allowed(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="quantization='awq': one of int8"):
        checkpoint.engine_config(quantization="awq")
