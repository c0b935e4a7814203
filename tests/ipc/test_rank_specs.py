"""What a rank of a tensor parallel group computes: its spec, and which sizes a model can be cut into."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from quire.ipc.model_spec import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, ModelSpec

ATTENTION = AttentionSpec(num_heads=8, num_kv_heads=2, head_size=16)


def make_spec(attention: AttentionSpec = ATTENTION, ffn: DenseSpec | ExpertsSpec | None = None) -> ModelSpec:
    dense = LayerSpec(attention=attention, ffn=DenseSpec(intermediate_size=96))
    layers = (dense, replace(dense, ffn=ffn or dense.ffn))
    return ModelSpec(architecture="any", vocab_size=131, hidden_size=48, layers=layers)


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        (make_spec(), [1, 2, 4, 8]),
        (make_spec(replace(ATTENTION, num_heads=12, num_kv_heads=12)), [1, 2, 3, 4, 6, 12]),
        (make_spec(replace(ATTENTION, num_heads=12, num_kv_heads=3)), [1, 3, 6, 12]),
        (make_spec(replace(ATTENTION, num_heads=7, num_kv_heads=1)), [1]),
        (make_spec(ffn=DenseSpec(intermediate_size=100)), [1, 2, 4]),
        (make_spec(ffn=ExpertsSpec(num_experts=3, num_experts_per_tok=2, intermediate_size=10)), [1, 2]),
    ],
    ids=["grouped", "all heads", "three of keys", "seven heads", "a width", "experts"],
)
def test_sizes_are_those_that_divide_every_layer(spec: ModelSpec, sizes: list[int]) -> None:
    assert spec.find_tensor_parallel_sizes() == sizes


@pytest.mark.parametrize(("size", "num_kv_heads"), [(1, 2), (2, 1), (4, 1), (8, 1)])
def test_a_rank_has_its_share_of_heads_and_widths_and_at_least_one_head_of_keys(
    size: int, num_kv_heads: int
) -> None:
    experts = ExpertsSpec(num_experts=3, num_experts_per_tok=2, intermediate_size=160)
    whole = make_spec(ffn=experts)
    part = whole.for_rank(size)
    attention = part.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads) == (8 // size, num_kv_heads)
    assert [layer.ffn.intermediate_size for layer in part.layers] == [96 // size, 160 // size]
    assert part.layers[1].ffn == replace(experts, intermediate_size=160 // size)
    assert part.kv_bytes_per_token("float32") == whole.kv_bytes_per_token("float32") * num_kv_heads // 2
    assert (part.vocab_size, part.hidden_size) == (131, 48)
