"""The bench's models as config.json has them, and the tensors of their checkpoints. Loads no torch."""

from __future__ import annotations

from typing import Any

WEIGHT_STD = 0.02  # transformers' initializer_range

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": WEIGHT_STD,
    "dtype": "bfloat16",
    "use_cache": True,
}

BENCH_MODELS: dict[str, dict[str, Any]] = {
    # So small that a step is call overhead: it measures the engine, not the matrix kernels.
    "tiny": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    # The shape of Qwen3-0.6B: 1.19 GB are read a decode step, so it measures bandwidth and matrix kernels.
    "small": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}

# Only a config.json and a tokenizer: their weights are made up by the engine (load_format="dummy").
DUMMY_MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": BENCH_MODELS["small"],
    # The shape of Llama-3.1-8B, 16.1 GB in bfloat16.
    "llama-8b": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
}

# GGUF files: the model of which each has the tensors, in Q4_0.
GGUF_MODELS = {"small-q4_0": "small"}


# Shapes whose kernels are compiled; no checkpoint is made of them.
COMPILED_MODELS = DUMMY_MODELS | {
    # Gemma 2 2B: heads of 256, which need other tiles, caps, and windows on every other layer.
    "gemma2-2b": _COMMON
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
}


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
