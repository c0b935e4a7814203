"""torchao's quantization_config, for its plain tensors of int8, int4 (a byte each) and float8 in safetensors.

Activations are computed in the model's type also where a config quantizes them.
"""

from __future__ import annotations

from ....ipc.spec.weight_format import LM_HEAD, WeightFormat
from .names import FormatRule, QuantizationFields, all_but, match_parts, read_names

_INT8 = ("int8weightonlyconfig", "int8dynamicactivationint8weightconfig")
_INTX = "intxweightonlyconfig"
_FLOAT8 = ("float8weightonlyconfig", "float8dynamicactivationfloat8weightconfig")
_HARMLESS = ("act_mapping_type", "weight_only_decode", "set_inductor_config", "reduce_range", "scale_dtype",
             "intx_choose_qparams_algorithm", "activation_dtype", "mm_config", "kernel_preference", "layout",
             "activation_value_lb", "activation_value_ub", "packing_format", "version")  # fmt: skip


def read_torchao(fields: QuantizationFields) -> FormatRule:
    """The rule of all layers; without a list of those left out, the projection to logits is."""
    fields.refuse("include_input_output_embeddings")
    whole = fields.object("quant_type")
    config = whole.object("default")
    whole.check_keys()
    kind = config.choice("_type", (*_INT8, _INTX, *_FLOAT8))
    config.choice("_version", (2,))
    weight_format = _read_format(config.object("_data"), kind)
    config.check_keys()
    named = read_names(fields, "modules_to_not_convert")
    names = [LM_HEAD] if named is None else named
    # transformers 5 holds these against names of weights, which end otherwise; what older versions have left
    # out is in floats in the files.
    left_out = match_parts(fields, "modules_to_not_convert", names, from_start=True)
    fields.check_keys("quant_method", "untie_embedding_weights")
    return all_but(left_out, weight_format)


def _read_format(fields: QuantizationFields, kind: str) -> WeightFormat:
    group_size = _read_granularity(fields)
    if kind in _FLOAT8:
        fields.object("weight_dtype").choice("_data", ("float8_e4m3fn",), "float8_e4m3fn")
        fields.check_keys(*_HARMLESS)
        return WeightFormat(kind="fp8", group_size=group_size, layout="torchao/8")
    if kind in _INT8:
        size = fields.group_size("group_size") if fields.get("group_size") is not None else group_size
        fields.check_keys(*_HARMLESS)
        return WeightFormat(bits=8, group_size=size, layout="torchao/8")
    dtypes = {f"int{bits}": bits for bits in range(2, 9)}
    bits = dtypes[fields.object("weight_dtype").choice("_data", dtypes)]
    packing = fields.object("intx_packing_format")
    packing.choice("_data", ("unpacked_to_int8",), "unpacked_to_int8")
    mapping = fields.object("mapping_type")
    kinds = ("symmetric", "symmetric_no_clipping_err", "asymmetric")
    mapped = mapping.choice("_data", kinds, "symmetric")
    fields.check_keys(*_HARMLESS)
    return WeightFormat(
        bits=4 if bits <= 4 else 8,
        group_size=group_size,
        has_offsets=mapped == "asymmetric",
        layout=f"torchao/{bits}",
    )


def _read_granularity(fields: QuantizationFields) -> int:
    """Inputs of a group, 0 for all of them."""
    value = fields.get("granularity")
    if isinstance(value, list):  # of activations and of weights
        raise fields.error("granularity", value, "one of PerRow, PerAxis, PerTensor, PerGroup")
    granularity = fields.object("granularity")
    kind = granularity.choice("_type", ("perrow", "peraxis", "pertensor", "pergroup"), "perrow")
    return granularity.object("_data").group_size("group_size") if kind == "pergroup" else 0
