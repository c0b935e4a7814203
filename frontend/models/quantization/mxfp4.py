"""gpt-oss' quantization_config: the experts alone are e2m1 numbers with an exponent for each 32."""

from __future__ import annotations

from ....ipc.spec.linear_shapes import LinearShape
from ....ipc.spec.weight_format import WeightFormat
from .names import FormatRule, QuantizationFields, check_multiple, match_parts, read_names

_EXPERTS = ".experts."
_GROUP = 32


def read_mxfp4(fields: QuantizationFields) -> FormatRule:
    """The rule of all layers."""
    is_left_out = match_parts(
        fields, "modules_to_not_convert", read_names(fields, "modules_to_not_convert") or []
    )
    fields.choice("dequantize", (False,), False)
    fields.check_keys("quant_method")
    weight_format = WeightFormat(
        bits=4, group_size=_GROUP, scale_dtype="bfloat16", has_codebook=True, layout="mxfp4"
    )

    def find(linear: LinearShape) -> WeightFormat | None:
        if _EXPERTS not in linear.name or is_left_out(linear.name):
            return None
        check_multiple(linear, "inputs", linear.num_in, _GROUP)
        return weight_format

    return find
