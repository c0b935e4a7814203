"""What a rank of a tensor parallel group computes: its spec, and which sizes a model can be cut into."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from quire.ipc.spec.model_spec import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, ModelSpec

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
        (make_spec(replace(ATTENTION, num_heads=6, num_kv_heads=3)), [1, 2, 3, 6]),
        (make_spec(replace(ATTENTION, num_heads=6, num_kv_heads=3, qk_norm="all_heads")), [1, 3, 6]),
        (make_spec(replace(ATTENTION, num_heads=7, num_kv_heads=1)), [1]),
        (make_spec(ffn=DenseSpec(intermediate_size=100)), [1, 2, 4]),
        (make_spec(ffn=ExpertsSpec(num_experts=3, num_experts_per_tok=2, intermediate_size=10)), [1, 2]),
    ],
    ids=["grouped", "all heads", "three of keys", "normed together", "seven heads", "a width", "experts"],
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


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "heads"),
    [
        (8, 4, 2, [[0, 1], [2, 3]]),
        (8, 2, 4, [[0], [0], [1], [1]]),
        (6, 3, 2, [[0, 0, 1], [1, 2, 2]]),
        (12, 2, 3, [[0, 0], [0, 1], [1, 1]]),
    ],
)
def test_each_head_of_keys_is_where_its_queries_are(
    num_heads: int, num_kv_heads: int, size: int, heads: list[list[int]]
) -> None:
    spec = replace(ATTENTION, num_heads=num_heads, num_kv_heads=num_kv_heads)
    assert [spec.find_rank_heads(rank, size) for rank in range(size)] == heads
    part = spec.for_rank(size)
    assert part.num_kv_heads == len(heads[0])
    each = part.num_heads // part.num_kv_heads  # queries' heads of one of keys
    found = [head for rank in heads for head in rank for _ in range(each)]
    assert found == [head // (num_heads // num_kv_heads) for head in range(num_heads)]
