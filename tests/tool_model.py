"""A model of random weights behind a template that knows tools and thoughts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import tokenizers
from checkpoints import RECIPES, make_checkpoint
from quire.frontend.models.model_folder import pocket_folder
from tool_template import TEMPLATE


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
