"""Makes the golden files beside it with the formats' own libraries; README.md says how. No test runs it.

A file holds one linear layer "linear" as a checkpoint of its format does, the tensor "expected", which is
what the library itself dequantizes it to in float32, and as metadata "config" the quantization_config.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parent
N, K = 64, 128  # outputs, inputs


def skip_init(name: str) -> None:
    """Let a package's files be imported without its own `__init__`, which asks for old or heavy libraries."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    package = types.ModuleType(name)
    package.__path__ = [str(Path(spec.origin).parent)]
    sys.modules[name] = package


def make_weight(seed: int, num_out: int = N, num_in: int = K) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_out, num_in, generator=generator) * 0.1 + 0.01


def save(
    name: str,
    tensors: dict[str, Tensor],
    expected: Tensor,
    config: dict[str, Any],
    metadata: dict[str, str] | None = None,
) -> None:
    stored = {f"linear.{key}": tensor.detach().contiguous().clone() for key, tensor in tensors.items()}
    stored["expected"] = expected.detach().float().contiguous()
    path = FOLDER / f"{name}.safetensors"
    save_file(stored, path, metadata={"config": json.dumps(config), **(metadata or {})})
    print(path.name, path.stat().st_size, {key: (str(t.dtype), tuple(t.shape)) for key, t in stored.items()})


