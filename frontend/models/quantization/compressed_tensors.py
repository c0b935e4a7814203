"""compressed-tensors' quantization_config (llm-compressor): schemes by layer.

Activations are computed in the model's type: where a scheme quantizes them (W8A8), what it says of them is
read and not used, as are the scales of a KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from ....ipc.spec.linear_shapes import LinearShape
from ....ipc.spec.weight_format import WeightFormat
from .fp8 import check_block
from .names import FormatRule, NamePattern, QuantizationFields, check_multiple, compile_patterns, read_names

_CLASS = "Linear"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized")
_MIXED = "mixed-precision"
_STRATEGIES = ("tensor", "channel", "group", "block")
_MX_GROUP = 32
_ACTIVATIONS = ("input_activations",)
_HARMLESS = ("quant_method", "quantization_status", "global_compression_ratio", "kv_cache_scheme", "version")
_MAX_SCHEMES = 1000


@dataclass(frozen=True, slots=True)
class _Scheme:
    names: frozenset[str]
    patterns: tuple[NamePattern, ...]
    weight_format: WeightFormat


def read_compressed_tensors(fields: QuantizationFields) -> FormatRule:
    """The rule of all layers, as the library chooses: a scheme with a layer's name counts before one with a
    pattern, of which the first by the alphabet counts, and that before one for all Linear layers.
    """
    fields.object("sparsity_config").choice("format", ("dense",), "dense")
    fields.refuse("transform_config", {"config_groups": {}})
    whole = fields.choice("format", (*_FORMATS, _MIXED))
    groups = fields.object("config_groups")
    keys = list(cast(dict[str, Any], fields.get("config_groups", {})))
    if not 1 <= len(keys) <= _MAX_SCHEMES:
        raise fields.error("config_groups", f"{len(keys)} schemes", f"from 1 to {_MAX_SCHEMES}")
    schemes = [_read_scheme(groups.object(key), whole) for key in keys]
    # A target that two schemes have is the last one's.
    by_name = {name: scheme.weight_format for scheme in schemes for name in scheme.names}
    of_texts = {pattern.text: (pattern, each.weight_format) for each in schemes for pattern in each.patterns}
    by_pattern = [of_texts[text] for text in sorted(of_texts)]
    names, patterns = _read_targets(fields, "ignore")
    fields.check_keys(*_HARMLESS)

    def find(linear: LinearShape) -> WeightFormat | None:
        name = linear.name
        if name in names or _CLASS in names or any(pattern.match(name) for pattern in patterns):
            return None
        weight_format = by_name.get(name)
        if weight_format is None:
            matching = (each for pattern, each in by_pattern if pattern.match(name))
            weight_format = next(matching, by_name.get(_CLASS))
        return None if weight_format is None else _check_whole_groups(linear, weight_format)

    return find


def _check_whole_groups(linear: LinearShape, weight_format: WeightFormat) -> WeightFormat:
    if weight_format.has_codebook:
        check_multiple(linear, "inputs", linear.num_in, _MX_GROUP)
    return weight_format


def _read_targets(fields: QuantizationFields, key: str) -> tuple[frozenset[str], tuple[NamePattern, ...]]:
    names = read_names(fields, key) or []
    patterns = compile_patterns(fields, key, [name[3:] for name in names if name.startswith("re:")])
    return frozenset(name for name in names if not name.startswith("re:")), tuple(patterns)


def _read_scheme(fields: QuantizationFields, whole: str) -> _Scheme:
    names, patterns = _read_targets(fields, "targets")
    fields.refuse("output_activations")
    layout = fields.choice("format", _FORMATS, None if whole == _MIXED else whole)
    weight_format = _read_weights(fields.object("weights"), layout)
    fields.check_keys(*_ACTIVATIONS)
    return _Scheme(names, patterns, weight_format)


def _read_weights(fields: QuantizationFields, layout: str) -> WeightFormat:
    kind = fields.choice("type", ("int", "float"), "int")
    is_symmetric = fields.boolean("symmetric", True)
    fields.choice("dynamic", (False,), False)
    size = fields.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = fields.choice("strategy", _STRATEGIES, default)
    group_size = fields.group_size("group_size") if strategy == "group" else 0
    order = fields.choice("actorder", ("weight", "static", "group", "dynamic", False, True), False)
    block = fields.get("block_structure")
    bits = fields.integer("num_bits", 8, low=2, high=8)
    fields.check_keys("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    if layout == "mxfp4-pack-quantized":
        if (kind, bits, group_size, is_symmetric) != ("float", 4, _MX_GROUP, True):
            raise fields.error(
                "num_bits", f"{kind} {bits} in groups of {group_size}", "float 4 in groups of 32"
            )
        return WeightFormat(
            bits=4, group_size=_MX_GROUP, scale_dtype="bfloat16", has_codebook=True, layout=layout
        )
    if kind == "float":
        if bits != 8 or not is_symmetric or layout not in ("float-quantized", "naive-quantized"):
            allowed = "symmetric float of 8 bits in the format float-quantized or naive-quantized"
            raise fields.error("type", f"float {bits} in {layout}", allowed)
        rows, size = check_block(fields, "block_structure", block) if strategy == "block" else (1, group_size)
        return WeightFormat(kind="fp8", group_rows=rows, group_size=size, layout="float-quantized")
    if strategy == "block" or layout == "float-quantized":
        raise fields.error("strategy", f"{strategy} in {layout}", "tensor, channel or group of integers")
    is_packed = layout == "pack-quantized"
    return WeightFormat(
        bits=4 if is_packed and bits <= 4 else 8,
        group_size=group_size,
        has_offsets=not is_symmetric,
        has_permutation=order in ("group", "dynamic", True) and group_size > 0,
        layout=f"pack-quantized/{bits}" if is_packed else "int-quantized",
    )
