"""Mamba-2, alone and in hybrids: the part of config.json that its layers take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from ....ipc.spec.recurrent_spec import MAX_KERNEL_SIZE, Mamba2Spec
from .config_fields import ConfigFields

_ATTENTION, _RECURRENT = ("attention", "full_attention"), ("mamba", "linear_attention")
_INFINITY = {"__float__": "Infinity"}  # as transformers writes it; others write Infinity


def read_mamba2(fields: ConfigFields, **defaults: Any) -> Mamba2Spec:
    """A layer, by the names of hybrids' config.json; `defaults` are fields that a family has read itself."""
    fields.ignore("mamba_chunk_size")
    fields.only("hidden_act", "silu")
    num_heads = fields.integer("mamba_n_heads", 128)
    inner = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    size = fields.get("mamba_d_head", "auto")
    size = inner // num_heads if size == "auto" else fields.integer("mamba_d_head")
    if size * num_heads != inner:
        raise fields.error("mamba_d_head", size, f"{inner} / mamba_n_heads={num_heads}")
    groups = fields.integer("mamba_n_groups", 1)
    if num_heads % groups:
        raise fields.error("mamba_n_groups", groups, f"a divisor of {num_heads} heads")
    return Mamba2Spec(
        num_heads=num_heads,
        head_size=size,
        num_groups=groups,
        num_rows=fields.integer("mamba_d_state", 256),
        kernel_size=fields.integer("mamba_d_conv", 4, low=2, high=MAX_KERNEL_SIZE),
        bias=fields.boolean("mamba_proj_bias", False),
        conv_bias=fields.boolean("mamba_conv_bias", True),
        step_limit=read_step_limit(fields),
        **defaults,
    )


def read_step_limit(fields: ConfigFields) -> tuple[float, float]:
    """The least and the largest step."""
    limit: Any = fields.get("time_step_limit", (0.0, math.inf))
    values = list(cast(Sequence[Any], limit)) if isinstance(limit, (list, tuple)) else []
    values = [math.inf if value == _INFINITY else value for value in values]
    if len(values) != 2 or not all(isinstance(value, (int, float)) for value in values):
        raise fields.error("time_step_limit", limit, "two numbers")
    if not 0 <= values[0] <= values[1]:
        raise fields.error("time_step_limit", limit, "two numbers from 0 on, in rising order")
    return float(values[0]), float(values[1])


def read_has_attention(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Of each layer, by `layer_types`; the others are recurrent, as all are without it."""
    kinds: Any = fields.get("layer_types", [_RECURRENT[0]] * num_layers)
    if (
        not isinstance(kinds, list)
        or len(cast(list[Any], kinds)) != num_layers
        or not {*_ATTENTION, *_RECURRENT}.issuperset(map(str, cast(list[Any], kinds)))
    ):
        raise fields.error("layer_types", kinds, f"{num_layers} of {', '.join(_ATTENTION + _RECURRENT)}")
    return [kind in _ATTENTION for kind in cast(list[Any], kinds)]
