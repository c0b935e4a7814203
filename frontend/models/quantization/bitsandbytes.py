"""bitsandbytes' quantization_config: 4 bits by a table (nf4, fp4), or LLM.int8."""

from __future__ import annotations

from ....ipc.spec.weight_format import LM_HEAD, WeightFormat
from .names import FormatRule, QuantizationFields, all_but, check_multiple, match_parts, read_names

_BLOCK = 64  # of 4 bits; the weights' own description is held against it
# LLM.int8 computes inputs above a threshold in float16; here all are computed in the model's type.
_HARMLESS = ("quant_method", "_load_in_4bit", "_load_in_8bit", "llm_int8_threshold",
             "llm_int8_enable_fp32_cpu_offload", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant",
             "bnb_4bit_quant_storage")  # fmt: skip


def read_bitsandbytes(fields: QuantizationFields) -> FormatRule:
    """The rule of all layers; without a list of those left out, the projection to logits is."""
    weight_format = _read_format(fields)
    fields.refuse("llm_int8_has_fp16_weight")
    named = read_names(fields, "llm_int8_skip_modules")
    left_out = match_parts(fields, "llm_int8_skip_modules", [LM_HEAD] if named is None else named)
    fields.check_keys(*_HARMLESS)
    divisor = _BLOCK if weight_format.bits == 4 else 1
    return all_but(
        left_out, weight_format, lambda linear: check_multiple(linear, "inputs", linear.num_in, divisor)
    )


def _read_format(fields: QuantizationFields) -> WeightFormat:
    is_4bit, is_8bit = fields.boolean("load_in_4bit", False), fields.boolean("load_in_8bit", False)
    kind = fields.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    if is_4bit == is_8bit:
        raise fields.error("load_in_4bit", is_4bit, "true, or load_in_8bit=true")
    if is_8bit:
        return WeightFormat(bits=8, layout="bnb-int8")
    return WeightFormat(bits=4, group_size=_BLOCK, has_codebook=True, layout=f"bnb-{kind}")
