"""Writes GGUF files for tests: any header, and tiny checkpoints as llama.cpp's converter names them.

Blocks of quantized types are made by no library: random bytes are valid ones.
"""

from __future__ import annotations

import functools
import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from quire.frontend.models.gguf.rope_scaling import make_llama3_divisors
from quire.ipc.spec.gguf_tensor import BLOCKS, GgmlType
from safetensors.torch import load_file

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13}
TYPE_IDS |= {"Q2_K": 10, "Q3_K": 11, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30, "MXFP4": 39}


@dataclass
class GgufWriter:
    """Metadata and tensors (type, shape in torch's order, bytes), in their order."""

    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = field(
        default_factory=dict[str, tuple[str, tuple[int, ...], bytes]]
    )
    alignment: int = 32

    def add(self, name: str, tensor: torch.Tensor, type_: str = "F32") -> None:
        """A tensor of floats."""
        dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        data = tensor.to(dtypes[type_]).contiguous().view(torch.uint8).numpy().tobytes()
        self.tensors[name] = type_, tuple(tensor.shape), data

    def add_blocks(self, name: str, type_: GgmlType, shape: tuple[int, ...], seed: int = 0) -> None:
        """A tensor of random blocks, whose numbers are small."""
        self.tensors[name] = type_, shape, make_blocks(type_, prod(shape), seed)

    def encode(self) -> bytes:
        """The file."""
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.metadata))
        head += b"".join(_text(key) + _value(value) for key, value in self.metadata.items())
        offset, data = 0, list[bytes]()
        for name, (type_, shape, content) in self.tensors.items():
            head += _text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
            head += struct.pack("<IQ", TYPE_IDS[type_], offset)
            data += [content, bytes(-len(content) % self.alignment)]
            offset += len(content) + len(data[-1])
        return b"".join((head, bytes(-len(head) % self.alignment), *data))

    def write(self, file: Path) -> Path:
        """The same into a file."""
        file.write_bytes(self.encode())
        return file


# Where a block's float16 scales are, and how large they may be so that its numbers are those of a weight.
_SCALES: dict[str, dict[int, float]] = {
    "Q8_0": {0: 1e-3},
    "Q4_0": {0: 1e-2},
    "Q4_1": {0: 1e-2, 2: 0.1},
    "Q5_0": {0: 5e-3},
    "Q5_1": {0: 5e-3, 2: 0.1},
    "Q2_K": {80: 4e-3, 82: 4e-3},
    "Q3_K": {108: 1e-3},
    "Q4_K": {0: 3e-4, 2: 2e-3},
    "Q5_K": {0: 2e-4, 2: 2e-3},
    "Q6_K": {208: 5e-5},
    "IQ4_NL": {0: 1e-3},
    "IQ4_XS": {0: 5e-5},
    "MXFP4": {},
}


