"""Random tiny encoders of every family, made with transformers: the oracle of the encoders' golden tests."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import Checkpoint
from quire.frontend.models.families import read_model_spec
from quire.ipc.spec.config import EngineConfig
from quire.worker.attention.metadata import AttentionMetadata
from quire.worker.first_calls import make_first_calls
from quire.worker.kv_cache import allocate_kv_caches
from quire.worker.models import Decoder
from torch import Tensor

CPU = torch.device("cpu")
# Around the borders of blocks (16), of tiles (256 keys) and of ModernBERT's window; where type 1 begins.
LENGTHS = (1, 16, 45, 300, 7)
TYPE_STARTS = (1, 5, 45, 120, 0)
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
_GEMMA: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 12,
    "use_bidirectional_attention": True,
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
# With decoders that see the whole prompt, whose hidden states are larger: their vectors are compared.
EMBEDDERS = ENCODERS | {"embeddinggemma": ("Gemma3Text", _GEMMA)}


def make_encoder(folder: Path, name: str, head: str = "Model", **more: Any) -> Checkpoint:
    """A random model, saved into `folder` and kept as reference. Its spec is read from config.json.

    `head` ends the name of transformers' class, `more` are fields of its configuration.
    """
    make_first_calls()
    family, fields = EMBEDDERS[name]
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


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 131, (length,), generator=generator) for length in LENGTHS]


def find_types(checkpoint: Checkpoint, which: int) -> Tensor:
    """Token types of a prompt; all 0 for a model that has fewer than two."""
    positions = torch.arange(LENGTHS[which])
    has_types = checkpoint.spec.embedding.num_types > 1
    return (positions >= TYPE_STARTS[which]).long() * has_types


class EncoderStep:
    """Prompts one after the other, in the scratch that a worker would have."""

    def __init__(self, model: Decoder, config: EngineConfig) -> None:
        self.model = model
        self._block_size = config.cache.block_size
        self._caches = allocate_kv_caches(config, 0, CPU)
        for cache in {id(part): part for layer in self._caches for part in layer}.values():
            cache.fill_(torch.nan)  # a read outside a prompt's own tokens would show

    def compute(self, checkpoint: Checkpoint, which: list[int]) -> list[Tensor]:
        """Hidden states [length, hidden] of each of these prompts, computed together."""
        ids = [prompts()[index] for index in which]
        lengths = [len(each) for each in ids]
        counts = [-(-length // self._block_size) for length in lengths]
        tables = torch.full((len(ids), max(counts)), 1 << 30, dtype=torch.int32)
        slots: list[Tensor] = []
        for row, (first, count) in enumerate(zip(accumulate([0, *counts]), counts, strict=False)):
            tables[row, :count] = torch.arange(first, first + count)
            slots.append(torch.arange(lengths[row]) + first * self._block_size)
        metadata = AttentionMetadata(
            query_starts=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.cat(slots),
            max_query_len=max(lengths),
            max_seq_len=max(lengths),
        )
        positions = torch.cat([torch.arange(length) for length in lengths])
        types = torch.cat([find_types(checkpoint, index) for index in which])
        with torch.inference_mode():
            hidden = self.model.forward(torch.cat(ids), positions, self._caches, metadata, None, types)
        return list(hidden.split(lengths))


def compute_reference(checkpoint: Checkpoint, which: int) -> Tensor:
    inputs = {"input_ids": prompts()[which].unsqueeze(0)}
    if checkpoint.spec.embedding.num_types > 1:
        inputs["token_type_ids"] = find_types(checkpoint, which).unsqueeze(0)
    with torch.inference_mode():
        return checkpoint.reference(**inputs).last_hidden_state[0]
