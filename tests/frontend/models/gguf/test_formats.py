"""Which linear layers of a GGUF model are narrow, and how."""

from __future__ import annotations

from typing import Any

from quire.frontend.models.gguf.tensors import make_formats
from quire.ipc.spec.gguf_tensor import GgufTensor, describe_types, find_main_type
from quire.ipc.spec.model_spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec
from quire.ipc.spec.weight_format import WeightFormat, WeightFormats

Q4_0 = WeightFormat(bits=4, group_size=32, layout="gguf")
Q6_K = WeightFormat(bits=8, group_size=16, layout="gguf")


def make_spec(tied: bool = False) -> ModelSpec:
    layer = LayerSpec(
        attention=AttentionSpec(num_heads=2, num_kv_heads=1, head_size=16),
        ffn=DenseSpec(intermediate_size=32),
    )
    return ModelSpec(
        architecture="x", vocab_size=64, hidden_size=32, layers=(layer,), tie_word_embeddings=tied
    )


def make(types: dict[str, Any], tied: bool = False) -> WeightFormats:
    tensors = [
        GgufTensor(f"{name}.weight", type_, (4, 32, 32) if "{}" in name else (32, 32), 0, 0)
        for name, type_ in types.items()
    ]
    return make_formats(tensors, make_spec(tied))


def test_the_most_common_format_is_the_default():
    formats = make({"a.0.down": "Q4_0", "a.1.down": "Q4_0", "a.2.down": "Q6_K", "a.3.down": "F16"})
    assert formats == WeightFormats(default=Q4_0, exceptions={"a.2.down": Q6_K, "a.3.down": None})


def test_the_same_projection_of_all_experts_has_a_format_each():
    formats = make({"x.experts.{}.down_proj": "Q6_K", "y.o_proj": "Q4_0"})
    assert formats.default == Q6_K
    assert formats.find("x.experts.3.down_proj") == Q6_K
    assert formats.find("y.o_proj") == Q4_0


def test_what_is_multiplied_together_is_plain_if_a_part_of_it_is():
    names = [f"l.self_attn.{part}_proj" for part in "qkv"] + ["l.mlp.gate_proj", "l.mlp.up_proj"]
    formats = make(dict(zip(names, ["Q4_0", "BF16", "Q4_0", "Q4_0", "Q4_0"], strict=True)))
    assert [formats.find(name) for name in names] == [None, None, None, Q4_0, Q4_0]


def test_a_table_has_a_format_only_where_it_is_tied():
    types = {"model.embed_tokens": "Q6_K", "a.down": "Q4_0", "b.down": "Q4_0"}
    assert make(types).exceptions == {}
    assert make(types, tied=True).exceptions == {"model.embed_tokens": Q6_K}


def test_people_see_the_type_that_most_bytes_have():
    tensors = [GgufTensor(name, "Q4_0", (32, 32), 0, 0) for name in "ab"]
    assert find_main_type([*tensors, GgufTensor("c", "F32", (64,), 0, 0)]) == "Q4_0"
    assert find_main_type([*tensors, GgufTensor("c", "Q8_0", (32, 64), 0, 0)]) == "Q8_0"


def test_people_see_the_types_of_the_matrices_shortly():
    tensors = [GgufTensor("a", "F32", (4096,), 0, 0), GgufTensor("b", "Q4_0", (32, 32), 0, 0)]
    assert describe_types(tensors) == "Q4_0"
    tensors.append(GgufTensor("c", "Q8_0", (32, 32), 0, 0))
    assert describe_types(tensors) == "Q8_0 and Q4_0"
    tensors.append(GgufTensor("d", "F16", (1, 32), 0, 0))
    assert describe_types(tensors) == "Q8_0, Q4_0 and other"
    assert describe_types(tensors[:1]) == "F32"


def test_a_file_of_floats_has_no_formats_so_it_may_be_quantized():
    for tied in (False, True):
        assert make({"model.embed_tokens": "F16", "a.down": "F16", "b.norm": "F32"}, tied) == WeightFormats()
