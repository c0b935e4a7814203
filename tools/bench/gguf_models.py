"""Writes the bench's GGUF files: a bench model's tensors as llama.cpp's own library quantizes and names them.

`python -m quire.tools.bench.gguf_models NAME` writes one if it is not there yet and prints its path.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import quantize
from safetensors.torch import load_file

from .model_configs import BENCH_MODELS, GGUF_MODELS
from .models import ensure_folder, ensure_model

_TYPE = gguf.GGMLQuantizationType.Q4_0
_BYTES = 256  # tokens of one byte, which a byte-level vocabulary has to have


def ensure_gguf(name: str, cache_folder: Path | None = None) -> Path:
    """The file `name` of GGUF_MODELS, written first if it is not there (small-q4_0: 340 MB, about 20 s)."""
    source = GGUF_MODELS[name]

    def write(folder: Path) -> None:
        folder.mkdir()
        weights = load_file(ensure_model(source, cache_folder) / "model.safetensors")
        write_gguf(BENCH_MODELS[source], weights, folder / f"{name}.gguf")

    return ensure_folder(name, write, cache_folder) / f"{name}.gguf"


def write_gguf(config: dict[str, Any], weights: dict[str, torch.Tensor], file: Path) -> None:
    """`weights` of a Qwen3 model: matrices in Q4_0, the rest in float32."""
    writer = gguf.GGUFWriter(file, config["model_type"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    _add_tokenizer(writer, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in weights.items():
        renamed = names.get_name(name, try_suffixes=(".weight",))
        assert renamed is not None, name
        numbers = tensor.float().numpy()
        if tensor.ndim > 1:
            writer.add_tensor(renamed, quantize(numbers, _TYPE), raw_dtype=_TYPE)
        else:
            writer.add_tensor(renamed, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """A byte-level vocabulary of one merge and words of no meaning: the bench talks in ids."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    # As GPT-2 spells bytes: a byte that is not printed has a letter from 256 on.
    letters = [chr(byte if byte in printed else next(others)) for byte in range(_BYTES)]
    tokens = [*letters, "ab", *(f"<{index}>" for index in range(_BYTES + 1, vocab_size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab_size)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def main() -> None:
    """Write the named files and print their paths."""
    for name in sys.argv[1:]:
        print(ensure_gguf(name))


if __name__ == "__main__":
    main()
