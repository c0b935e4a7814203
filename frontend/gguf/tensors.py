"""From a GGUF file's tensors to the names under which the model's loader asks for them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from ...ipc.errors import ModelError
from ...ipc.gguf_tensor import FLOATS, GgufTensor
from .config import ROPE_TABLE, Config
from .header import GgufHeader, StoredTensor

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORM = {**_ATTENTION, **_DENSE, "ffn_norm": "post_attention_layernorm"}
_MIXTRAL = "block_sparse_moe.experts.{}."
_BOTH_NORMS = {
    **_ATTENTION,
    **_DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# After "blk.N."; {} is the number of an expert, over which such a tensor is stacked.
_LAYERS: dict[str, dict[str, str]] = {
    "gemma": _PRE_NORM,
    "llama": _PRE_NORM,
    "phi3": {
        **_PRE_NORM,
        "attn_qkv": "self_attn.qkv_proj",
        "ffn_up": "mlp.gate_up_proj",
    },
    "qwen2": _PRE_NORM,
    "qwen3": _PRE_NORM,
    "qwen3_moe": {
        **_PRE_NORM,
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    },
    "mixtral": {
        **_ATTENTION,
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": f"{_MIXTRAL}w1",
        "ffn_up_exps": f"{_MIXTRAL}w3",
        "ffn_down_exps": f"{_MIXTRAL}w2",
    },
    "gemma2": _BOTH_NORMS,
    "gemma3_text": _BOTH_NORMS,
}
_ADDED_ONE = frozenset(
    ("gemma", "gemma2", "gemma3_text")
)  # model types whose norms are stored as what they multiply by
_PAIRED = frozenset(("llama", "mixtral"))  # whose queries and keys llama.cpp's converter has reordered
_NAME = re.compile(r"(?:blk\.(\d{1,5})\.)?([a-z_]{1,40})(?:\.(\d{1,5}))?\.(weight|bias)")


def name_tensors(headers: Sequence[GgufHeader], config: Config) -> tuple[GgufTensor, ...]:
    """The table for the worker, by the model that `config` describes.

    ModelError for a tensor that the model does not have, or one that is in two of the files.
    """
    tensors: dict[str, GgufTensor] = {}
    for index, header in enumerate(headers):
        for stored in header.tensors.values():
            if stored.name == ROPE_TABLE:  # config.py has read it
                continue
            tensor = replace(_name(header, stored, config), file=index)
            if tensor.name in tensors:
                raise _error(header, stored, "a name that comes once in all files")
            tensors[tensor.name] = tensor
    return tuple(tensors.values())


def _name(header: GgufHeader, stored: StoredTensor, config: Config) -> GgufTensor:
    kind, shape = config["model_type"], stored.shape
    match = _NAME.fullmatch(stored.name)
    if match is None:
        raise _error(header, stored, f"the name of a tensor of {kind}")
    layer, part, expert, suffix = match.groups()
    if layer is None:
        name = _WHOLE.get(part)
    else:
        # Files of 2023 have a tensor an expert.
        name = _LAYERS[kind].get(part if expert is None else f"{part}_exps")
    if name is None or (layer is not None and int(layer) >= config["num_hidden_layers"]):
        raise _error(header, stored, f"a tensor of {kind} with {config['num_hidden_layers']} layers")
    if expert is not None:
        name = name.format(int(expert))
    if name.count("{}") + (1 if suffix == "bias" or "norm" in part else 2) != len(shape):
        raise _error(header, stored, "another number of dimensions")
    if len(shape) == 1 and stored.type not in FLOATS:
        raise _error(header, stored, f"one of {', '.join(FLOATS)} for a tensor of one dimension")
    if layer is not None:
        name = f"model.layers.{int(layer)}.{name}"
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    num_heads = config[heads[part]] if kind in _PAIRED and part in heads else 0
    if num_heads and shape[0] % (2 * num_heads):
        raise _error(header, stored, f"a multiple of {2 * num_heads} rows, two for each of {num_heads} heads")
    has_added_one = kind in _ADDED_ONE and "norm" in part
    return GgufTensor(f"{name}.{suffix}", stored.type, shape, 0, stored.offset, num_heads, has_added_one)


def _error(header: GgufHeader, stored: StoredTensor, allowed: str) -> ModelError:
    field = f"{header.file.name} tensor {stored.type}{list(stored.shape)}"
    return ModelError(field, stored.name, allowed)
