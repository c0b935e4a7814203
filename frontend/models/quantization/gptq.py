"""GPTQ's quantization_config (AutoGPTQ, GPTQModel, optimum), and the older quantize_config.json."""

from __future__ import annotations

from typing import Any, cast

from ....ipc.spec.linear_shapes import LinearShape
from ....ipc.spec.weight_format import LM_HEAD, WeightFormat
from .names import MAX_PATTERNS, FormatRule, NamePattern, QuantizationFields, compile_pattern

# Of how it was made, and which kernels its makers use; AWQ's tools write most of it too.
HARMLESS = (
    "quant_method", "model_name_or_path", "model_file_base_name", "true_sequential", "damp_percent",
    "damp_auto_increment", "static_groups", "meta", "dataset", "tokenizer", "backend", "batch_size",
    "use_exllama", "disable_exllama", "exllama_config", "use_cuda_fp16", "cache_block_outputs",
    "max_input_length", "model_seqlen", "pad_token_id", "block_name_to_quantize", "mse", "hyb_act",
    "module_name_preceding_first_block", "act_group_aware", "offload_to_disk", "mock_quantization",
)  # fmt: skip


def read_gptq(fields: QuantizationFields) -> FormatRule:
    """The rule of all layers."""
    fields.choice("method", ("gptq",), "gptq")
    version = fields.choice("format", ("gptq", "gptq_v2"), "gptq")
    version = fields.choice("checkpoint_format", ("gptq", "gptq_v2"), version)
    fields.choice("pack_dtype", ("int32",), "int32")
    fields.refuse("is_marlin_format")
    default = _read_format(fields, version, fields)
    has_head = fields.boolean("lm_head", False)
    overrides = _read_dynamic(fields, version)
    inside = _read_inside(fields)
    fields.check_keys(*HARMLESS)

    def find(linear: LinearShape) -> WeightFormat | None:
        chosen = default
        if linear.name == LM_HEAD and not has_head:
            chosen = None
        if linear.name != LM_HEAD and inside and not linear.name.endswith(inside):
            chosen = None
        for pattern, override in overrides:
            if pattern.match(linear.name):
                chosen = override
                break
        return chosen

    return find


def _read_format(fields: QuantizationFields, version: str, base: QuantizationFields) -> WeightFormat:
    """By a rule's fields; what they leave out is as for all layers."""
    bits = fields.choice("bits", (2, 3, 4, 8), base.get("bits"))
    group_size = (fields if fields.get("group_size") is not None else base).group_size("group_size", 128)
    is_ordered = fields.boolean("desc_act", base.boolean("desc_act", False))
    return WeightFormat(
        bits=8 if bits == 8 else 4,
        group_size=group_size,
        has_offsets=not fields.boolean("sym", base.boolean("sym", True)),
        has_permutation=is_ordered and group_size != 0,
        layout=f"{version}/{bits}",
    )


def _read_dynamic(fields: QuantizationFields, version: str) -> list[tuple[NamePattern, WeightFormat | None]]:
    """GPTQModel's rules by pattern: "-:..." leaves layers out, "+:..." or none changes what is given."""
    rules = fields.object("dynamic")
    texts: dict[str, Any] = {key: rules.get(key) for key in cast(dict[str, Any], fields.get("dynamic", {}))}
    if len(texts) > MAX_PATTERNS:
        raise fields.error("dynamic", f"{len(texts)} rules", f"at most {MAX_PATTERNS}")
    made: list[tuple[NamePattern, WeightFormat | None]] = []
    for text in texts:
        sign, colon, rest = text.partition(":")
        pattern = compile_pattern(fields, "dynamic", rest if colon and sign in "+-" else text)
        if colon and sign == "-":
            made.append((pattern, None))
            continue
        override = rules.object(text)
        made.append((pattern, _read_format(override, version, fields)))
        override.check_keys(*HARMLESS)
    return made


def _read_inside(fields: QuantizationFields) -> tuple[str, ...]:
    """optimum's list of lists of the layers that are quantized, () for all."""
    value = fields.get("modules_in_block_to_quantize", [])
    lists = cast(list[Any], value) if isinstance(value, list) else [None]
    names = [name for each in lists for name in (cast(list[Any], each) if isinstance(each, list) else [each])]
    if not all(isinstance(name, str) for name in names):
        raise fields.error("modules_in_block_to_quantize", value, "lists of names of layers")
    if len(names) > MAX_PATTERNS:
        text = f"at most {MAX_PATTERNS}"
        raise fields.error("modules_in_block_to_quantize", f"{len(names)} names", text)
    return tuple(f".{name}" for name in names)
