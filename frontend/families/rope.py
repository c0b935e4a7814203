"""Rotary settings of config.json: `rope_scaling` with rope_theta beside it, or `rope_parameters` with it."""

from __future__ import annotations

import math
from typing import Any, cast, get_args

from msgspec.structs import replace

from ...ipc.errors import ModelError, shorten
from ...ipc.model_spec import RopeConfig, RopeType
from .config_fields import ConfigFields


def read_rope(
    fields: ConfigFields,
    max_positions: int,
    default_theta: float = 10000.0,
    *,
    head_size: int | None = None,
    original: int | None = None,
) -> RopeConfig:
    """The rotary embedding of all layers. ModelError names a key with a value that has no meaning here.

    `head_size` is that of a family whose heads may be rotated in part, or have factors for each pair;
    `original` its default of the trained length, None max_positions.
    """
    # transformers lets rope_scaling win where a checkpoint has both.
    objects = {name: _read_object(fields, name) for name in ("rope_scaling", "rope_parameters")}
    name = "rope_scaling" if objects["rope_scaling"] else "rope_parameters"
    rope = ConfigFields(objects[name], f"{name}.")
    rotated_size = _read_rotated_size(rope, fields, head_size)
    if any(isinstance(value, dict) for value in objects[name].values()):
        raise ModelError(f"config.json {name}", shorten(objects[name]), "one object for all layers")
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta, low=1.0), low=1.0)
    fields.ignore("original_max_position_embeddings")
    size = None if head_size is None else rotated_size or head_size
    config = _read_kind(rope, fields, theta, max_positions, size, original)
    rope.check_rest(f"rope_type {config.type!r}")
    return replace(config, rotated_size=rotated_size)


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


def _read_rotated_size(rope: ConfigFields, fields: ConfigFields, head_size: int | None) -> int | None:
    """None: the whole head."""
    key = "partial_rotary_factor"
    factor = rope.number(key, fields.number(key, 1.0))
    if factor == 1:
        return None
    part = rope if key in rope else fields
    if head_size is None:
        raise part.error(key, factor, "1 (the whole head is rotated)")
    size = int(head_size * factor)
    if not 0 < size < head_size or size % 2:
        raise part.error(key, factor, f"what makes an even part of a head's {head_size} numbers")
    return size


def _read_kind(
    rope: ConfigFields,
    fields: ConfigFields,
    theta: float,
    max_positions: int,
    rotated_size: int | None,
    original: int | None,
) -> RopeConfig:
    kind = _read_rope_type(rope, has_factors=rotated_size is not None)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(theta=theta, type=kind, factor=rope.number("factor"))
    original = fields.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", original or max_positions),
    )
    if kind == "llama3":
        return _read_llama3(rope, theta, original)
    if kind == "longrope":
        assert rotated_size is not None
        return _read_longrope(rope, theta, original, max_positions, rotated_size)
    return _read_yarn(rope, theta, original, max_positions)


def _read_rope_type(rope: ConfigFields, has_factors: bool) -> RopeType:
    """Families with factors for each pair have these and no other scaling; first exports call them su."""
    value = next((kind for kind in map(rope.get, ("rope_type", "type")) if kind is not None), "default")
    if has_factors and value == "su":
        return "longrope"
    allowed: list[RopeType] = [
        kind for kind in get_args(RopeType) if kind == "default" or has_factors == (kind == "longrope")
    ]
    for kind in allowed:
        if value == kind:
            return kind
    raise rope.error("rope_type", value, f"one of {', '.join(allowed)}")


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


def _read_longrope(
    rope: ConfigFields, theta: float, original: int, max_positions: int, rotated_size: int
) -> RopeConfig:
    """LongRoPE (arXiv 2402.13753)."""
    if original == 1:  # its logarithm is a divisor
        raise rope.error("original_max_position_embeddings", original, "above 1 with longrope")
    factor = rope.number("factor", max_positions / original)
    by_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        theta=theta,
        type="longrope",
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", by_factor),
        short_factors=rope.numbers("short_factor", rotated_size // 2),
        long_factors=rope.numbers("long_factor", rotated_size // 2),
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
