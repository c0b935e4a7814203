"""The bench's models as config.json has them (models.json), and the tensors of their checkpoints.

Loads no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

WEIGHT_STD = 0.02  # transformers' initializer_range
_CONFIGS: dict[str, dict[str, Any]] = msgspec.json.decode(
    Path(__file__).with_name("models.json").read_bytes()
)

# tiny is so small that a step is call overhead: it measures the engine, not the matrix kernels. small has the
# shape of Qwen3-0.6B: 1.19 GB are read a decode step, so it measures bandwidth and matrix kernels.
BENCH_MODELS = {name: _CONFIGS[name] for name in ("tiny", "small")}
# Only a config.json and a tokenizer: their weights are made up by the engine (load_format="dummy"). llama-8b
# has the shape of Llama-3.1-8B, 16.1 GB in bfloat16.
DUMMY_MODELS = {"qwen3-0.6b": _CONFIGS["small"], "llama-8b": _CONFIGS["llama-8b"]}
# Shapes whose kernels are compiled; no checkpoint is made of them. Gemma 2 has heads of 256, which need other
# tiles, caps, and windows on every other layer.
COMPILED_MODELS = DUMMY_MODELS | {"gemma2-2b": _CONFIGS["gemma2-2b"]}
# tiny-encoder is so small that a text is call overhead; the others have the shapes of all-MiniLM-L6-v2 and
# bge-small-en-v1.5.
ENCODERS = {name: _CONFIGS[name] for name in ("tiny-encoder", "minilm", "bge-small")}


def list_tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its shape, by Hugging Face's names, for Llama and Qwen3."""
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (hidden,)
        shapes[at + "self_attn.q_proj.weight"] = (q_size, hidden)
        shapes[at + "self_attn.k_proj.weight"] = (kv_size, hidden)
        shapes[at + "self_attn.v_proj.weight"] = (kv_size, hidden)
        shapes[at + "self_attn.o_proj.weight"] = (hidden, q_size)
        if config["model_type"] == "qwen3":
            shapes[at + "self_attn.q_norm.weight"] = (head,)
            shapes[at + "self_attn.k_norm.weight"] = (head,)
        shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        shapes[at + "mlp.gate_proj.weight"] = (ffn, hidden)
        shapes[at + "mlp.up_proj.weight"] = (ffn, hidden)
        shapes[at + "mlp.down_proj.weight"] = (hidden, ffn)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes
