"""A field of the spec that the worker does not compute is refused by its name, never left out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from checkpoints import Recipe, make_spec
from quire.ipc.errors import ModelError
from quire.ipc.spec.model_spec import (
    AttentionSpec,
    DenseSpec,
    EmbeddingSpec,
    LayerSpec,
    ModelSpec,
    RopeConfig,
    StageSpec,
)
from quire.ipc.spec.recurrent_spec import ShortConvSpec
from quire.ipc.spec.weight_format import WeightFormat, WeightFormats
from quire.worker.models import coverage

SPEC = msgspec.structs.replace(make_spec(Recipe()), max_position_embeddings=2048)
OTHER_VALUES: dict[type, Any] = {
    int: 7,
    float: 7.0,
    str: "another",
    type(None): 7,
    tuple: ("another",),
    EmbeddingSpec: EmbeddingSpec(norm="another"),
    StageSpec: StageSpec(first_layer=1),
    WeightFormats: WeightFormats(default=WeightFormat()),
}
FIELDS = [
    (struct, field.name)
    for struct in (ModelSpec, LayerSpec, AttentionSpec, DenseSpec)
    for field in msgspec.structs.fields(struct)
    if field.default is not msgspec.NODEFAULT and field.name not in ("rope", "attention", "ffn")
]


def change(struct: type[msgspec.Struct], name: str) -> ModelSpec:
    """The spec with another value of one field, of its second layer where it is a layer's."""
    layer = SPEC.layers[1]
    part = {ModelSpec: SPEC, LayerSpec: layer, AttentionSpec: layer.attention, DenseSpec: layer.ffn}[struct]
    value = getattr(part, name)
    other = not value if isinstance(value, bool) else OTHER_VALUES[type(value)]
    changed = msgspec.structs.replace(part, **{name: other})
    if isinstance(changed, ModelSpec):
        return changed
    if struct is not LayerSpec:
        field = "attention" if struct is AttentionSpec else "ffn"
        changed = msgspec.structs.replace(layer, **{field: changed})
    return msgspec.structs.replace(SPEC, layers=(SPEC.layers[0], changed))


@pytest.mark.parametrize(("struct", "name"), FIELDS)
def test_a_field_that_nothing_computes_is_refused_by_its_name(
    struct: type[msgspec.Struct], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = " ".join(other for other in coverage._COVERED[struct].split() if other != name)
    monkeypatch.setitem(coverage._COVERED, struct, others)
    coverage.check_covered(SPEC)
    with pytest.raises(ModelError, match="no operation") as caught:
        coverage.check_covered(change(struct, name))
    assert caught.value.field.startswith("spec.layers[1]." if struct is not ModelSpec else "spec.")
    assert caught.value.field.endswith(f".{name}")


def test_a_layer_in_parallel_has_no_out_norms() -> None:
    layer = msgspec.structs.replace(SPEC.layers[0], is_parallel=True, residual_scale=0.5)
    spec = msgspec.structs.replace(SPEC, layers=(layer, SPEC.layers[1]))
    with pytest.raises(ModelError, match=r"^spec.layers\[0\].residual_scale=0.5: expected None in a layer"):
        coverage.check_covered(spec)


def test_heads_of_two_sizes_are_refused_where_a_step_has_angles_of_its_own() -> None:
    attention = msgspec.structs.replace(SPEC.layers[1].attention, head_size=32)
    other = msgspec.structs.replace(SPEC.layers[1], attention=attention)
    spec = msgspec.structs.replace(SPEC, layers=(SPEC.layers[0], other))
    coverage.check_covered(spec)
    spec = msgspec.structs.replace(spec, rope=RopeConfig(type="dynamic", factor=2.0))
    with pytest.raises(
        ModelError, match=r"^spec.layers\[1\].attention.head_size=32: expected 16, as of the layers"
    ):
        coverage.check_covered(spec)


def test_a_layer_reads_keys_of_an_earlier_layer_with_heads_like_its_own() -> None:
    first = msgspec.structs.replace(SPEC.layers[1].attention, qkv=("self_attn.q_proj",), kv_layer=0)
    other = msgspec.structs.replace(SPEC.layers[1], attention=first)
    spec = msgspec.structs.replace(SPEC, layers=(SPEC.layers[0], other))
    coverage.check_covered(spec)
    changes: tuple[dict[str, Any], ...] = (
        {"kv_layer": 1},
        {"head_size": 32},
        {"qkv": SPEC.layers[0].attention.qkv},
        {"norms_values": True},
    )
    for change in changes:
        attention = msgspec.structs.replace(first, **change)
        changed = msgspec.structs.replace(other, attention=attention)
        with pytest.raises(ModelError, match=r"^spec.layers\[1\].attention.kv_layer="):
            coverage.check_covered(msgspec.structs.replace(spec, layers=(SPEC.layers[0], changed)))


def test_what_is_recurrent_does_not_stand_beside_attention() -> None:
    layer = msgspec.structs.replace(SPEC.layers[0], recurrent=ShortConvSpec(num_channels=48))
    spec = msgspec.structs.replace(SPEC, layers=(layer, SPEC.layers[1]))
    with pytest.raises(ModelError, match=r"^spec.layers\[0\].recurrent='ShortConvSpec': expected None"):
        coverage.check_covered(spec)
