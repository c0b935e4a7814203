"""The bench's models as config.json has them (models.json), and the tensors of their checkpoints.

Loads no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

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

# Hugging Face's names, those of each layer between the others, and the sizes of each tensor.
_DECODER = """
model.embed_tokens.weight vocab hidden
model.layers.{}.input_layernorm.weight hidden
model.layers.{}.self_attn.q_proj.weight query hidden
model.layers.{}.self_attn.k_proj.weight key hidden
model.layers.{}.self_attn.v_proj.weight key hidden
model.layers.{}.self_attn.o_proj.weight hidden query
model.layers.{}.self_attn.q_norm.weight head
model.layers.{}.self_attn.k_norm.weight head
model.layers.{}.post_attention_layernorm.weight hidden
model.layers.{}.mlp.gate_proj.weight ffn hidden
model.layers.{}.mlp.up_proj.weight ffn hidden
model.layers.{}.mlp.down_proj.weight hidden ffn
model.norm.weight hidden
lm_head.weight vocab hidden
"""
_ENCODER = """
embeddings.word_embeddings.weight vocab hidden
embeddings.position_embeddings.weight positions hidden
embeddings.token_type_embeddings.weight types hidden
embeddings.LayerNorm hidden
pooler.dense hidden hidden
encoder.layer.{}.attention.self.query hidden hidden
encoder.layer.{}.attention.self.key hidden hidden
encoder.layer.{}.attention.self.value hidden hidden
encoder.layer.{}.attention.output.dense hidden hidden
encoder.layer.{}.attention.output.LayerNorm hidden
encoder.layer.{}.intermediate.dense ffn hidden
encoder.layer.{}.output.dense hidden ffn
encoder.layer.{}.output.LayerNorm hidden
"""


def list_tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its shape, for Llama, Qwen3 and BERT.

    A name in the tables without `.weight` is of a weight and a bias.
    """
    head = config.get("head_dim", 0)
    sizes: dict[str, int] = {
        "hidden": config["hidden_size"],
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "positions": config["max_position_embeddings"],
        "types": config.get("type_vocab_size", 0),
        "head": head,
        "query": config["num_attention_heads"] * head,
        "key": config.get("num_key_value_heads", 0) * head,
    }
    left_out = [] if config["model_type"] == "qwen3" else ["q_norm", "k_norm"]
    left_out += ["lm_head"] if config.get("tie_word_embeddings") else []
    table = [line.split() for line in (_ENCODER if is_encoder(config) else _DECODER).split("\n") if line]
    first = next(index for index, (name, *_) in enumerate(table) if "{}" in name)
    layer = [row for row in table if "{}" in row[0]]
    rows = table[:first]
    for index in range(config["num_hidden_layers"]):
        rows += [[name.format(index), *names] for name, *names in layer]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, *names in (*rows, *table[first + len(layer) :]):
        shape = tuple(sizes[size] for size in names)
        if name.endswith(".weight"):
            shapes |= {} if any(part in name for part in left_out) else {name: shape}
        else:
            shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def is_encoder(config: dict[str, Any]) -> bool:
    """Whether it is one of ENCODERS."""
    return config["model_type"] == "bert"
