"""Rotary settings of config.json: `rope_scaling` with rope_theta beside it, or `rope_parameters` with it."""

from __future__ import annotations

from typing import Any, cast, get_args

from ...ipc.errors import ModelError, shorten
from ...ipc.model_spec import RopeConfig, RopeType
from .config_fields import ConfigFields


def read_rope(fields: ConfigFields, max_positions: int, default_theta: float = 10000.0) -> RopeConfig:
    """The rotary embedding of all layers. ModelError names a key with a value that has no meaning here."""
    # transformers lets rope_scaling win where a checkpoint has both.
    objects = {name: _read_object(fields, name) for name in ("rope_scaling", "rope_parameters")}
    name = "rope_scaling" if objects["rope_scaling"] else "rope_parameters"
    rope = ConfigFields(objects[name], f"{name}.")
    for part in (rope, fields):
        if part.number("partial_rotary_factor", 1.0) != 1:
            raise part.error(
                "partial_rotary_factor", part.get("partial_rotary_factor"), "1 (the whole head is rotated)"
            )
    if any(isinstance(value, dict) for value in objects[name].values()):
        raise ModelError(f"config.json {name}", shorten(objects[name]), "one object for all layers")
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta, low=1.0), low=1.0)
    fields.ignore("original_max_position_embeddings")
    config = _read_kind(rope, fields, theta, max_positions)
    rope.check_rest(f"rope_type {config.type!r}")
    return config


def read_ropes_by_kind(
    fields: ConfigFields, max_positions: int, default_theta: float, default_sliding_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """Of layers without and with a window: `rope_parameters` has an object for each, or an older config
    `rope_local_base_freq` for those with one.
    """
    by_kind = _read_object(fields, "rope_parameters")
    if not any(isinstance(value, dict) for value in by_kind.values()):
        theta = fields.number("rope_local_base_freq", default_sliding_theta, low=1.0)
        return read_rope(fields, max_positions, default_theta), RopeConfig(theta=theta)
    fields.ignore("rope_theta", "rope_local_base_freq", "rope_scaling")
    parts = ConfigFields(by_kind, "rope_parameters.")
    thetas = {"full_attention": default_theta, "sliding_attention": default_sliding_theta}
    full, sliding = (
        read_rope(ConfigFields({"rope_parameters": _read_object(parts, kind)}), max_positions, theta)
        for kind, theta in thetas.items()
    )
    for kind in by_kind.keys() - thetas.keys():
        raise parts.error(kind, by_kind[kind], f"absent: layers are {' or '.join(thetas)}")
    return full, sliding


def _read_object(fields: ConfigFields, name: str) -> dict[str, Any]:
    values: Any = fields.get(name)
    if not isinstance(values, (dict, type(None))):
        raise fields.error(name, values, "an object")
    return cast(dict[str, Any], values or {})


def _read_kind(rope: ConfigFields, fields: ConfigFields, theta: float, max_positions: int) -> RopeConfig:
    kind = _read_rope_type(rope)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(theta=theta, type=kind, factor=rope.number("factor"))
    original = fields.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_positions)
    )
    if kind == "llama3":
        return _read_llama3(rope, theta, original)
    return _read_yarn(rope, theta, original, max_positions)


def _read_rope_type(rope: ConfigFields) -> RopeType:
    value = next((kind for kind in map(rope.get, ("rope_type", "type")) if kind is not None), "default")
    for kind in get_args(RopeType):
        if value == kind:
            return kind
    raise rope.error("rope_type", value, f"one of {', '.join(get_args(RopeType))}")


def _read_llama3(rope: ConfigFields, theta: float, original: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", high, f"above low_freq_factor={low:g}")
    return RopeConfig(
        theta=theta,
        type="llama3",
        factor=rope.number("factor"),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _read_yarn(rope: ConfigFields, theta: float, original: int, max_positions: int) -> RopeConfig:
    if theta == 1.0:  # its logarithm is a divisor
        raise rope.error("rope_theta", theta, "above 1 with yarn")
    stretch = max_positions / original  # what transformers takes when the factor is null
    return RopeConfig(
        theta=theta,
        type="yarn",
        factor=rope.number("factor", stretch if "factor" in rope else None),
        original_max_position_embeddings=original,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.optional_number("beta_fast") or 32.0,
        beta_slow=rope.optional_number("beta_slow") or 1.0,
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )
