"""Random tiny decoders of further families, made with transformers: a family is a row of DECODERS.

The row brings all checks of worker/test_families.py. checkpoints.RECIPES has the families whose layers differ
most, which many more tests take: a family joins these only for an operation that none of them has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import OTHERS, Checkpoint, make_checkpoint
from quire.frontend.models.families import read_model_spec
from quire.worker.first_calls import make_first_calls
from torch import nn

# What a row changes; None takes the default of the family's class.
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
# Of experts as DeepSeek V3 has them.
_ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
# transformers' class, and the fields of its configuration beside _SIZES. A default of the class may be far
# too large for a test: give every size.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralForCausalLM", {"sliding_window": 13, "num_key_value_heads": 1}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 13,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 13,
            "hidden_size": 64,
        },
    ),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 8, "num_experts_per_tok": 3, "hidden_size": 64}),
    "flex-olmo": ("FlexOlmoForCausalLM", {"num_experts": 8, "num_experts_per_tok": 3, "hidden_size": 64}),
    "dots1": (
        "Dots1ForCausalLM",
        {
            **_ROUTED,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
            "sliding_window": 13,
            "max_window_layers": 2,
            "norm_topk_prob": True,
        },
    ),
    "solar-open": ("SolarOpenForCausalLM", {**_ROUTED, "norm_topk_prob": False}),
}
FAMILIES = (*DECODERS, *OTHERS)


def make_decoder(folder: Path, name: str, **more: Any) -> Checkpoint:
    """A random model of a row, saved into `folder` and kept as reference. Its spec is read from config.json.

    `more` are fields of its configuration.
    """
    if name in OTHERS:
        return make_checkpoint(folder, OTHERS[name])
    make_first_calls()
    architecture, fields = DECODERS[name]
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**_SIZES | fields | more)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    randomize(model)
    model.save_pretrained(folder)
    return Checkpoint(folder, read_model_spec(json.loads((folder / "config.json").read_bytes())), model)


def randomize(model: nn.Module) -> None:
    """Nothing that a checkpoint stores stays at a constant, which an operation that is left out would be.

    Norms are around 1, as are scales and corrections that are kept as buffers.
    """
    parameters, kept = dict(model.named_parameters()), model.state_dict()
    with torch.no_grad():
        for name, tensor in kept.items():
            if name not in parameters and tensor.is_floating_point() and tensor.dim() > 0:
                tensor.uniform_(0.5, 1.5)
        for name, parameter in parameters.items():
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.2 if parameter.dim() == 1 else 0.15)
