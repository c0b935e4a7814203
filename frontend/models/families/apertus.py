"""Apertus: norms of each head, and without a gate xIELU (arXiv 2411.13010), of numbers that are tensors."""

from __future__ import annotations

from typing import Any, cast

from msgspec.structs import replace

from ....ipc.errors import shorten
from ....ipc.spec.model_spec import DenseSpec, LayerSpec, ModelSpec, RopeConfig
from .config_fields import ConfigFields
from .parts import read_attention, read_model, read_num_layers

_NUMBERS = ("alpha_p", "alpha_n", "beta", "eps")
_ROPE = RopeConfig(
    type="llama3",
    theta=12e6,
    factor=8.0,
    original_max_position_embeddings=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    for key, only in {"hidden_act": "xielu", "qk_norm": True, "post_norm": False, "mlp_bias": False}.items():
        fields.only(key, only)
    width, num_layers = fields.integer("intermediate_size"), read_num_layers(fields)
    attention = replace(read_attention(fields, may_have_bias=True), qk_norm="each_head")
    layers = [
        LayerSpec(
            attention=attention,
            ffn=DenseSpec(intermediate_size=width, is_gated=False, xielu=numbers),
            attention_norm="attention_layernorm",
            ffn_norm="feedforward_layernorm",
        )
        for numbers in _read_numbers(fields, num_layers)
    ]
    has_rope = fields.get("rope_parameters") or fields.get("rope_scaling")
    return read_model(
        fields,
        "ApertusForCausalLM",
        layers,
        max_positions=65536,
        norm_eps=1e-5,
        rope_theta=12e6,
        rope=None if has_rope else _ROPE,
    )


def _read_numbers(fields: ConfigFields, num_layers: int) -> list[str | tuple[float, float, float, float]]:
    """Of each layer where its numbers are; a GGUF file's metadata have them."""
    values: Any = fields.get("xielu")
    if values is None:
        return ["mlp.act_fn"] * num_layers
    if not isinstance(values, dict):
        raise fields.error("xielu", values, f"an object of {', '.join(_NUMBERS)}")
    each: list[list[float]] = []
    for name in _NUMBERS:
        numbers: Any = cast(dict[str, Any], values).get(name)
        is_list = isinstance(numbers, list) and len(cast(list[Any], numbers)) == num_layers
        if not is_list or not all(type(number) is float and abs(number) < 80 for number in numbers):
            raise fields.error("xielu", shorten(numbers), f"{num_layers} numbers as {name}, from -80 to 80")
        each.append(cast(list[float], numbers))
    return list(zip(*each, strict=True))