def choose_groups(weight: Tensor, group: Tensor, bits: int, is_symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales (float16 numbers) and zeros [N, groups] of round to nearest; zeros are at least 1 (GPTQ v1)."""
    num_groups, most = int(group.max()) + 1, 2**bits - 1
    parts = [weight[:, group == index] for index in range(num_groups)]
    low = torch.stack([part.amin(1).clamp(max=0) for part in parts], 1)
    high = torch.stack([part.amax(1).clamp(min=0) for part in parts], 1)
    if is_symmetric:
        scales = (torch.maximum(-low, high) * 2 / most).half()
        return scales, torch.full_like(scales, 2 ** (bits - 1))
    scales = ((high - low) / most).half()
    return scales, (-low / scales.float()).round().clamp(1, most).half()


def make_gptq(
    name: str, bits: int, is_symmetric: bool, is_ordered: bool, version: int, size: int = 32
) -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import (
        convert_gptq_v1_to_v2_format_module,
        convert_gptq_v2_to_v1_format_module,
    )

    weight = make_weight(bits)
    group = torch.arange(K, dtype=torch.int32) // size
    if is_ordered:
        group = group[torch.randperm(K, generator=torch.Generator().manual_seed(1))]
    scales, zeros = choose_groups(weight, group, bits, is_symmetric)
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = weight
    layer = TorchLinear(
        bits=bits, group_size=size, sym=is_symmetric, desc_act=is_ordered, in_features=K, out_features=N
    )
    layer.pack_original(linear, scales.float(), zeros.float(), group)
    layer.eval()
    if version == 1:

        class Config:
            pass

        config = Config()
        config.bits, config.pack_dtype = bits, torch.int32  # type: ignore[attr-defined]
        convert_gptq_v2_to_v1_format_module(layer, config)  # type: ignore[arg-type]
    tensors = {part: getattr(layer, part).clone() for part in ("qweight", "qzeros", "scales", "g_idx")}
    if version == 1:
        convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
    layer.scales = layer.scales.float()
    layer.post_init()
    expected = layer.dequantize_weight().T
    config_json = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "desc_act": is_ordered,
        "sym": is_symmetric,
        "lm_head": False,
        "true_sequential": True,
        "damp_percent": 0.01,
        "pack_dtype": "int32",
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "meta": {"quantizer": ["gptqmodel:7.7.0"]},
    }
    save(name, tensors, expected, config_json)


def make_autogptq() -> None:
    skip_init("auto_gptq")
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    weight = make_weight(11)
    group = (torch.arange(K, dtype=torch.int32) // 64)[torch.randperm(K)]
    scales, zeros = choose_groups(weight, group, 4, False)
    linear = torch.nn.Linear(K, N, bias=False).half()
    linear.weight.data = weight.half()
    layer = QuantLinear(4, 64, K, N, bias=False)
    layer.pack(linear, scales.float(), zeros.float(), group)
    tensors = {part: getattr(layer, part).clone() for part in ("qweight", "qzeros", "scales", "g_idx")}
    layer.scales = layer.scales.float()
    expected = layer(torch.eye(K)).T  # a product with ones and zeros is exact
    config = {"bits": 4, "group_size": 64, "damp_percent": 0.01, "desc_act": True, "sym": False,
              "static_groups": False, "true_sequential": True, "model_name_or_path": None,
              "quant_method": "gptq", "checkpoint_format": "gptq"}  # fmt: skip
    save("autogptq_4bit_act_order", tensors, expected, config)


def make_awq() -> None:
    skip_init("awq")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    weight, size = make_weight(12), 32
    group = torch.arange(K) // size
    scales, zeros = choose_groups(weight, group, 4, False)
    linear = torch.nn.Linear(K, N, bias=False).half()
    linear.weight.data = weight.half()
    layer = WQLinear_GEMM.from_linear(
        linear, 4, size, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
    )
    tensors = {part: getattr(layer, part) for part in ("qweight", "qzeros", "scales")}
    expected = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, size).T
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm",
              "modules_to_not_convert": None}  # fmt: skip
    save("awq_gemm", tensors, expected, config)


def make_compressed(
    name: str, weights: dict[str, Any], format: str, activations: Any = None, n: int = N
) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if activations is None else QuantizationArgs(**activations),
    )
    args, k = scheme.weights, 160 if weights.get("strategy") == "block" else K
    weight = make_weight(13, n, k).bfloat16()
    rows, columns = n, 1
    if args.strategy == "group":
        columns = k // args.group_size
    elif args.strategy == "tensor":
        rows = 1
    elif args.strategy == "block":
        rows, columns = (-(-size // block) for size, block in zip((n, k), args.block_structure, strict=True))
    row_size, column_size = -(-n // rows), -(-k // columns)
    if args.strategy == "block":
        row_size, column_size = args.block_structure
    blocks = [[weight[r * row_size : (r + 1) * row_size, c * column_size : (c + 1) * column_size]
               for c in range(columns)] for r in range(rows)]  # fmt: skip
    low = torch.tensor([[float(block.min()) for block in row] for row in blocks])
    high = torch.tensor([[float(block.max()) for block in row] for row in blocks])
    scale, zero = calculate_qparams(low, high, args)
    scale = scale.bfloat16().reshape(-1) if args.strategy == "tensor" else scale.bfloat16()
    state = {"weight": weight, "weight_scale": scale}
    if not args.symmetric:
        state["weight_zero_point"] = zero.to(torch.int8).reshape(scale.shape)
    compressor = BaseCompressor.load_from_registry(format)
    stored = type(compressor).compress(dict(state), scheme) if not isinstance(compressor, type) else None
    stored = compressor.compress(dict(state), scheme) if stored is None else stored
    wide = {**stored, "weight_scale": stored["weight_scale"].float() if format != "mxfp4-pack-quantized"
            else stored["weight_scale"]}  # fmt: skip
    expected = compressor.decompress(wide, scheme)["weight"]
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=format, ignore=["lm_head"], quantization_status="compressed"
    )
    save(name, stored, expected, json.loads(config.model_dump_json()))


def make_all_compressed() -> None:
    group = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    channel8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    token = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    token_fp8 = {**token, "type": "float"}
    make_compressed("ct_pack_w4a16", {**group, "symmetric": True}, "pack-quantized")
    make_compressed("ct_pack_w4a16_asymmetric", {**group, "symmetric": False}, "pack-quantized")
    make_compressed("ct_pack_w3a16", {**group, "num_bits": 3, "symmetric": True}, "pack-quantized")
    make_compressed("ct_pack_w8a16", channel8, "pack-quantized")
    make_compressed("ct_int_w8a8", channel8, "int-quantized", token)
    make_compressed("ct_int_w8a8_asymmetric", {**channel8, "symmetric": False}, "int-quantized", token)
    make_compressed("ct_float_channel", {**fp8, "strategy": "channel"}, "float-quantized", token_fp8)
    make_compressed("ct_float_tensor", {**fp8, "strategy": "tensor"}, "float-quantized", token_fp8)
    block = {**fp8, "strategy": "block", "block_structure": [64, 64]}
    make_compressed("ct_float_block", block, "float-quantized", token_fp8, n=80)
    mx = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
          "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}  # fmt: skip
    make_compressed("ct_mxfp4", mx, "mxfp4-pack-quantized")


def make_fp8() -> None:
    make_fp8_blocks("fp8_block", (32, 64), "dynamic")
    make_fp8_blocks("fp8_whole", None, "static")


def make_fp8_blocks(name: str, block: tuple[int, int] | None, activations: str) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.utils.quantization_config import FineGrainedFP8Config

    class Quantizer:
        quantization_config = FineGrainedFP8Config(weight_block_size=block)
        modules_to_not_convert = None

    weight = make_weight(14)
    stored = Fp8Quantize(Quantizer()).convert({"linear.weight": weight})
    tensors = {key.removeprefix("linear."): value for key, value in stored.items()}
    expected = Fp8Dequantize(Quantizer())._dequantize_one(
        tensors["weight"], tensors["weight_scale_inv"], torch.float32
    )
    config = {"quant_method": "fp8", "activation_scheme": activations, "weight_block_size": block,
              "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}  # fmt: skip
    save(name, tensors, expected, config)


def make_bitsandbytes() -> None:
    import bitsandbytes as bnb

    for name, kind, is_nested in (
        ("bnb_nf4", "nf4", False),
        ("bnb_nf4_nested", "nf4", True),
        ("bnb_fp4", "fp4", False),
    ):
        layer = bnb.nn.Linear4bit(K, N, bias=False, quant_type=kind, compress_statistics=is_nested,
                                  compute_dtype=torch.float32)  # fmt: skip
        layer.weight = bnb.nn.Params4bit(make_weight(15), requires_grad=False, quant_type=kind,
                                         compress_statistics=is_nested, blocksize=64)  # fmt: skip
        layer = layer.to("cpu")
        if layer.weight.quant_state is None:
            layer.weight = layer.weight._quantize("cpu")
        expected = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
                  "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": is_nested,
                  "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
                  "llm_int8_skip_modules": None, "llm_int8_threshold": 6.0}  # fmt: skip
        save(name, layer.state_dict(), expected, config)
    codes, scales, _ = bnb.functional.int8_vectorwise_quant(make_weight(16).half())
    expected = bnb.functional.int8_vectorwise_dequant(codes, scales)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True,
              "llm_int8_skip_modules": None, "llm_int8_threshold": 6.0}  # fmt: skip
    format = torch.tensor(0, dtype=torch.uint8)  # "row", as Linear8bitLt.state_dict writes it
    save("bnb_int8", {"weight": codes, "SCB": scales, "weight_format": format}, expected, config)


def make_mxfp4() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(17)
    blocks = torch.randint(0, 256, (1, N, K // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 130, (1, N, K // 32), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    save("gpt_oss_blocks", {"weight_blocks": blocks[0], "weight_scales": scales[0]}, expected, config)


def make_torchao() -> None:
    import torchao.quantization.quant_api as api
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_primitives import MappingType

    four = {"weight_dtype": torch.int4, "granularity": PerGroup(32)}
    for name, config in {
        "torchao_int8": api.Int8WeightOnlyConfig(),
        "torchao_w8a8": api.Int8DynamicActivationInt8WeightConfig(),
        "torchao_int4": api.IntxWeightOnlyConfig(**four),
        "torchao_int4_asymmetric": api.IntxWeightOnlyConfig(**four, mapping_type=MappingType.ASYMMETRIC),
        "torchao_float8": api.Float8WeightOnlyConfig(),
    }.items():
        model = torch.nn.Sequential(torch.nn.Linear(K, N, bias=False))
        model[0].weight.data = make_weight(18)
        model = model.bfloat16() if "int4" in name else model
        api.quantize_(model, config)
        weight = model[0].weight
        tensors, metadata = flatten_tensor_state_dict(model.state_dict())
        if "int4" in name:  # its numbers are bfloat16: widen its parts, then let the library multiply
            from torchao.quantization.quant_primitives import dequantize_affine

            parts = weight.qdata, weight.block_size, weight.scale.float(), weight.zero_point
            expected = dequantize_affine(*parts, torch.int8, -8, 7, output_dtype=torch.float32)
        else:
            expected = weight.dequantize()
        metadata = {key.replace("0.", "linear."): value for key, value in metadata.items()}
        settings = {"quant_method": "torchao", "quant_type": {"default": config_to_dict(config)},
                    "modules_to_not_convert": None, "include_input_output_embeddings": False,
                    "untie_embedding_weights": False}  # fmt: skip
        save(
            name,
            {key.removeprefix("0."): value for key, value in tensors.items()},
            expected,
            settings,
            metadata,
        )


def make_all_gptq() -> None:
    make_gptq("gptq_4bit", 4, is_symmetric=True, is_ordered=False, version=1)
    make_gptq("gptq_4bit_act_order", 4, is_symmetric=True, is_ordered=True, version=1)
    make_gptq("gptq_4bit_asymmetric", 4, is_symmetric=False, is_ordered=False, version=1)
    make_gptq("gptq_v2_4bit_asymmetric_act_order", 4, is_symmetric=False, is_ordered=True, version=2)
    make_gptq("gptq_2bit", 2, is_symmetric=True, is_ordered=False, version=1)
    make_gptq("gptq_3bit", 3, is_symmetric=True, is_ordered=False, version=1)
    make_gptq("gptq_v2_3bit_asymmetric", 3, is_symmetric=False, is_ordered=False, version=2)
    make_gptq("gptq_8bit", 8, is_symmetric=True, is_ordered=False, version=1, size=K)
    make_gptq("gptq_v2_8bit_asymmetric", 8, is_symmetric=False, is_ordered=False, version=2)


MAKERS: dict[str, Callable[[], None]] = {
    "gptqmodel": make_all_gptq,
    "autogptq": make_autogptq,
    "awq": make_awq,
    "compressed-tensors": make_all_compressed,
    "fp8": make_fp8,
    "bitsandbytes": make_bitsandbytes,
    "mxfp4": make_mxfp4,
    "torchao": make_torchao,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    for maker in sys.argv[1:] or MAKERS:
        MAKERS[maker]()
