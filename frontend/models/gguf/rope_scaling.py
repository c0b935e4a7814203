"""Rope scaling of a GGUF file: keys, and tables of divisors that llama.cpp's converter makes of settings."""

from __future__ import annotations

import math
from typing import Any

from ....ipc.errors import ModelError
from .header import GgufHeader
from .keys import Keys

# llama.cpp writes Llama 3's scaling as a table of divisors. All published models have these settings.
_ORIGINAL = 8192
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": _ORIGINAL}
_LLAMA4 = {**_LLAMA3, "high_freq_factor": 1.0}
_MAX_DIVISORS = 4096  # half a head's size; no published model has more than 256
YARN_LOG, _QUERY_SCALE = "rope.scaling.yarn_log_multiplier", "attention.temperature_scale"
FREQS, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TABLES = (FREQS, _SHORT, _LONG)


def read_scaling(header: GgufHeader, keys: Keys, rotated_size: int) -> dict[str, Any] | None:
    """The rope scaling, None without one; missing values are llama.cpp's defaults."""
    if keys.architecture == "gemma4":  # whose table is of some layers only
        return None
    factor = keys.number("rope.scaling.factor", 1.0)
    kind = keys.get("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise keys.error("rope.scaling.type", kind, "one of none, linear, yarn, longrope")
    is_longrope = kind == "longrope" or _LONG in header.tensors
    # They multiply what is computed, of any type; YaRN's own number is written where config.json has it.
    own = 0.1 * math.log(factor) + 1 if kind == "yarn" and factor > 1 else 1.0
    for key, number in (("attn_factor", 1.0), ("yarn_attn_factor", own)):
        value = keys.number(f"rope.scaling.{key}", 1.0)
        is_read = is_longrope and key == "attn_factor"
        if not (is_read or value == 1.0 or math.isclose(value, number, rel_tol=1e-6)):
            raise keys.error(f"rope.scaling.{key}", value, "1" if number == 1 else f"1 or {number:g}")
    if is_longrope or FREQS in header.tensors:
        if kind != "none" and factor != 1.0:
            name = _LONG if is_longrope else FREQS
            raise keys.error("rope.scaling.factor", factor, f"1 beside the tensor {name}")
        return (_read_longrope if is_longrope else _read_llama3)(header, keys, rotated_size)
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        trained = keys.integer("context_length")
        original = keys.integer("rope.scaling.original_context_length", trained)
        scaling["original_max_position_embeddings"] = original
        names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        for name, key in names.items():
            if f"rope.scaling.{key}" in keys:
                scaling[name] = keys.number(f"rope.scaling.{key}")
        if YARN_LOG in keys:
            scaling |= {"mscale": 1.0, "mscale_all_dim": keys.number(YARN_LOG)}
        if _QUERY_SCALE in keys:
            scaling["llama_4_scaling_beta"] = keys.number(_QUERY_SCALE)
    return scaling


def read_divisors(header: GgufHeader, name: str, rotated_size: int) -> list[float]:
    """The divisors of the frequencies, one for each rotated pair."""
    table, size = header.tensors.get(name), rotated_size // 2
    if table is None or table.type != "F32" or table.shape != (size,) or size > _MAX_DIVISORS:
        shown = None if table is None else f"{table.type} {list(table.shape)}"
        field = f"{header.file.name} tensor {name}"
        raise ModelError(field, shown, f"F32 {[size]}, of at most {_MAX_DIVISORS}")
    return list(table.read_floats())


def _read_longrope(header: GgufHeader, keys: Keys, rotated_size: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": keys.integer(
            "rope.scaling.original_context_length", keys.integer("context_length")
        ),
        "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
        "short_factor": read_divisors(header, _SHORT, rotated_size),
        "long_factor": read_divisors(header, _LONG, rotated_size),
    }


def _read_llama3(header: GgufHeader, keys: Keys, rotated_size: int) -> dict[str, Any]:
    """The settings that a table of divisors was made with."""
    stored = read_divisors(header, FREQS, rotated_size)
    factor, theta = max(stored), keys.number("rope.freq_base", 10000.0, low=1.0)
    for settings in (_LLAMA3, _LLAMA4) if 1 <= factor < math.inf else ():
        made = make_llama3_divisors(factor, theta, rotated_size, settings["high_freq_factor"])
        if all(math.isclose(each, other, rel_tol=1e-4) for each, other in zip(stored, made, strict=False)):
            return {"rope_type": "llama3", "factor": factor, **settings}
    field = f"{header.file.name} tensor {FREQS}"
    raise ModelError(field, stored, f"the divisors of a Llama 3 or 4, trained for {_ORIGINAL} tokens")


def make_llama3_divisors(factor: float, theta: float, head_dim: int, high: float = 4.0) -> list[float]:
    """As llama.cpp's converter makes them of a Llama 3's rope_scaling."""
    low, original = 1.0, _ORIGINAL
    divisors: list[float] = []
    for index in range(0, head_dim, 2):
        turns = original / (2 * math.pi * theta ** (index / head_dim))  # within the trained length
        kept = float(turns >= low) if high == low else min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - kept) / factor + kept))
    return divisors
