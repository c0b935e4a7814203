"""Shapes of weight files are held against config.json before the weights are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decoders import DECODERS, make_decoder
from quire.frontend.models.model_folder import inspect_model_folder
from quire.frontend.models.weight_shapes import check_shapes
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.errors import ModelError
from quire.ipc.spec.model_spec import rename_stored
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def widen(name: str, axis: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name].repeat_interleave(2, axis)})


HEAD, DOWN, QUERY = "lm_head.weight", "mlp.down_proj.weight", "self_attn.q_proj.weight"
UNREAD = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("mistral", drop(HEAD), [f"must hold the tensor '{HEAD}'"]),
        ("mistral", drop(f"model.layers.1.{DOWN}"), [f"'model.layers.1.{DOWN}'"]),
        ("mistral", widen("model.embed_tokens.weight", 0), ["embed_tokens.weight=[262, 48]", "[131, 48]"]),
        ("mistral", widen(f"model.layers.1.{QUERY}", 1), [f"{QUERY}=[64, 96]", "[64, 48]"]),
        ("gpt-oss", widen(EXPERTS, 0), [f"{EXPERTS}=[16, 48, 160]", "[8, 48, 160]"]),
        ("gpt-oss", widen(EXPERTS, 1), [f"{EXPERTS}=[8, 96, 160]", "[8, 48, 160]"]),
        ("gpt-oss", drop(EXPERTS), ["model.layers.1.mlp.experts.0.gate_proj.weight"]),
        ("gpt2", widen("transformer.h.0.mlp.c_fc.weight", 0), ["h.0.mlp.c_fc.weight=[128, 80]", "[64, 80]"]),
        ("wrapped-gemma3", widen(f"language_model.model.layers.1.{QUERY}", 0), [f"{QUERY}=[128, 48]"]),
    ],
)
def test_what_config_json_does_not_call_for_is_refused_before_a_worker_starts(
    tmp_path: Path, family: str, change: Callable[[Tensors], Any], words: list[str]
) -> None:
    make_decoder(tmp_path, family)
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True)
    args.create_engine_config()
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        args.create_engine_config()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", DECODERS)
def test_every_tensor_that_a_worker_takes_is_looked_at_before_one_starts(tmp_path: Path, name: str) -> None:
    """Norms, biases, sinks and routers too: of each family, each of its tensors a row longer, or left out."""
    make_decoder(tmp_path, name)
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=64)
    spec, shapes = args.create_engine_config().model.spec, dict(inspect_model_folder(tmp_path).shapes)
    check_shapes(spec, shapes, tmp_path)
    for tensor, shape in shapes.items():
        kept = rename_stored(tensor, spec.stored_prefixes)
        if kept.startswith(spec.unused_tensors) or kept.endswith(UNREAD):
            continue
        if spec.tie_word_embeddings and tensor.endswith("lm_head.weight"):
            continue
        longer = ((shape or (1,))[0] + 1, *shape[1:])
        for change in ({tensor: longer}, {}):
            others = {other: shapes[other] for other in shapes if other != tensor}
            with pytest.raises(ModelError):
                check_shapes(spec, others | change, tmp_path)


def test_a_size_that_nobody_could_allocate_is_refused_by_its_first_tensor(tmp_path: Path) -> None:
    make_decoder(tmp_path, "mistral")
    overrides = {"vocab_size": 2**31 - 1, "num_hidden_layers": 10_000}
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, hf_overrides=overrides)
    with pytest.raises(ModelError, match=r"embed_tokens\.weight=\[131, 48\]"):
        args.create_engine_config()
