"""What a GGUF file's metadata says of the model, as config.json and generation_config.json say it.

`families` reads the result as it reads those files. A key below the architecture's name that nothing here
knows is refused by name: it may change every token.
"""

from __future__ import annotations

from ....ipc.errors import ModelError
from ..families.config_fields import ConfigFields
from .architectures import ARCHITECTURES, LATENTS, LAYER_NORM, PARTLY_ROTATED, PREDICTING, Config
from .header import GgufHeader
from .keys import Keys
from .rope_scaling import read_scaling
from .vocabulary import find_end_ids


def read_config(header: GgufHeader) -> Config:
    """The model as config.json has it; ModelError with the file, the key, its value and what is allowed."""
    fields = ConfigFields(header.metadata, file=header.file.name)
    name = fields.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise fields.error("general.architecture", name, f"one of {', '.join(ARCHITECTURES)}")
    architecture, model_type, read_own = ARCHITECTURES[name]
    keys = Keys(header, name)
    config: Config = {"architectures": [architecture], "model_type": model_type}
    config |= _read_common(header, keys) | read_own(keys)
    keys.check_rest()
    # Without a window is not as by default.
    return {name: value for name, value in config.items() if value is not None or name == "sliding_window"}


def read_generation_config(header: GgufHeader) -> Config:
    """Which tokens end an output."""
    ends = find_end_ids(header)
    return {"eos_token_id": ends} if ends else {}


def _read_common(header: GgufHeader, keys: Keys) -> Config:
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        shape = None if table is None else list(table.shape)
        raise ModelError(f"{header.file.name} tensor token_embd.weight", shape, "a table [tokens, numbers]")
    hidden_size, num_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(1, hidden_size // num_heads))
    rotated, has_latents = keys.integer("rope.dimension_count", head_dim), keys.architecture in LATENTS
    value_size = keys.integer("attention.value_length", head_dim)
    if value_size != head_dim and not has_latents:
        raise keys.error("attention.value_length", value_size, f"{head_dim}, as keys have")
    num_layers = keys.integer("block_count")
    # Layers after the last, which predict further tokens; name_tensors leaves theirs out.
    num_predicting = keys.integer("nextn_predict_layers", 0, low=0, high=num_layers - 1)
    return {
        "vocab_size": table.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _read_width(keys),
        "num_hidden_layers": num_layers - num_predicting,
        PREDICTING: num_predicting or None,
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        # Else a LayerNorm's, whose key each family has another name for.
        "rms_norm_eps": None if LAYER_NORM in keys else keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.integer("context_length"),
        "rope_theta": keys.number("rope.freq_base", 10000.0, low=1.0),
        "rope_scaling": read_scaling(header, keys, rotated),
        "partial_rotary_factor": None if has_latents else _read_rotated(keys, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
    }


def _read_width(keys: Keys) -> int | None:
    """The width of the feed-forward part; a model of experts alone may have none."""
    has_width = "feed_forward_length" in keys and keys.get("feed_forward_length") != 0
    return keys.integer("feed_forward_length") if has_width or "expert_count" not in keys else None


def _read_rotated(keys: Keys, head_dim: int) -> float | None:
    """The rotated share of a head; None in a family that knows none."""
    rotated = keys.integer("rope.dimension_count", head_dim)
    if keys.architecture in PARTLY_ROTATED:
        return rotated / head_dim
    if rotated != head_dim:
        raise keys.error("rope.dimension_count", rotated, f"{head_dim}, a whole head")
    return None
