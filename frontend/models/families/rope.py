"""Rotary settings of config.json: `rope_scaling` with rope_theta beside it, or `rope_parameters` with it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast, get_args

from msgspec.structs import replace

from ....ipc.errors import ModelError, shorten
from ....ipc.spec.model_spec import RopeConfig, RopeType
from .config_fields import ConfigFields

# Of scaled ropes; transformers' default one has no use for them.
_SCALING = ("factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_rope(
    fields: ConfigFields,
    max_positions: int,
    default_theta: float = 10000.0,
    *,
    head_size: int | None = None,
    rotated_share: float = 1.0,
    has_factors: bool = False,
    original: int | None = None,
    scales_queries: bool = False,
) -> RopeConfig:
    """The rotary embedding of all layers. ModelError names a key with a value that has no meaning here.

    `head_size` is that of a family whose heads may be rotated in part, by default in this share of them;
    `has_factors`: it may have some for each pair, and no other scaling. `original` is its trained length
    where config.json has none beside the object, None what the object says. `scales_queries`: it may scale
    queries beyond that length.
    """
    # transformers lets rope_scaling win where a checkpoint has both.
    objects = {name: _read_object(fields, name) for name in ("rope_scaling", "rope_parameters")}
    name = "rope_scaling" if objects["rope_scaling"] else "rope_parameters"
    if any(isinstance(value, dict) for value in objects[name].values()):
        raise ModelError(f"config.json {name}", shorten(objects[name]), "one object for all layers")
    theta = fields.number("rope_theta", default_theta, low=1.0)
    fields.ignore("original_max_position_embeddings")
    rope = ConfigFields(objects[name], f"{name}.")
    part = None if head_size is None else _Part(head_size, rotated_share, has_factors, original)
    beta = rope.optional_number("llama_4_scaling_beta") if scales_queries else None
    if scales_queries:
        rope.ignore("max_position_embeddings")
    config = replace(_read_settings(rope, fields, theta, max_positions, part), query_scale_beta=beta)
    if beta is not None and config.original_max_position_embeddings is None:
        original = rope.integer("original_max_position_embeddings")
        return replace(config, original_max_position_embeddings=original)
    return config


class _Part(NamedTuple):
    """What families say whose heads may be rotated in part."""

    head_size: int
    share: float
    has_factors: bool
    original: int | None


def read_ropes_by_kind(
    fields: ConfigFields,
    max_positions: int,
    default_theta: float,
    default_sliding_theta: float,
    defaults: dict[str, Any] | None = None,
) -> tuple[RopeConfig, RopeConfig]:
    """Of layers without and with a window: `rope_parameters` has an object for each. An older config has
    `rope_scaling` for those without, and the bases `rope_theta` and `rope_local_base_freq`. `defaults` stand
    for an absent `rope_parameters`.
    """
    by_kind, scaling = (_read_object(fields, name) for name in ("rope_parameters", "rope_scaling"))
    by_kind = by_kind or defaults or {}
    parts = ConfigFields(by_kind, "rope_parameters.")
    for key in by_kind.keys() - {_FULL, _SLIDING}:
        raise parts.error(key, shorten(by_kind[key]), f"absent: layers are {_FULL} or {_SLIDING}")
    # As transformers adds it: to an object that has a rope_type, beside which `type` says nothing.
    full = _read_object(parts, _FULL) if by_kind else {"rope_type": "default"}
    has_kinds = fields.get("rope_parameters") is not None
    if has_kinds and scaling and parts.get(_FULL) is None:
        raise parts.error(_FULL, None, "an object, which rope_scaling is added to")
    name = f"rope_parameters.{_FULL}." if by_kind else "rope_scaling."
    outside = ConfigFields({})
    rope = _read_settings(
        ConfigFields(full | scaling, name),
        outside,
        fields.number("rope_theta", default_theta, low=1.0),
        max_positions,
    )
    sliding_rope = _read_settings(
        ConfigFields(_read_object(parts, _SLIDING), f"rope_parameters.{_SLIDING}."),
        outside,
        fields.number("rope_local_base_freq", default_sliding_theta, low=1.0),
        max_positions,
    )
    if not (rope.truncate and sliding_rope.truncate):  # transformers does not look for it here
        raise ModelError(
            "config.json rope_parameters truncate", False, "true with a rope for each kind of layer"
        )
    return rope, sliding_rope


def _read_settings(
    rope: ConfigFields,
    outside: ConfigFields,
    theta: float,
    max_positions: int,
    part: _Part | None = None,
) -> RopeConfig:
    """One object; `outside` may have some of its keys, `theta` is the base of one without."""
    rotated_size = _read_rotated_size(rope, outside, part)
    theta = rope.number("rope_theta", theta, low=1.0)
    size = None if part is None or not part.has_factors else rotated_size or part.head_size
    config = _read_kind(rope, outside, theta, max_positions, size, part and part.original)
    if part is not None and config.type == "proportional":
        raise rope.error("rope_type", config.type, "another: heads of this family are rotated in part")
    rope.check_rest(f"rope_type {config.type!r}")
    return replace(config, rotated_size=rotated_size)


def _read_object(fields: ConfigFields, name: str) -> dict[str, Any]:
    values: Any = fields.get(name)
    if not isinstance(values, (dict, type(None))):
        raise fields.error(name, values, "an object")
    return cast(dict[str, Any], values or {})


def _read_rotated_size(rope: ConfigFields, fields: ConfigFields, part: _Part | None) -> int | None:
    """How many numbers of a head are rotated; None: all."""
    key, head_size = "partial_rotary_factor", part and part.head_size
    if rope.get("rope_type") == "proportional":  # which rotates the whole head, some pairs by the angle 0
        return None
    if head_size is None and (rope.get("rope_type") or rope.get("type", "default")) == "default":
        fields.ignore(key)  # the whole head is rotated, as transformers does
        rope.ignore(key)
        return None
    factor = rope.number(key, fields.number(key, part.share if part else 1.0))
    if factor == 1:
        return None
    place = rope if key in rope else fields
    if head_size is None:
        raise place.error(key, factor, "1 (the whole head is rotated)")
    size = int(head_size * factor)
    if not 0 < size < head_size or size % 2:
        raise place.error(key, factor, f"what makes an even part of a head's {head_size} numbers")
    return size


def _read_kind(
    rope: ConfigFields,
    outside: ConfigFields,
    theta: float,
    max_positions: int,
    rotated_size: int | None,
    original: int | None,
) -> RopeConfig:
    kind = _read_rope_type(rope, has_factors=rotated_size is not None)
    if kind == "default":
        if (other := rope.get("type", kind)) != kind:
            raise rope.error("rope_type", kind, f"{other!r}, as type says, or no type")
        # A text has the same position in all sections.
        rope.ignore(*_SCALING, "original_max_position_embeddings", "mrope_section")
        return RopeConfig(theta=theta)
    if kind == "proportional":
        share = rope.number("partial_rotary_factor", 1.0)
        if share > 1:
            raise rope.error("partial_rotary_factor", share, "at most 1")
        return RopeConfig(theta=theta, type=kind, factor=rope.number("factor", 1.0), turning_share=share)
    if kind in ("linear", "dynamic"):
        return RopeConfig(theta=theta, type=kind, factor=rope.number("factor"))
    inside = rope.integer("original_max_position_embeddings", max_positions)
    original = outside.integer("original_max_position_embeddings", original or inside)
    if kind == "llama3":
        return _read_llama3(rope, theta, original)
    if kind == "longrope":
        assert rotated_size is not None
        return _read_longrope(rope, theta, original, max_positions, rotated_size)
    return _read_yarn(rope, theta, original, max_positions)


def _read_rope_type(rope: ConfigFields, has_factors: bool) -> RopeType:
    """Families with factors for each pair have these and no other scaling; first exports call them su."""
    key = "rope_type" if "rope_type" in rope else "type"
    value = rope.get(key) if key in rope else "default"
    if has_factors and value == "su":
        return "longrope"
    allowed: list[RopeType] = [
        kind for kind in get_args(RopeType) if kind == "default" or has_factors == (kind == "longrope")
    ]
    for kind in allowed:
        if value == kind:
            return kind
    raise rope.error(key, value, f"one of {', '.join(allowed)}")


def _read_llama3(rope: ConfigFields, theta: float, original: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high < low:  # Llama 4's are equal: no frequency is between
        raise rope.error("high_freq_factor", high, f"low_freq_factor={low:g} or more")
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
