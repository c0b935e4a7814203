"""Random tiny encoders of every family, made with transformers: the oracle of the encoders' golden tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import Checkpoint
from quire.frontend.families import read_model_spec
from quire.worker.first_calls import make_first_calls

_SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 514,
}
_DISTILBERT: dict[str, Any] = {
    "vocab_size": 131,
    "dim": 64,
    "hidden_dim": 96,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 512,
}
# What names transformers' class, and the fields of its configuration.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _SIZES),
    "bert-relu": ("Bert", _SIZES | {"hidden_act": "relu"}),
    "roberta": ("Roberta", _SIZES | {"hidden_act": "gelu_new"}),
    "xlm-roberta": ("XLMRoberta", _SIZES | {"pad_token_id": 1}),
    "distilbert": ("DistilBert", _DISTILBERT),
    "mpnet": ("MPNet", _SIZES),
    "modernbert": ("ModernBert", _SIZES | {"local_attention": 12, "pad_token_id": 0, "norm_eps": 1e-6}),
    "gte": ("Gte", _SIZES),
    "nomic": ("NomicBert", _SIZES | {"hidden_act": "silu"}),
}


def make_encoder(folder: Path, name: str, head: str = "Model", **more: Any) -> Checkpoint:
    """A random model, saved into `folder` and kept as reference. Its spec is read from config.json.

    `head` ends the name of transformers' class, `more` are fields of its configuration.
    """
    make_first_calls()
    family, fields = ENCODERS[name]
    config = getattr(transformers, f"{family}Config")(**fields | more)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{head}")(config).float().eval()
    with torch.no_grad():
        for tensor_name, parameter in model.named_parameters():
            if "norm" in tensor_name.lower() and tensor_name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.08)
    model.save_pretrained(folder)
    spec = read_model_spec(json.loads((folder / "config.json").read_text()))
    return Checkpoint(folder, spec, model)
