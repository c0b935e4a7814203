"""Writes the bench's checkpoints: random bfloat16 weights of a fixed seed in Hugging Face's layout.

`python -m quire.tools.bench.models NAME` writes one if it is not there yet and prints its folder. Needs torch
and safetensors, not transformers.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

_WEIGHT_STD = 0.02  # transformers' initializer_range
_LAYOUT_VERSION = 1  # raise it when a checkpoint's contents change: the folders are cached by it

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": _WEIGHT_STD,
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


def ensure_model(name: str, cache_folder: Path | None = None) -> Path:
    """The folder of the bench model `name`, written first if it is not there (small: 1.2 GB, about 20 s)."""
    folder = (cache_folder or default_cache_folder()) / f"{name}-v{_LAYOUT_VERSION}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and renamed, so that a run that was cut off leaves no half checkpoint there.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
        part = Path(scratch) / "model"
        write_checkpoint(BENCH_MODELS[name], part)
        try:
            part.rename(folder)
        except OSError:  # another run was faster
            if not folder.exists():
                raise
    return folder


def default_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/quire/bench`, or the same under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "bench"


def write_checkpoint(config: dict[str, Any], folder: Path, seed: int = 0) -> None:
    """Write config.json, model.safetensors and tokenizer.json for `config` into a new `folder`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "tokenizer.json").write_text(json.dumps(_make_tokenizer(config["vocab_size"])))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t2", "bos_token": "t1"})
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _make_tensor(name, shape, generator) for name, shape in list_tensor_shapes(config).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


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


def _make_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, _WEIGHT_STD, generator=generator)


def _make_tokenizer(vocab_size: int) -> dict[str, Any]:
    """A tokenizer.json whose words are t0, t1, ...: the bench talks in ids, but a model folder has one."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {f"t{i}": i for i in range(vocab_size)},
            "unk_token": "t0",
        },
    }


def main() -> None:
    """Write the named models and print their folders."""
    for name in sys.argv[1:]:
        if name == "--remove":
            shutil.rmtree(default_cache_folder(), ignore_errors=True)
        else:
            print(ensure_model(name))


if __name__ == "__main__":
    main()
