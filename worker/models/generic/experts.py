"""All experts of a layer of transformers as linear layers of ours; its own router chooses them.

Legend: T tokens, K experts a token, E experts, F width of an expert.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ....kernels.choice import native_library
from ....kernels.linear.experts import experts_reference, launch_experts
from ...layers.feed_forward import MLP, GatedActivation, make_tables
from ...layers.linear import Linear

_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]


class ExpertsModule(nn.Module):
    """The sum of what a token's experts make of it, by the weights that its router gives them."""

    def __init__(self, experts: list[MLP], activation: str) -> None:
        super().__init__()
        self._experts, self._activation = experts, activation
        self._gate_up = make_tables([each.gate_up_proj for each in experts])
        self._down = make_tables([each.down_proj for each in experts])

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, hidden] for [T, hidden], with the K experts and weights of each token, [T, K]."""
        most = len(self._experts) - 1
        weights = top_k_weights.float().masked_fill(top_k_index > most, 0.0)  # one more stands for none
        choices, order = top_k_index.clamp(max=most).sort(dim=-1)  # a sum is taken in their order
        weights = weights.gather(-1, order).contiguous()
        rows = hidden.contiguous()
        if self._gate_up is None or self._down is None:
            return experts_reference(rows, choices, weights, self._experts)
        tables = self._gate_up, self._down
        return launch_experts(native_library(), rows, choices.int(), weights, *tables, self._activation)


def replace_experts(
    name: str,
    module: nn.Module,
    make_linear: Callable[[list[str], list[Tensor], list[Tensor]], Linear],
    find_activation: Callable[[Any], str | None],
    make_activation: Callable[[str], GatedActivation],
) -> ExpertsModule | None:
    """Ours for experts that are gated as usual, in tensors [E, 2 F, in] and [E, out, F]; None for others."""
    from transformers.integrations.moe import _default_apply_gate  # pyright: ignore[reportPrivateUsage]

    experts: Any = module
    if getattr(type(module), "_apply_gate", None) is not _default_apply_gate or not experts.has_gate:
        return None
    is_usual = experts.is_concatenated and not experts.is_transposed and not experts.has_post_expert_norm
    activation, arguments = find_activation(experts.act_fn), inspect.signature(experts.forward).parameters
    if not is_usual or activation is None or list(arguments) != _ARGUMENTS:
        return None
    made: list[MLP] = []
    for index, (gate_up, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
        biases: list[Tensor] = []
        if experts.has_bias:
            biases = [experts.gate_up_proj_bias.data[index], experts.down_proj_bias.data[index]]
        both = make_linear([f"{name}.{index}.gate_up_proj"], [gate_up.data], biases[:1])
        out = make_linear([f"{name}.{index}.down_proj"], [down.data], biases[1:])
        made.append(MLP(both, make_activation(activation), out, down.shape[1]))
    return ExpertsModule(made, activation)
