"""What weights take is known before they are read; a model that cannot fit is refused with the numbers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from checkpoints import RECIPES, make_checkpoint, make_spec
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.errors import ConfigError
from quire.ipc.spec.linear_shapes import count_model_bytes, count_weight_bytes
from quire.ipc.spec.weight_format import WeightFormat, WeightFormats, make_online_formats
from quire.kernels.choice import choose_linear
from quire.worker import kv_cache
from quire.worker.kv_cache import check_weights_fit
from quire.worker.models import load_model
from row_driver import toy_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3-moe"])
def test_plain_weights_are_counted_as_they_are_stored(name: str, tmp_path: Any) -> None:
    checkpoint = make_checkpoint(tmp_path, RECIPES[name])
    config = checkpoint.engine_config("bfloat16")
    spec = config.model.spec
    matrices = {
        key: tensor.numel() for key, tensor in checkpoint.reference.state_dict().items() if tensor.dim() >= 2
    }
    routers = sum(count for key, count in matrices.items() if key.endswith("mlp.gate.weight"))
    tied = spec.vocab_size * spec.hidden_size if spec.tie_word_embeddings else 0
    counted = count_weight_bytes(spec, WeightFormats(), "bfloat16")
    assert counted == 2 * (sum(matrices.values()) - routers - tied)
    assert counted <= load_model(config, CPU).weight_bytes


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("model", ["pocket", "pocket-encoder"])
def test_what_is_told_of_a_model_is_what_its_engine_holds(model: str, quantization: Any) -> None:
    """But for norms and biases; the head of the one is tied, the other has tables of positions."""
    config = EngineArgs(model=model, quantization=quantization).create_engine_config()
    counted = count_model_bytes(config.model, packs_table=_packs_table())
    assert 0.99 < counted / load_model(config, CPU).weight_bytes <= 1.0


def test_the_angles_of_growing_texts_are_counted_by_length(tmp_path: Any) -> None:
    checkpoint = make_checkpoint(tmp_path, RECIPES["llama"])
    config = checkpoint.engine_config("bfloat16").model
    trained = config.spec.max_position_embeddings
    rope = msgspec.structs.replace(config.spec.rope, type="dynamic", factor=2.0)
    spec = msgspec.structs.replace(config.spec, rope=rope)
    sizes = [
        count_model_bytes(msgspec.structs.replace(config, spec=spec, max_model_len=trained + more))
        for more in (0, 10)
    ]
    assert sizes[1] - sizes[0] == 10 * 4 * spec.layers[0].attention.head_size // 2


def test_formats_and_ranks_change_what_is_counted() -> None:
    spec = make_spec(RECIPES["llama"])
    plain = count_weight_bytes(spec, WeightFormats(), "bfloat16")
    int8 = count_weight_bytes(spec, make_online_formats("int8", "none"), "bfloat16")
    tables = 2 * 2 * spec.vocab_size * spec.hidden_size
    scales = 4 * sum(
        layer.attention.qkv_size + 2 * spec.hidden_size + 2 * layer.ffn.intermediate_size
        for layer in spec.layers
    )
    assert int8 == tables + (plain - tables) // 2 + scales
    own = WeightFormats(exceptions={"model.layers.0.self_attn.o_proj": WeightFormat(bits=8)})
    attention = spec.layers[0].attention
    assert plain - count_weight_bytes(spec, own, "bfloat16") == spec.hidden_size * (attention.query_size - 4)
    half = count_weight_bytes(spec.for_rank(2), WeightFormats(), "bfloat16", num_ranks=2)
    assert half == pytest.approx(plain / 2, rel=0.1)


def test_layers_that_are_multiplied_together_take_the_widest_form() -> None:
    spec = make_spec(RECIPES["qwen3"])
    four, eight = WeightFormat(bits=4, group_size=16, layout="gptq/4"), WeightFormat(bits=8, layout="gptq/8")
    alone = count_weight_bytes(spec, WeightFormats(default=four), "bfloat16")
    mixed = WeightFormats(default=four, exceptions={"model.layers.1.self_attn.v_proj": eight})
    attention, groups = spec.layers[1].attention, spec.hidden_size // 16
    a_row = spec.hidden_size // 2 + 4 * groups  # more: a byte a number, and offsets
    assert count_weight_bytes(spec, mixed, "bfloat16") - alone == attention.qkv_size * a_row


def test_a_tied_table_that_is_stored_narrow_is_counted_twice() -> None:
    """As numbers, which are looked up, and as the head."""
    spec, name = make_spec(RECIPES["qwen2"]), "model.embed_tokens"
    q6_k = WeightFormat(bits=8, group_size=16, layout="gguf")
    own = count_weight_bytes(spec, WeightFormats(exceptions={name: q6_k}), "bfloat16")
    plain = count_weight_bytes(spec, WeightFormats(), "bfloat16")
    assert own - plain == q6_k.count_bytes(spec.vocab_size, spec.hidden_size)


def test_a_stage_counts_the_formats_of_its_own_layers() -> None:
    spec = make_spec(RECIPES["llama"])
    wide = {f"model.layers.1.mlp.{part}_proj": WeightFormat(bits=8) for part in ("gate", "up", "down")}
    formats = WeightFormats(exceptions=dict[str, WeightFormat | None](wide))
    plain, narrow = (
        [count_weight_bytes(spec.for_stage(stage, 2), each, "bfloat16") for stage in (0, 1)]
        for each in (WeightFormats(), formats)
    )
    assert plain[0] == narrow[0]
    assert plain[1] > narrow[1]


def test_weights_that_cannot_fit_are_refused_with_what_int4_would_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = toy_config()
    needed = count_model_bytes(config.model, packs_table=_packs_table())
    monkeypatch.setattr(kv_cache, "_free_bytes", lambda _device: needed)
    check_weights_fit(config, CPU)
    monkeypatch.setattr(kv_cache, "_free_bytes", lambda _device: needed // 2)
    with pytest.raises(ConfigError, match=rf"take {needed} bytes, {needed // 2} are free; with .*'int4' \d+"):
        check_weights_fit(config, CPU)


def _packs_table() -> bool:
    return choose_linear(torch.float32, CPU, None, is_strict=False) == "native"
