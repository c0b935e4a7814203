"""AWQ's quantization_config (AutoAWQ, GPTQModel), and the older quant_config.json."""

from __future__ import annotations

from ...ipc.weight_format import LM_HEAD, WeightFormat
from .fields import FormatRule, QuantizationFields, check_multiple
from .linears import LinearShape
from .names import match_text, read_names

_HARMLESS = (
    "quant_method", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "meta", "exllama_config",
    "damp_percent", "true_sequential", "desc_act", "sym", "pack_dtype", "static_groups",
)  # fmt: skip


def read_awq(fields: QuantizationFields) -> FormatRule:
    """The rule of all layers: 4 bits with zeros in all but the projection to logits and the named ones."""
    for key in ("version", "checkpoint_format", "format"):
        fields.choice(key, ("gemm",), "gemm")
    fields.choice("w_bit" if "w_bit" in fields else "bits", (4,), 4)
    fields.choice("zero_point", (True,), True)
    fields.refuse("lm_head")
    fields.refuse("dynamic")
    group_size = fields.group_size("q_group_size" if "q_group_size" in fields else "group_size", 128)
    left_out = match_text([LM_HEAD, *(read_names(fields, "modules_to_not_convert") or [])])
    fields.check_keys(*_HARMLESS)
    weight_format = WeightFormat(bits=4, group_size=group_size, has_offsets=True, layout="awq")

    def find(linear: LinearShape) -> WeightFormat | None:
        if left_out(linear.name):
            return None
        check_multiple(linear, "outputs", linear.num_out, 8)
        return weight_format

    return find
