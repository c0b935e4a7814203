"""Experts as DeepSeek V3 has them: sigmoid scores with a correction, groups, shared experts.

Source: arXiv 2412.19437, section 2.1.2. Families differ in the defaults of their config.json.
"""

from __future__ import annotations

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
) -> list[DenseSpec | ExpertsSpec]:
    """The feed-forward part of each layer; the keywords are the family's defaults.

    `num_dense` is None in a family whose layers all have experts.
    """
    for key, allowed in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        fields.only(key, allowed)
    num_layers = read_num_layers(fields)
    first = 0
    if num_dense is not None:
        first = min(fields.integer("first_k_dense_replace", num_dense, low=0), num_layers)
    dense: list[DenseSpec | ExpertsSpec] = [read_dense(fields)] * first if first else []
    if first == num_layers:  # what is said of experts is of none
        fields.ignore(*_OF_EXPERTS)
        return dense
    count = fields.integer("n_routed_experts", num_experts, high=MAX_EXPERTS // num_layers)
    num_groups = fields.integer("n_group", 1)
    if count % num_groups or count // num_groups < 2:
        raise fields.error("n_group", num_groups, f"groups of equal size, of 2 or more of {count} experts")
    kept = fields.integer("topk_group", 1, high=num_groups)
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
    return dense + [experts] * (num_layers - first)


def skip_predicting_layers(
    fields: ConfigFields, key: str = "num_nextn_predict_layers", prefix: str = "model.layers.{}."
) -> tuple[str, ...]:
    """Beginnings of the names of tensors that predict tokens after the next: layers after the last one."""
    count, first = (
        fields.integer(key, fields.get("num_mtp_layers", 0), low=0, high=100),
        read_num_layers(fields),
    )
    return tuple(prefix.format(first + index) for index in range(count))
