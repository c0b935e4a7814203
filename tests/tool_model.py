"""Models of random weights behind templates that know tools and thoughts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import tokenizers
from checkpoints import RECIPES, make_checkpoint
from decoders import make_decoder
from quire.frontend.models.model_folder import pocket_folder
from tool_template import HARMONY_TEMPLATE, TEMPLATE


def make_tool_model(folder: Path) -> Path:
    """Write it into `folder`, with the pocket model's vocabulary and the markers."""
    tokenizer = tokenizers.Tokenizer.from_file(str(pocket_folder() / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    size = tokenizer.get_vocab_size()
    make_checkpoint(folder, replace(RECIPES["llama"], vocab_size=size, rope="default"))
    tokenizer.save(str(folder / "tokenizer.json"))
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | {"max_position_embeddings": 1024}))
    config = json.loads((pocket_folder() / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


HARMONY_TOKENS = ("start", "end", "message", "channel", "constrain", "call", "return", "startoftext")


def make_harmony_model(folder: Path) -> Path:
    """gpt-oss' layers, in `folder`, with the pocket model's vocabulary and harmony's tokens."""
    tokenizer = tokenizers.Tokenizer.from_file(str(pocket_folder() / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<|{name}|>" for name in HARMONY_TOKENS])
    ends = [tokenizer.token_to_id(f"<|{name}|>") for name in ("return", "call")]
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 32}
    more = {"rope_parameters": rope, "max_position_embeddings": 1024, "eos_token_id": ends[0]}
    make_decoder(folder, "gpt-oss", vocab_size=tokenizer.get_vocab_size(), **more)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(HARMONY_TEMPLATE)
    names = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder
