"""AWQ's quantization_config (AutoAWQ, GPTQModel), and the older quant_config.json."""

from __future__ import annotations

from ....ipc.spec.weight_format import LM_HEAD, WeightFormat
from .gptq import HARMLESS
from .names import FormatRule, QuantizationFields, all_but, check_multiple, match_text, read_names


def read_awq(fields: QuantizationFields) -> FormatRule:
    """The rule of all layers: 4 bits with zeros in all but the projection to logits and the named ones."""
    for key in ("version", "checkpoint_format", "format"):
        fields.choice(key, ("gemm",), "gemm")
    fields.choice("w_bit" if "w_bit" in fields else "bits", (4,), 4)
    fields.choice("method", ("awq",), "awq")
    fields.boolean("zero_point", True)  # the files hold zeros in either case
    for key in ("lm_head", "dynamic", "desc_act", "modules_in_block_to_quantize"):
        fields.refuse(key)
    group_size = fields.group_size("q_group_size" if "q_group_size" in fields else "group_size", 128)
    left_out = match_text(
        fields, "modules_to_not_convert", [LM_HEAD, *(read_names(fields, "modules_to_not_convert") or [])]
    )
    fields.check_keys(*HARMLESS, "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "sym", "pack_dtype")
    weight_format = WeightFormat(bits=4, group_size=group_size, has_offsets=True, layout="awq")
    return all_but(
        left_out, weight_format, lambda linear: check_multiple(linear, "outputs", linear.num_out, 8)
    )
