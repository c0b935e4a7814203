"""Tiny checkpoints in every quantized format, beside plain ones of the very numbers that they stand for.

The writers are independent of the readers; both are held to the libraries' files in tests/golden/weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from quire.ipc.spec.linear_shapes import list_linears
from quire.ipc.spec.model_spec import ModelSpec
from safetensors.torch import load_file, save_file
from torch import Tensor

# The tensors of a layer by what follows its name, and the weight that they stand for.
Stored = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor], Stored]

GROUP = 16


def _choose(
    weight: Tensor, bits: int, group: Tensor, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes [N, K], scales and zeros [N, groups], weight) of a group index for each input."""
    parts = [weight[:, group == index] for index in range(int(group.max()) + 1)]
    most = 2**bits - 1
    low = torch.stack([part.amin(1).clamp(max=0) for part in parts], 1)
    high = torch.stack([part.amax(1).clamp(min=0) for part in parts], 1)
    if symmetric:
        scales = (torch.maximum(-low, high) * 2 / most).half().float()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = ((high - low) / most).half().float()
        zeros = (-low / scales).round().clamp(1, most)
    codes = (weight / scales[:, group] + zeros[:, group]).round().clamp(0, most)
    return codes.int(), scales, zeros.int(), (codes - zeros[:, group]) * scales[:, group]


def _pack(numbers: Tensor, bits: int) -> Tensor:
    """int32 words along the last dimension."""
    num_bits = numbers.shape[-1] * bits
    stream = (numbers.unsqueeze(-1) >> torch.arange(bits) & 1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -num_bits % 32)).unflatten(-1, (-1, 32)).long()
    return (stream << torch.arange(32)).sum(-1).to(torch.int32)


def write_gptq(bits: int, symmetric: bool, ordered: bool, version: int) -> Writer:
    def write(weight: Tensor) -> Stored:
        group = torch.arange(weight.shape[1]) // GROUP
        if ordered:  # the same for what has the same inputs, as GPTQ's own order is
            group = group[torch.randperm(len(group), generator=torch.Generator().manual_seed(len(group)))]
        codes, scales, zeros, plain = _choose(weight, bits, group, symmetric)
        stored = {
            "qweight": _pack(codes, bits).T,
            "qzeros": _pack(zeros.T - (2 - version), bits),
            "scales": scales.T.half(),
            "g_idx": group.int(),
        }
        return stored, plain

    return write


def write_awq(weight: Tensor) -> Stored:
    def pack(numbers: Tensor) -> Tensor:
        return _pack(numbers.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2), 4)

    codes, scales, zeros, plain = _choose(weight, 4, torch.arange(weight.shape[1]) // GROUP, False)
    return {"qweight": pack(codes.T), "qzeros": pack(zeros.T), "scales": scales.T.half()}, plain


def write_packed(bits: int, symmetric: bool) -> Writer:
    def write(weight: Tensor) -> Stored:
        codes, scales, zeros, plain = _choose(weight, bits, torch.arange(weight.shape[1]) // GROUP, symmetric)
        stored = {"weight_packed": _pack(codes, bits), "weight_scale": scales.half()}
        stored["weight_shape"] = torch.tensor(weight.shape)
        if not symmetric:
            stored["weight_zero_point"] = _pack(zeros.T, bits).T
        return stored, plain

    return write


def _channel_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scales).round().to(torch.int8), scales


def write_int8(weight: Tensor) -> Stored:
    codes, scales = _channel_int8(weight)
    return {"weight": codes, "weight_scale": scales}, codes * scales


def write_torchao(weight: Tensor) -> Stored:
    codes, scales = _channel_int8(weight)
    stored = {
        "_weight_qdata": codes,
        "_weight_scale": scales,
        "_weight_zero_point": torch.zeros_like(scales).char(),
    }
    return stored, codes * scales


def write_bnb_int8(weight: Tensor) -> Stored:
    codes, scales = _channel_int8(weight)
    stored = {
        "weight": codes,
        "SCB": scales.flatten() * 127,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return stored, codes * (stored["SCB"].unsqueeze(1) / 127)


def write_nf4(weight: Tensor) -> Stored:
    book = torch.linspace(-1, 1, 16).sign() * torch.linspace(-1, 1, 16) ** 2
    blocks = weight.reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    codes = ((blocks / absmax.unsqueeze(1)).unsqueeze(-1) - book).abs().argmin(-1)
    pairs = codes.to(torch.uint8).flatten().view(-1, 2)
    state = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape), "dtype": "float32"}
    stored = {
        "weight": (pairs[:, :1] << 4 | pairs[:, 1:]),
        "weight.absmax": absmax,
        "weight.quant_map": book,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    return stored, (book[codes] * absmax.unsqueeze(1)).view(weight.shape)


def write_mxfp4(weight: Tensor) -> Stored:
    half = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    book, blocks = torch.cat([half, -half]), weight.unflatten(1, (-1, 32))
    exponents = (blocks.abs().amax(2) / 6).log2().ceil()
    codes = ((blocks / exponents.exp2().unsqueeze(2)).unsqueeze(-1) - book).abs().argmin(-1)
    pairs = codes.to(torch.uint8).flatten(1).unflatten(1, (-1, 2))
    stored = {"weight_packed": pairs[..., 0] | pairs[..., 1] << 4, "weight_scale": (exponents + 127).byte()}
    return stored, (book[codes] * exponents.exp2().unsqueeze(2)).flatten(1)


def write_fp8(rows: int, size: int, scale_name: str) -> Writer:
    """Of blocks; with a size of 0 a scale an output."""

    def write(weight: Tensor) -> Stored:
        height, width = rows, size or weight.shape[1]
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % width, 0, -weight.shape[0] % height))
        blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
        scales = blocks.abs().amax((1, 3)) / 448
        wide = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[
            : len(weight), : weight.shape[1]
        ]
        values = (weight / wide).to(torch.float8_e4m3fn)
        return {"weight": values, scale_name: scales}, values.float() * wide

    return write


