"""What a stage of a pipeline computes: which layers, and which names of tensors it leaves to the others."""

from __future__ import annotations

import pytest
from fakes import make_config
from msgspec.structs import replace
from quire.ipc.spec.config import ParallelConfig
from quire.ipc.spec.model_spec import (
    AttentionSpec,
    DenseSpec,
    EmbeddingSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    PoolingSpec,
    ProjectionSpec,
    StageSpec,
    find_stages,
)

LAYER = LayerSpec(
    attention=AttentionSpec(num_heads=8, num_kv_heads=2, head_size=16),
    ffn=DenseSpec(intermediate_size=96),
)
EXPERTS = ExpertsSpec(num_experts=64, num_experts_per_tok=8, intermediate_size=96)
DEAR = replace(LAYER, ffn=EXPERTS)  # a token is multiplied with as much as in 4 of the others


def make_spec(*layers: LayerSpec, vocab_size: int = 8) -> ModelSpec:
    return ModelSpec(architecture="any", vocab_size=vocab_size, hidden_size=48, layers=layers)


@pytest.mark.parametrize(
    ("spec", "num_stages", "stages"),
    [
        (make_spec(*[LAYER] * 4), 1, [(0, 4)]),
        (make_spec(*[LAYER] * 4), 2, [(0, 2), (2, 4)]),
        (make_spec(*[LAYER] * 4), 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (make_spec(*[LAYER] * 5), 2, [(0, 3), (3, 5)]),
        (make_spec(*[LAYER] * 6, vocab_size=1000), 2, [(0, 4), (4, 6)]),  # logits cost as much as 2 layers
        (make_spec(DEAR, *[LAYER] * 4), 2, [(0, 1), (1, 5)]),
        (make_spec(*[LAYER] * 3, DEAR), 3, [(0, 2), (2, 3), (3, 4)]),
    ],
    ids=["one", "two", "a layer each", "uneven", "logits", "dear first", "dear last"],
)
def test_layers_are_dealt_out_so_that_the_longest_stage_is_short(
    spec: ModelSpec, num_stages: int, stages: list[tuple[int, int]]
) -> None:
    assert find_stages(spec, num_stages) == stages


def test_a_stage_has_its_layers_and_the_last_one_the_head() -> None:
    pooling = PoolingSpec(projections=(ProjectionSpec(name="score", in_size=48, out_size=1),))
    names = EmbeddingSpec(positions="model.places", norm="model.first_norm")
    spec = replace(make_spec(*[LAYER] * 3, DEAR), pooling=pooling, embedding=names)
    first, last = spec.for_stage(0, 2), spec.for_stage(1, 2)
    assert (first.layers, last.layers) == (spec.layers[:3], spec.layers[3:])
    assert (first.has_logits, first.pooling) == (False, None)
    assert (last.has_logits, last.pooling) == (True, pooling)
    assert first.stage == StageSpec(is_last=False)
    assert last.stage == StageSpec(first_layer=3, is_first=False)
    assert set(first.unused_tensors) >= {"model.layers.3.", "layers.3.", "model.norm.", "lm_head.", "score."}
    assert set(last.unused_tensors) >= {"model.layers.0.", "model.embed_tokens.", "places.", "first_norm."}
    assert not {"model.layers.3.", "model.norm.", "lm_head.", "score."} & set(last.unused_tensors)
    kv_bytes = [one.kv_bytes_per_token("float32") for one in (spec, first, last)]
    assert kv_bytes[0] == kv_bytes[1] + kv_bytes[2]


def test_a_stages_ranks_have_their_shares_of_its_layers() -> None:
    config = make_config()
    spec = make_spec(*[LAYER] * 4)
    parallel = ParallelConfig(pipeline_parallel_size=2, tensor_parallel_size=2)
    config = replace(config, model=replace(config.model, spec=spec), parallel=parallel)
    assert config.parallel.num_ranks == 4
    assert config.scheduler.max_steps_in_flight == 3
    part = config.for_stage(1).for_rank()
    assert part.parallel.num_ranks == 1
    assert [layer.attention.num_heads for layer in part.model.spec.layers] == [4, 4]
    assert part.model.spec.stage.first_layer == 2
