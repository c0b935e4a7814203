"""Experts as DeepSeek V3 has them: sigmoid scores with a correction, groups, shared experts.

Source: arXiv 2412.19437, section 2.1.2. Families differ in the defaults of their config.json.
"""

from __future__ import annotations

from typing import Any, cast

from ....ipc.spec.model_spec import DenseSpec, ExpertsSpec
from .config_fields import ConfigFields
from .mixtral import MAX_EXPERTS
from .parts import read_activation, read_dense, read_num_layers

_OF_EXPERTS = (
    *("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok", "moe_intermediate_size"),
    *("n_shared_experts", "norm_topk_prob", "routed_scaling_factor"),
)


def read_routed_layers(
    fields: ConfigFields,
    *,
    num_experts: int | None = None,
    per_token: int | None = None,
    num_shared: int = 0,
    num_dense: int | None = 0,
    normalizes: bool = False,
    scale: float = 1.0,
    groups: tuple[int, int] = (1, 1),
    methods: tuple[str, str] = ("sigmoid", "noaux_tc"),
    reads_kinds: bool = False,
) -> list[DenseSpec | ExpertsSpec]:
    """The feed-forward part of each layer; the keywords are the family's defaults.

    `num_dense` is None in a family whose layers all have experts. `groups`: how many of experts there
    are, and from how many a token chooses; `methods`: what scoring_func and topk_method may be;
    `reads_kinds`: mlp_layer_types says which layers have experts.
    """
    of_methods = zip(("scoring_func", "topk_method"), methods, strict=True)
    for key, allowed in (*of_methods, ("moe_layer_freq", 1)):
        fields.only(key, allowed)
    num_layers = read_num_layers(fields)
    first = 0
    if num_dense is not None:
        first = min(fields.integer("first_k_dense_replace", num_dense, low=0), num_layers)
    is_dense = [layer < first for layer in range(num_layers)]
    if reads_kinds:
        is_dense = _read_kinds(fields, is_dense)
    dense = read_dense(fields) if any(is_dense) else None
    if dense is not None and all(is_dense):  # what is said of experts is of none
        fields.ignore(*_OF_EXPERTS)
        return [dense] * num_layers
    count = fields.integer("n_routed_experts", num_experts, high=MAX_EXPERTS // num_layers)
    num_groups = fields.integer("n_group", groups[0])
    if count % num_groups or count // num_groups < 2:
        raise fields.error("n_group", num_groups, f"groups of equal size, of 2 or more of {count} experts")
    kept = fields.integer("topk_group", min(groups[1], num_groups), high=num_groups)
    most = fields.integer("num_experts_per_tok", per_token, high=kept * count // num_groups)
    width, activation = fields.integer("moe_intermediate_size"), read_activation(fields)
    shared_count = fields.integer("n_shared_experts", num_shared, low=0)
    shared = DenseSpec(
        intermediate_size=width * shared_count,
        activation=activation,
        gate="mlp.shared_experts.gate_proj",
        up="mlp.shared_experts.up_proj",
        down="mlp.shared_experts.down_proj",
    )
    experts = ExpertsSpec(
        router_is_float32=True,
        num_experts=count,
        num_experts_per_tok=most,
        intermediate_size=width,
        activation=activation,
        norm_topk_prob=fields.boolean("norm_topk_prob", normalizes),
        scoring="sigmoid",
        correction="mlp.gate.e_score_correction_bias",
        num_groups=num_groups,
        num_groups_per_tok=kept,
        routed_scaling_factor=fields.number("routed_scaling_factor", scale),
        shared=shared if shared_count else None,
    )
    return [dense if dense is not None and is_so else experts for is_so in is_dense]


def _read_kinds(fields: ConfigFields, is_dense: list[bool]) -> list[bool]:
    """Which layers have no experts, by mlp_layer_types where there is one."""
    kinds: Any = fields.get("mlp_layer_types")
    if kinds is None:
        return is_dense
    if not isinstance(kinds, list) or len(cast(list[Any], kinds)) != len(is_dense):
        raise fields.error("mlp_layer_types", kinds, f"{len(is_dense)} of 'dense' and 'sparse'")
    for kind in cast(list[Any], kinds):
        if kind not in ("dense", "sparse"):
            raise fields.error("mlp_layer_types", kind, "'dense' or 'sparse'")
    return [kind == "dense" for kind in cast(list[Any], kinds)]


def skip_predicting_layers(
    fields: ConfigFields, key: str = "num_nextn_predict_layers", prefix: str = "model.layers.{}."
) -> tuple[str, ...]:
    """Beginnings of the names of tensors that predict tokens after the next: layers after the last one."""
    count, first = (
        fields.integer(key, fields.get("num_mtp_layers", 0), low=0, high=100),
        read_num_layers(fields),
    )
    return tuple(prefix.format(first + index) for index in range(count))