def _scheme(format: str, activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


_GPTQ = {"quant_method": "gptq", "group_size": GROUP}
_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq-4": ({**_GPTQ, "bits": 4}, write_gptq(4, True, False, 1)),
    "gptq-4-act-order": ({**_GPTQ, "bits": 4, "desc_act": True, "sym": False}, write_gptq(4, False, True, 1)),
    "gptq-3": (
        {**_GPTQ, "bits": 3, "checkpoint_format": "gptq_v2", "sym": False},
        write_gptq(3, False, False, 2),
    ),
    "gptq-8-act-order": ({**_GPTQ, "bits": 8, "desc_act": True}, write_gptq(8, True, True, 1)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, write_awq),
    "w4a16": (
        _scheme("pack-quantized", num_bits=4, strategy="group", group_size=GROUP),
        write_packed(4, True),
    ),
    "w8a16-asymmetric": (
        _scheme("pack-quantized", num_bits=8, strategy="group", group_size=GROUP, symmetric=False),
        write_packed(8, False),
    ),
    "w8a8": (_scheme("int-quantized", _TOKENS, num_bits=8, strategy="channel"), write_int8),
    "fp8-channel": (
        _scheme(
            "float-quantized", {**_TOKENS, "type": "float"}, num_bits=8, type="float", strategy="channel"
        ),
        write_fp8(1, 0, "weight_scale"),
    ),
    "fp8-block": (
        {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["mlp.gate"]},
        write_fp8(32, 32, "weight_scale_inv"),
    ),
    "mxfp4": (
        _scheme("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        write_mxfp4,
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, write_nf4),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, write_bnb_int8),
    "torchao": (
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}},
        },
        write_torchao,
    ),
}


def quantize_checkpoint(
    plain: Path,
    folder: Path,
    spec: ModelSpec,
    config: dict[str, Any],
    writer: Writer,
    skips: tuple[str, ...] = ("lm_head",),
    others: dict[str, Writer] | None = None,
) -> None:
    """Write the quantized checkpoint into `folder`, and into `plain` the numbers that it stands for.

    `others` are writers of layers by the last part of their names.
    """
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for together in list_linears(spec):
        for linear in together:
            if linear.name in skips:
                continue
            write = (others or {}).get(linear.name.rpartition(".")[2], writer)
            parts, number = write(stored.pop(f"{linear.name}.weight"))
            tensors[f"{linear.name}.weight"] = number.contiguous()
            stored.update({f"{linear.name}.{key}": part.contiguous() for key, part in parts.items()})
    shutil.copytree(plain, folder)
    for path, numbers in ((plain, tensors), (folder, stored)):
        (path / "model.safetensors").unlink()
        save_file(numbers, path / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