def make_blocks(type_: GgmlType, count: int, seed: int = 0) -> bytes:
    """Random blocks of `count` numbers, most of them from -0.2 to 0.2."""
    numbers, size_bytes = BLOCKS[type_]
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (count // numbers, size_bytes), generator=generator, dtype=torch.uint8)
    if type_ == "MXFP4":  # a power of two
        blocks[:, 0] = 122 + blocks[:, 0] % 2
    for place, most in _SCALES[type_].items():
        scales = ((torch.rand(len(blocks), generator=generator) * 2 - 1) * most).half()
        blocks[:, place : place + 2] = scales.view(torch.uint8).view(-1, 2)
    return blocks.numpy().tobytes()


def _text(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Ii", 5, value) if value < 0 else struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    kinds = {int: (5, "i"), float: (6, "f")}
    head = struct.pack("<I", 9)
    if value and isinstance(value[0], str):
        return head + struct.pack("<IQ", 8, len(value)) + b"".join(map(_text, value))
    kind, letter = kinds[type(value[0])]
    return head + struct.pack(f"<IQ{len(value)}{letter}", kind, len(value), *value)


_ARCHITECTURES = {
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe": "glm4moe",
    "gpt_neox": "gptneox",
    "hunyuan_v1_moe": "hunyuan-moe",
    "llama4_text": "llama4",
    "olmo3": "olmo2",
    "phi": "phi2",
    "gpt_bigcode": "starcoder",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "cohere": "command-r",
    "hunyuan_v1_dense": "hunyuan-dense",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"mlp.{shared}.{part}_proj": f"ffn_{part}_shexp"
        for shared in ("shared_expert", "shared_experts")
        for part in ("gate", "up", "down")
    },
}
_BARE = {
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
}
_BOTH_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_WITH_OUT_NORMS = ("gemma2", "gemma3_text", "olmo2")
_PERMUTED = ("arcee", "granite", "granitemoe", "llama", "ministral3", "mistral", "mixtral", "olmo", "smollm3")
_DELTA_NET = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
# Model types whose tensors have the names of llama.cpp's own table, and what else their files say.
_BY_TABLE: dict[str, dict[str, str]] = {
    "arcee": {},
    "cohere": {"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"},
    "cohere2": {
        "layer_norm_eps": "attention.layer_norm_epsilon",
        "logit_scale": "logit_scale",
        "sliding_window": "attention.sliding_window",
    },
    "ernie4_5": {},
    "exaone4": {"sliding_window": "attention.sliding_window"},
    "gemma4_text": {
        "final_logit_softcapping": "final_logit_softcapping",
        "sliding_window": "attention.sliding_window",
        "num_kv_shared_layers": "attention.shared_kv_layers",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    },
    "glm4": {},
    "granite": {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    },
    "granitemoe": {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    },
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"intermediate_size": "expert_shared_feed_forward_length"},
    "apertus": {},
    "ernie4_5_moe": {
        "moe_num_shared_experts": "expert_shared_count",
        "moe_layer_start_index": "leading_dense_block_count",
        "moe_layer_interval": "interleave_moe_layer_step",
    },
    "glm4_moe": {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"},
    "gpt2": {"layer_norm_epsilon": "attention.layer_norm_epsilon"},
    "falcon": {"layer_norm_epsilon": "attention.layer_norm_epsilon"},
    "gpt_bigcode": {"layer_norm_epsilon": "attention.layer_norm_epsilon"},
    "jais2": {"layer_norm_eps": "attention.layer_norm_epsilon"},
    "phimoe": {"sliding_window": "attention.sliding_window"},
    "gpt_neox": {
        "layer_norm_eps": "attention.layer_norm_epsilon",
        "use_parallel_residual": "use_parallel_residual",
    },
    "llama4_text": {
        "intermediate_size_mlp": "feed_forward_length",
        "intermediate_size": "expert_feed_forward_length",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
    },
    "mistral4": {},
    "minicpm3": {},
    "nemotron": {"norm_eps": "attention.layer_norm_epsilon"},
    "olmo": {},
    "olmo3": {"sliding_window": "attention.sliding_window"},
    "phi": {"layer_norm_eps": "attention.layer_norm_epsilon"},
    "stablelm": {"layer_norm_eps": "attention.layer_norm_epsilon"},
    "ministral3": {},
    "qwen3_5_moe_text": _DELTA_NET,
    "qwen3_5_text": _DELTA_NET,
    "qwen3_next": _DELTA_NET,
    "seed_oss": {},
    "starcoder2": {"norm_epsilon": "attention.layer_norm_epsilon"},
}
# config.json's names in the place of GPT-2's.
_GPT2 = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_key_value_heads": "n_head"}
_GPT2 |= {"num_hidden_layers": "n_layer", "max_position_embeddings": "n_positions"}
_EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def convert_checkpoint(folder: Path, type_: str = "F32", is_old: bool = False) -> GgufWriter:
    """A folder of transformers' as llama.cpp's converter writes it; `type_` is that of its matrices.

    `is_old`: as it wrote latent attention at first, keys and values of heads in one tensor.
    """
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] in ("gpt2", "gpt_bigcode"):
        config |= {name: config[theirs] for name, theirs in _GPT2.items()}
    if config["model_type"] == "falcon":
        config |= {"intermediate_size": config["ffn_hidden_size"]}
        config["num_key_value_heads"] = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
    elif config.get("multi_query"):
        config["num_key_value_heads"] = 1
    weights = {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}
    writer = GgufWriter(_make_metadata(config))
    experts: dict[str, dict[int, torch.Tensor]] = {}
    if "kv_lora_rank" in config:
        add_latent_keys(writer, config, is_old)
    if "kv_lora_rank" in config and not is_old:
        weights = _split_heads(weights, config)
    if "linear_num_key_heads" in config:
        weights = _convert_delta_nets(weights, config)
    for name, tensor in _split_stacks(weights, config["model_type"]).items():
        if ".act_fn." in name:  # xIELU's numbers, a list of all layers'
            writer.metadata.setdefault(f"xielu.{name.rpartition('.')[2]}", []).append(tensor.item())
        elif match := re.fullmatch(r"model\.layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight", name):
            stacked = f"blk.{match[1]}.ffn_{_EXPERTS[match[3]]}_exps.weight"
            experts.setdefault(stacked, {})[int(match[2])] = tensor
        elif name != "lm_head.weight" or not config["tie_word_embeddings"]:
            renamed, tensor = _convert(name, tensor, config)
            is_matrix = tensor.ndim > 1 and "inp" not in renamed and not renamed.endswith(".bias")
            writer.add(renamed, tensor, type_ if is_matrix else "F32")
    for name, parts in experts.items():
        writer.add(name, torch.stack([parts[index] for index in sorted(parts)]), type_)
    if config["model_type"] == "gemma4_text":
        half, turning = config["per_layer_config"]["1"]["head_dim"] // 2, 4
        writer.add("rope_freqs.weight", torch.tensor([1.0] * turning + [1e30] * (half - turning)))
    if (rope := _find_rope(config)).get("rope_type") == "llama3":
        theta, factor, high = (rope[key] for key in ("rope_theta", "factor", "high_freq_factor"))
        writer.add("rope_freqs.weight", torch.tensor(make_llama3_divisors(factor, theta, 16, high)))
    for length in ("long", "short"):
        if factors := (config.get("rope_parameters") or {}).get(f"{length}_factor"):
            writer.add(f"rope_factors_{length}.weight", torch.tensor(factors))
    return writer


