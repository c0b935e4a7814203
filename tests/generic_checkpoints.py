"""Tiny random checkpoints of any decoder that transformers knows, made of a config alone with all sizes set.

Default sizes are a published model's, tens of GB. Every parameter and stored buffer is drawn anew, since a
random model leaves norms, sinks, biases and scalars at constants, and a test would pass without them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quire.ipc.spec.config import EngineConfig, ModelConfig
from quire.ipc.spec.model_spec import ModelSpec
from quire.worker.first_calls import make_first_calls
from quire.worker.models.generic.plan import plan
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB_SIZE = 131
NUM_LAYERS = 3
WINDOW = 9
MAX_PARAMS = 4_000_000
# By the names of many config classes; each takes those that it has.
_SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "n_embd": 64, "d_model": 64},
    **{"intermediate_size": 96, "n_inner": 96, "ffn_dim": 96, "ffn_hidden_size": 96},
    **{"num_hidden_layers": NUM_LAYERS, "n_layer": NUM_LAYERS, "num_layers": NUM_LAYERS},
    **{"num_attention_heads": 4, "n_head": 4, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 128,
        "n_positions": 128,
        "sliding_window": WINDOW,
    },
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8},
    **{"num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "n_group": 2, "topk_group": 1},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "moe_layer_start_index": 1},
}
_LATENT: dict[str, Any] = {
    **{
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    **{"num_key_value_heads": 4, "head_dim": 8},
}


@dataclass(frozen=True, slots=True)
class GenericCheckpoint:
    """A saved model: its folder, its config.json, and transformers' own instance in float32."""

    folder: Path
    config: dict[str, Any]
    reference: Any

    def compute_reference(self, token_ids: list[int]) -> torch.Tensor:
        """transformers' logits of all tokens of a prompt."""
        with torch.inference_mode():
            return self.reference(torch.tensor([token_ids]), use_cache=False).logits[0].float()

    def engine_config(self, spec: ModelSpec | None = None, **model: Any) -> EngineConfig:
        """An EngineConfig of it by transformers' code; `model` overrides fields of its ModelConfig."""
        fields: dict[str, Any] = {
            **{"model": str(self.folder), "served_model_name": "tiny", "tokenizer": str(self.folder)},
            **{"spec": spec or plan(self.config), "dtype": "float32", "max_model_len": 128},
            "weight_files": tuple(sorted(file.name for file in self.folder.glob("*.safetensors"))),
        }
        return EngineConfig(model=ModelConfig(**(fields | model)))


def make_tiny_config(model_type: str, **sizes: Any) -> Any:
    """transformers' config of a model type in tiny; `sizes` are its own, {"is_latent": True} those of MLA."""
    cls = CONFIG_MAPPING[model_type]
    usual = cls().to_dict()
    names = {*usual, *getattr(cls, "attribute_map", {})}
    chosen = _SIZES | (_LATENT if sizes.pop("is_latent", False) else {})
    values = {name: value for name, value in chosen.items() if name in names}
    kinds = list(dict.fromkeys(usual.get("layer_types") or ()))
    if kinds:
        values["layer_types"] = [kinds[layer % len(kinds)] for layer in range(NUM_LAYERS)]
    return cls(**(values | sizes))


def make_generic_checkpoint(folder: Path, model_type: str, **sizes: Any) -> GenericCheckpoint:
    """Make a random model, and save it into `folder`."""
    make_first_calls()
    torch.manual_seed(0)
    config = make_tiny_config(model_type, **sizes)
    with torch.device("meta"):
        num_params = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    assert num_params < MAX_PARAMS, f"{model_type} has {num_params} parameters: a size is not set"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    redraw(model)
    model.save_pretrained(folder)
    # Read again: what the folder means is what counts, and a new model ties no weights in some classes.
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="float32")
    return GenericCheckpoint(folder, json.loads((folder / "config.json").read_bytes()), reference.eval())


def redraw(model: torch.nn.Module) -> None:
    """Draw every parameter and stored buffer: norms around one, the rest around zero."""
    stored = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in stored.items():
            if not tensor.is_floating_point():
                continue
            if tensor.dim() == 1 and ("norm" in name or "ln_" in name) and name.endswith("weight"):
                tensor.uniform_(0.5, 1.5)
            else:
                tensor.normal_(0.0, 0.2 if tensor.dim() == 1 else 0.15)
