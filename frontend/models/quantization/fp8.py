"""The quantization_config of fp8 checkpoints: blocks (DeepSeek, Qwen), tensors (vLLM), channels (fbgemm).

Activations are computed in the model's type: static or dynamic scales of theirs are not used.
"""

from __future__ import annotations

from typing import Any, cast

from ....ipc.spec.weight_format import LM_HEAD, WeightFormat
from .names import FormatRule, QuantizationFields, all_but, match_parts, read_names

_HARMLESS = ("quant_method", "activation_scale_ub", "kv_cache_scheme", "kv_cache_quant_method", "dequantize")


def read_fp8(fields: QuantizationFields) -> FormatRule:
    """The rule of all layers but the projection to logits and the named ones."""
    fields.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    fields.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    fields.choice("scale_fmt", ("float", "ue8m0"), "float")
    fields.choice("expert_dtype", ("fp8",), "fp8")
    fields.refuse("modules_to_convert")
    rows, size = _read_block(fields)
    key = "ignored_layers" if fields.get("ignored_layers") is not None else "modules_to_not_convert"
    left_out = match_parts(fields, key, [LM_HEAD, *(read_names(fields, key) or [])])
    fields.check_keys(*_HARMLESS, "ignored_layers", "modules_to_not_convert")
    weight_format = WeightFormat(kind="fp8", group_rows=rows, group_size=size, layout="fp8")
    return all_but(left_out, weight_format)


def _read_block(fields: QuantizationFields) -> tuple[int, int]:
    """(outputs, inputs) of a block; without blocks one scale an output holds what is stored."""
    block = fields.get("weight_block_size")
    if block is None:
        return 1, 0
    return check_block(fields, "weight_block_size", block)


def check_block(fields: QuantizationFields, key: str, block: object) -> tuple[int, int]:
    """(outputs, inputs) of a block."""
    sizes = cast(list[Any], block) if isinstance(block, list) else []
    if (
        len(sizes) != 2
        or not all(type(size) is int and 1 <= size <= 1 << 20 for size in sizes)
        or sizes[1] % 16
    ):
        raise fields.error(key, block, "two sizes such as [128, 128], the second a multiple of 16")
    return sizes[0], sizes[1]