def _find_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    return rope.get("full_attention", rope)


def add_latent_keys(writer: GgufWriter, config: Mapping[str, Any], is_old: bool) -> None:
    """What says how the latent attention of a DeepSeek is built."""
    rope = config["rope_parameters"]
    rope_size, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    sizes = config["qk_nope_head_dim"] + rope_size, config["v_head_dim"]
    keys: dict[str, Any] = {
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rope_size,
    }
    if config["model_type"] != "minicpm3":
        keys |= _make_expert_keys(config, rope)
    if config["model_type"] == "mistral4":
        keys["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if config["q_lora_rank"] is not None:
        keys["attention.q_lora_rank"] = config["q_lora_rank"]
    both = ("attention.key_length", "attention.value_length")
    if is_old:
        keys |= zip(both, sizes, strict=True)
    else:
        keys |= zip(both, (rank + rope_size, rank), strict=True)
        keys |= {f"{name}_mla": size for name, size in zip(both, sizes, strict=True)}
        keys["attention.head_count_kv"] = 1
    name = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer.metadata |= {f"{name}.{key}": value for key, value in keys.items()}


def _make_expert_keys(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Of the experts and the scaled rope of models with latent attention."""
    keys: dict[str, Any] = {
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
    }
    if config["model_type"] != "deepseek_v2":
        keys["expert_weights_norm"] = config["norm_topk_prob"]
    if config["model_type"] == "deepseek_v3":
        keys["expert_gating_func"] = 2
    return keys


def _split_heads(weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Keys and values of a latent's heads apart, keys turned, as they are absorbed."""
    split: dict[str, torch.Tensor] = {}
    sizes = config["qk_nope_head_dim"], config["v_head_dim"]
    for name, tensor in weights.items():
        if not name.endswith("kv_b_proj.weight"):
            split[name] = tensor
            continue
        layer = name.split(".")[2]
        keys, values = tensor.view(-1, sum(sizes), tensor.shape[1]).split(sizes, 1)
        split[f"blk.{layer}.attn_k_b.weight"] = keys.transpose(1, 2).contiguous()
        split[f"blk.{layer}.attn_v_b.weight"] = values.contiguous()
    return split


def _convert_delta_nets(
    weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Of the gated delta rule. Value heads that share a head of keys lie apart, but for Qwen3-Next's."""
    kind, num_keys = config["model_type"], config["linear_num_key_heads"]
    group, size = config["linear_num_value_heads"] // num_keys, config["linear_value_head_dim"]
    keys_size = num_keys * config["linear_key_head_dim"]

    def tile(tensor: torch.Tensor, size: int, first: int = 0) -> torch.Tensor:
        """Rows from `first` on, so many a head."""
        if kind == "qwen3_next":
            return tensor
        heads = tensor[first:].unflatten(0, (num_keys, group, size)).transpose(0, 1).flatten(0, 2)
        return torch.cat([tensor[:first], heads])

    converted: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor + 1
        prefix, _, part = name.partition(".linear_attn.")
        place = f"blk.{prefix.rpartition('.')[2]}."
        if part == "in_proj_qkvz.weight":
            sizes = (keys_size // num_keys, keys_size // num_keys, group * size, group * size)
            *qkv, z = tensor.unflatten(0, (num_keys, -1)).split(sizes, 1)
            converted[f"{place}attn_qkv.weight"] = torch.cat([each.flatten(0, 1) for each in qkv])
            converted[f"{place}attn_gate.weight"] = z.flatten(0, 1).contiguous()
        elif part in ("in_proj_qkv.weight", "conv1d.weight"):
            stored = "attn_qkv" if part.startswith("in_proj") else "ssm_conv1d"
            converted[f"{place}{stored}.weight"] = tile(tensor.squeeze(1), size, 2 * keys_size)
        elif part in ("A_log", "dt_bias"):
            stored = "ssm_a" if part == "A_log" else "ssm_dt.bias"
            converted[place + stored] = tile(-tensor.exp() if part == "A_log" else tensor, 1)
        elif part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight"):
            converted[name] = tile(tensor, size if part == "in_proj_z.weight" else 1)
        elif part == "out_proj.weight":
            converted[name] = tile(tensor.t(), size).t().contiguous()
        else:
            converted[name] = tensor
    return converted


def _split_stacks(weights: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Gate, up and down of each of gpt-oss' experts, whose biases keep their stacks; others stay fused."""
    split: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        granite, _, which = name.partition(".block_sparse_moe.")
        if which in ("input_linear.weight", "output_linear.weight"):
            kinds = ("gate", "up") if which.startswith("input") else ("down",)
            for expert, weight in enumerate(tensor):
                for which, each in zip(kinds, weight.chunk(len(kinds)), strict=True):
                    split[f"{granite}.mlp.experts.{expert}.{which}_proj.weight"] = each.contiguous()
            continue
        prefix, _, part = name.rpartition(".experts.")
        if name.endswith("layer_scalar"):
            split[f"{name}.weight"] = tensor
            continue
        is_fused = kind in ("gemma4_text", "mistral4", "llama4_text")
        if is_fused and part.startswith(("gate_up_proj", "down_proj")):
            tensor = tensor.transpose(1, 2).contiguous() if kind == "llama4_text" else tensor
            split[f"blk.{prefix.split('.')[2]}.ffn_{part.removesuffix('_proj')}_exps.weight"] = tensor
            continue
        if not part.startswith(("gate_up_proj", "down_proj")):
            split[name] = tensor
            continue
        is_bias, layer = part.endswith("_bias"), prefix.removesuffix(".mlp").split(".")[-1]
        rows = tensor if is_bias else tensor.transpose(1, 2)
        parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if part.startswith("gate_up") else {"down": rows}
        for which, each in parts.items():
            if is_bias:
                split[f"blk.{layer}.ffn_{which}_exps.bias"] = each.contiguous()
                continue
            for expert, weight in enumerate(each):
                split[f"{prefix}.experts.{expert}.{which}_proj.weight"] = weight.contiguous()
    return split


# As in files of llama.cpp's mixed types: each is in every layer, beside others.
MIXED: dict[str, GgmlType] = {
    "token_embd": "Q6_K",
    "output.": "Q5_0",
    "attn_q.": "Q4_K",
    "attn_qkv": "Q4_K",
    "attn_k.": "Q4_K",
    "attn_v.": "Q6_K",
    "attn_output": "Q5_K",
    "ffn_gate": "Q4_0",
    "ffn_up": "Q4_1",
    "ffn_down": "Q8_0",
}


def fill_with_blocks(writer: GgufWriter) -> GgufWriter:
    """Random blocks of mixed types in the place of its matrices, whose widths 256 divides."""
    for seed, (name, (_, shape, _)) in enumerate(list(writer.tensors.items())):
        type_ = next((type_ for part, type_ in MIXED.items() if part in name), None)
        if type_ is not None and len(shape) > 1 and "inp" not in name:
            writer.add_blocks(name, type_, shape, seed)
    return writer


def add_vocabulary(writer: GgufWriter, folder: Path) -> GgufWriter:
    """That of a folder's tokenizer.json, which is byte-level BPE, and its chat template."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    size = next(shape[0] for name, (_, shape, _) in writer.tensors.items() if name == "token_embd.weight")
    tokens, types = [f"[PAD{index}]" for index in range(size)], [5] * size
    for token, index in tokenizer["model"]["vocab"].items():
        tokens[index], types[index] = token, 1
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], 3 if added["special"] else 4
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    eos = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
    writer.metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokens.index(eos),
        "tokenizer.ggml.add_bos_token": False,
    }
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.metadata["tokenizer.chat_template"] = template.read_text()
    return writer


def _convert(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> tuple[str, torch.Tensor]:
    kind = config["model_type"]
    has_one = (kind.startswith("gemma") and kind != "gemma4_text") or kind == "nemotron"
    if has_one and name.endswith("norm.weight"):
        tensor = tensor + 1
    if kind == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        tensor = tensor.t().contiguous()
    if kind in ("falcon", "gpt_neox") and "query_key_value" in name:  # all queries, then all keys
        num_heads = config["num_attention_heads"]
        num_kv_heads = config.get("num_key_value_heads", num_heads)
        groups = tensor.view(num_kv_heads, num_heads // num_kv_heads + 2, -1, *tensor.shape[1:])
        parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
        tensor = torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])
    if name.startswith("blk."):
        return name, tensor
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    part, suffix = name.rsplit(".", 1)
    if kind == "gemma4_text" and suffix.endswith("scale"):
        stored = "ffn_gate_inp" if suffix == "scale" else "ffn_down_exps"
        return f"blk.{name.split('.')[2]}.{stored}.scale", tensor
    if part in whole:
        return f"{whole[part]}.{suffix}", tensor
    if kind in _BY_TABLE:
        if name.endswith("correction_bias"):  # the converters' own name of it
            name = name.removesuffix("_bias") + ".bias"
        renamed = _find_table(kind).get_name(name, (".weight", ".bias"))
        assert renamed is not None, name
        return renamed, _permute(part.split(".", 3)[-1], tensor, config)
    _, _, layer, part = part.split(".", 3)
    bare = name.split(".", 3)[3]
    if bare in _BARE:
        return f"blk.{layer}.{_BARE[bare]}", tensor
    if kind == "gpt_oss" and part == "post_attention_layernorm":
        return f"blk.{layer}.post_attention_norm.{suffix}", tensor
    parts = _PARTS | _BOTH_NORMS if kind in _WITH_OUT_NORMS else _PARTS
    return f"blk.{layer}.{parts[part]}.{suffix}", _permute(part, tensor, config)


def _permute(part: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Queries and keys, as convert_hf_to_gguf.py does of some models."""
    heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
    if part not in heads or config["model_type"] not in _PERMUTED:
        return tensor
    shape = (config[heads[part]], 2, -1, *tensor.shape[1:])
    return tensor.view(shape).swapaxes(1, 2).reshape(tensor.shape)


@functools.cache
def _find_table(kind: str) -> Any:
    import gguf

    name = _ARCHITECTURES.get(kind, kind)
    numbers = {each: number for number, each in gguf.constants.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(numbers[name], 8)


def _make_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config["model_type"]
    architecture = _ARCHITECTURES.get(kind, kind)
    rope = _find_rope(config)
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "rope.dimension_count": head_size,
        "rope.freq_base": rope.get("rope_theta", 10000.0),
        "vocab_size": config["vocab_size"],
    }
    keys |= {key: config[name] for name, key in _BY_TABLE.get(kind, {}).items()}
    if kind in ("exaone4", "olmo3") and config["sliding_window"] is not None:
        pattern = [int(each == "sliding_attention") for each in config["layer_types"]]
        keys["attention.sliding_window_pattern"] = pattern
    keys["rope.dimension_count"] = int(rope.get("partial_rotary_factor", 1.0) * head_size)
    if kind in ("olmo", "stablelm"):
        keys["attention.layer_norm_epsilon"] = config.get("layer_norm_eps", 1e-5)
    if kind == "hunyuan_v1_dense":  # the file has the base that alpha makes
        keys["rope.freq_base"] *= rope["alpha"] ** (head_size / (head_size - 2))
    if kind in ("ministral3", "arcee", "olmo3"):
        keys["rope.scaling.type"], keys["rope.scaling.factor"] = "yarn", rope["factor"]
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if kind == "ministral3":
        keys["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        keys["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    used = ("num_experts_per_tok", "moe_k", "moe_topk")
    if (per_token := next((config[name] for name in used if name in config), None)) is not None:
        names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        keys["expert_count"] = next(config[name] for name in names if name in config)
        keys["expert_used_count"] = per_token
    if "linear_num_key_heads" in config:
        keys["ssm.inner_size"] = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        keys["full_attention_interval"] = config["layer_types"].index("full_attention") + 1
        keys["rope.dimension_sections"] = [2, 1, 1, 0]
    if kind in ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next"):
        keys["expert_feed_forward_length"] = config["moe_intermediate_size"]
        keys["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if kind in ("hunyuan_v1_moe", "ernie4_5_moe"):
        width = config.get("moe_intermediate_size", config["intermediate_size"])
        keys["expert_feed_forward_length"] = width
    if kind == "hunyuan_v1_moe":
        keys["expert_shared_count"] = 1
    if kind in ("dots1", "glm4_moe"):
        keys |= {
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_gating_func": 2,
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "leading_dense_block_count": config["first_k_dense_replace"],
        }
    if kind == "minimax_m2":
        keys["expert_feed_forward_length"], keys["expert_gating_func"] = config["intermediate_size"], 2
    if kind == "gpt_oss":
        keys["expert_feed_forward_length"] = config["intermediate_size"]
        keys["attention.sliding_window"] = config["sliding_window"]
        keys["rope.scaling.type"], keys["rope.scaling.factor"] = "yarn", rope["factor"]
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if kind == "qwen3_moe":
        keys["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if kind == "phi3":
        keys["attention.sliding_window"] = config["sliding_window"] or 0
    if kind in ("phi3", "phimoe") and "original_max_position_embeddings" in config:
        original = keys["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
        if "long_factor" in rope:
            factor = config["max_position_embeddings"] / original
            keys["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(factor) / math.log(original))
    if kind == "mistral":
        keys["attention.sliding_window"] = config["sliding_window"]
    if kind == "gemma3_text":
        keys["attention.sliding_window"] = config["sliding_window"]
        keys["attention.sliding_window_pattern"] = config["layer_types"].index("full_attention") + 1
        keys["rope.freq_base_swa"] = config["rope_parameters"]["sliding_attention"]["rope_theta"]
    if kind == "gemma4_text":
        slides, first = (
            [each == "sliding_attention" for each in config["layer_types"]],
            config["num_kv_shared_layers"],
        )
        of_full = config["per_layer_config"]["1"]
        kv_heads = (
            config["num_key_value_heads"],
            of_full.get("num_key_value_heads", config["num_key_value_heads"]),
        )
        width, num_layers = config["intermediate_size"], len(slides)
        first = num_layers - first if config["use_double_wide_mlp"] else num_layers
        keys |= {
            "attention.key_length": of_full["head_dim"],
            "attention.value_length": of_full["head_dim"],
            "rope.dimension_count": of_full["head_dim"],
            **{f"{key}_swa": head_size for key in ("attention.key_length", "attention.value_length")},
            "rope.dimension_count_swa": head_size,
            "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
            "attention.sliding_window_pattern": [int(each) for each in slides],
            "attention.head_count_kv": [kv_heads[not each] for each in slides],
            "feed_forward_length": [width if layer < first else 2 * width for layer in range(num_layers)],
        }
        if config["enable_moe_block"]:
            keys["expert_count"], keys["expert_used_count"] = config["num_experts"], config["top_k_experts"]
            keys["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if kind == "gemma2":
        keys |= {name: config[name] for name in ("attn_logit_softcapping", "final_logit_softcapping")}
        keys["attention.sliding_window"] = config["sliding_window"]
    values = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": architecture, "general.name": "tiny", **values}
