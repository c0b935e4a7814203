"""From config.json's quantization_config to the format of each linear layer. Nothing here imports torch.

A method is a file with a reader of its config, a row of `_METHODS`, and a name in ipc/spec/weight_format.py.
Every key is known, known to decide nothing, or refused with its value: what is not understood is not loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

from ....ipc.errors import ConfigError, ModelError
from ....ipc.spec.linear_shapes import LinearShape, list_linears
from ....ipc.spec.model_spec import ModelSpec
from ....ipc.spec.weight_format import Quantization, WeightFormat, WeightFormats
from .awq import read_awq
from .bitsandbytes import read_bitsandbytes
from .compressed_tensors import read_compressed_tensors
from .fp8 import read_fp8
from .gptq import read_gptq
from .mxfp4 import read_mxfp4
from .names import FormatRule, QuantizationFields
from .torchao import read_torchao

_METHODS: dict[str, Callable[[QuantizationFields], FormatRule]] = {
    "gptq": read_gptq,
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "fbgemm_fp8": read_fp8,
    "bitsandbytes": read_bitsandbytes,
    "torchao": read_torchao,
    "mxfp4": read_mxfp4,
}


_GGUF = "gguf"  # whose types are in the file's header (frontend/models/gguf/tensors.py)


def read_weight_formats(
    config: Mapping[str, Any], spec: ModelSpec, float_tensors: frozenset[str] = frozenset()
) -> WeightFormats:
    """The formats of the checkpoint's linear layers by its config.json; ModelError for what is not known.

    A layer whose weight is among the floating tensors of the files is plain whatever config.json says: tools
    leave out layers (a router, experts, a head) that their config does not name.
    """
    key = _find_key(config)
    value = config.get(key)
    if value is None:
        return WeightFormats()
    if not isinstance(value, dict):
        raise ModelError(f"config.json {key}", value, "an object")
    rule = read_rule(cast(dict[str, Any], value))

    def find(linear: LinearShape) -> WeightFormat | None:
        return None if _is_plain(linear.name, spec.optional_prefix, float_tensors) else rule(linear)

    return apply_rule(find, spec)


def _is_plain(name: str, optional_prefix: str, float_tensors: frozenset[str]) -> bool:
    names = (name, name.removeprefix(optional_prefix))
    stored = [each for each in names if f"{each}.weight" in float_tensors]
    # bitsandbytes may keep its bytes in a tensor of another type, then beside a table.
    return any(f"{each}.weight.quant_map" not in float_tensors for each in stored)


def resolve_quantization(
    name: str | None, config: Mapping[str, Any], is_gguf: bool = False
) -> Quantization | None:
    """What `quantization` asks for; the checkpoint's own method by name (vLLM's habit) asks for nothing.

    Raises ConfigError for a method that the checkpoint does not have.
    """
    value = config.get(_find_key(config))
    method = cast(dict[str, Any], value).get("quant_method") if isinstance(value, dict) else None
    if is_gguf:
        method = _GGUF
    if name is None or name.removesuffix("_marlin") == method:
        return None
    if name not in get_args(Quantization):
        also = "this checkpoint is not quantized" if method is None else f"{method}, what the checkpoint is"
        raise ConfigError("quantization", name, f"one of {', '.join(get_args(Quantization))}; {also}")
    return cast(Quantization, name)


def _find_key(config: Mapping[str, Any]) -> str:
    return "compression_config" if config.get("compression_config") is not None else "quantization_config"


def read_rule(values: dict[str, Any]) -> FormatRule:
    """The rule of a quantization_config."""
    fields = QuantizationFields(values)
    method = fields.choice("quant_method", _METHODS, "bitsandbytes" if "load_in_4bit" in values else None)
    return _METHODS[method](fields)


def apply_rule(rule: FormatRule, spec: ModelSpec) -> WeightFormats:
    """The format of each linear layer; ModelError where those of one multiplication do not go together."""
    formats: dict[str, WeightFormat | None] = {}
    for together in list_linears(spec):
        formats_found = [rule(linear) for linear in together]
        _check_together(together, formats_found)
        formats.update((linear.name, each) for linear, each in zip(together, formats_found, strict=True))
    default = Counter(formats.values()).most_common(1)[0][0] if formats else None
    exceptions = {name: each for name, each in formats.items() if each != default}
    return WeightFormats(default=default, exceptions=exceptions)


def _check_together(linears: tuple[LinearShape, ...], formats: list[WeightFormat | None]) -> None:
    kinds = [each and (each.kind, each.has_codebook, each.has_permutation) for each in formats]
    for linear, kind in zip(linears, kinds, strict=True):
        if kind != kinds[0]:
            first = linears[0].name
            value = "in the model's type" if kind is None else "quantized in another way"
            raise ModelError(
                f"config.json quantization_config, {linear.name}",
                value,
                f"as {first}, beside which it is multiplied",
            )
