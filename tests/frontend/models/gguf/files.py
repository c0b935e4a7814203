"""A tiny GGUF model with a vocabulary, for tests of the frontend."""

from __future__ import annotations

import torch

from ....gguf_files import GgufWriter

MERGES = ["h e", "l l", "he ll", "hell o", "\u0120 w", "o r", "\u0120w or", "l d", "\u0120wor ld"]
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_vocabulary(pre: str = "qwen2") -> dict[str, object]:
    """Metadata of a byte-level vocabulary of 256 letters, some words and three control tokens."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    letters = [chr(byte if byte in printed else next(others)) for byte in range(256)]
    words = ["".join(merge.split(" ")) for merge in MERGES]
    tokens = [*letters, *words, *CONTROLS, "<think>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 4) + [3, 3, 3, 4],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": len(tokens) - 4,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}",
    }


def make_tiny(**changes: object) -> GgufWriter:
    """A Llama of one layer; `changes` are of metadata, None takes a key away (_ stands for a dot)."""
    vocabulary = make_vocabulary()
    num_tokens = len(vocabulary["tokenizer.ggml.tokens"])  # pyright: ignore[reportArgumentType]
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 10000.0,
        **vocabulary,
    }
    metadata |= changes
    writer = GgufWriter({key: value for key, value in metadata.items() if value is not None})
    writer.add("token_embd.weight", torch.zeros(num_tokens, 32), "F16")
    writer.add("output_norm.weight", torch.ones(32))
    for name, shape in {
        "attn_q": (32, 32),
        "attn_k": (16, 32),
        "attn_v": (16, 32),
        "attn_output": (32, 32),
    }.items():
        writer.add_blocks(f"blk.0.{name}.weight", "Q4_0", shape)
    for name, shape in {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}.items():
        writer.add_blocks(f"blk.0.{name}.weight", "Q8_0", shape)
    for name in ("attn_norm", "ffn_norm"):
        writer.add(f"blk.0.{name}.weight", torch.ones(32))
    return writer
