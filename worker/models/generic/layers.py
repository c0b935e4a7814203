"""Our layers in place of transformers' own, where they compute the same: linear layers, norms, gated MLPs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.linear.gated_activation import FUNCTIONS
from ....kernels.norm.rms_norm import rms_norm_reference
from ...layers.feed_forward import MLP, GatedActivation
from ...layers.linear import Linear
from ...layers.norm import RMSNorm
from .experts import replace_experts

# Of plain weights [out, in] that are multiplied together, and their biases, by the names of the layers.
MakeLinear = Callable[[list[str], list[Tensor], list[Tensor]], Linear]
# What choose experts: a rounding in them may send a token elsewhere, and their code reads their weights.
ROUTERS = ("gate", "router", "wg")
_MOST_UNEQUAL = 0.02  # of a norm's results in the model's type: a sum in another order rounds few otherwise


class OurModule(nn.Module):
    """A layer of ours, of rows, as a module."""

    def __init__(self, layer: Callable[[Tensor], Tensor], num_out: int) -> None:
        super().__init__()
        self.layer, self.out_features = layer, num_out

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] for [..., in]."""
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.is_contiguous() else rows.contiguous()
        return self.layer(rows).view(*x.shape[:-1], self.out_features)


def replace_layers(
    model: nn.Module, make_linear: MakeLinear, dtype: torch.dtype, device: torch.device
) -> int:
    """Put ours in the place of every layer that computes the same. Weights are dropped one by one.

    Returns the bytes of the norms that are ours now; those of linear layers `make_linear` counts.
    """
    made: dict[int, nn.Module] = {}

    def activate(name: str) -> GatedActivation:
        return GatedActivation(name, dtype, device)

    for name, parent, key, child in list(_list_children(model)):
        if id(child) not in made:
            ours = _replace_mlp(name, child, make_linear, activate)
            ours = ours or replace_experts(name, child, make_linear, find_activation, activate)
            if ours is not None:
                made[id(child)] = ours
        if id(child) in made:
            setattr(parent, key, made[id(child)])
    num_bytes = 0
    for name, parent, key, child in list(_list_children(model)):
        if id(child) not in made:
            weight, bias = _find_weight(child)
            if weight is not None and key not in ROUTERS:
                linear = make_linear([name], [weight], [] if bias is None else [bias])
                made[id(child)] = OurModule(linear, weight.shape[0])
            elif norm := make_norm(child, dtype, device):
                num_bytes += norm.weight.nbytes
                made[id(child)] = OurModule(norm, norm.size)
        if id(child) in made:
            setattr(parent, key, made[id(child)])
    return num_bytes


def _list_children(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """(name, parent, key, child) of all."""
    for name, parent in model.named_modules():
        for key, child in parent.named_children():
            yield f"{name}.{key}" if name else key, parent, key, child


def _find_weight(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """[out, in] and the bias of a module that computes x W^T + b and nothing else; else None."""
    from transformers.pytorch_utils import Conv1D

    if type(module) is nn.Linear:
        bias: Any = module.bias  # None without one, whatever torch's annotation says
        return module.weight.data, None if bias is None else bias.data
    if type(module) is Conv1D:
        return module.weight.data.t().contiguous(), module.bias.data
    return None, None


def _replace_mlp(
    name: str, module: nn.Module, make_linear: MakeLinear, activate: Callable[[str], GatedActivation]
) -> OurModule | None:
    """down(act(gate(x)) * up(x)), told by its results."""
    parts: Any = [getattr(module, f"{part}_proj", None) for part in ("gate", "up", "down")]
    act: Any = getattr(module, "act_fn", None)
    if act is None or not all(type(part) is nn.Linear for part in parts):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    activation, (gate, up, down) = find_activation(act), parts
    if activation is None or (gate.bias is None) != (up.bias is None):
        return None
    width, num_in = gate.weight.shape
    x = torch.randn((1, 3, num_in), generator=torch.Generator().manual_seed(0)).to(gate.weight.dtype)
    if not torch.equal(module(x), down(act(gate(x)) * up(x))):
        return None
    both = make_linear(
        [f"{name}.gate_proj", f"{name}.up_proj"],
        [gate.weight.data, up.weight.data],
        [] if gate.bias is None else [gate.bias.data, up.bias.data],
    )
    biases = [] if down.bias is None else [down.bias.data]
    out = make_linear([f"{name}.down_proj"], [down.weight.data], biases)
    mlp = MLP(both, activate(activation), out, width)
    return OurModule(mlp, down.weight.shape[0])


def find_activation(function: Callable[[Tensor], Tensor]) -> str | None:
    """Which of our kernels' functions it is."""
    x = torch.linspace(-6, 6, 97)
    y = function(x)
    return next((name for name, ours in FUNCTIONS.items() if torch.allclose(ours(x), y, 1e-6, 1e-6)), None)


def make_norm(module: nn.Module, dtype: torch.dtype, device: torch.device) -> RMSNorm | None:
    """A root mean square norm of rows; the kind of it is the one that gives the module's own numbers."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    eps = getattr(module, "eps", None) if eps is None else eps
    if "RMSNorm" not in type(module).__name__ or not isinstance(eps, float):
        return None
    if not isinstance(weight, Tensor) or weight.dim() != 1 or weight.dtype is not dtype:
        return None
    if list(inspect.signature(module.forward).parameters) not in (["x"], ["hidden_states"]):
        return None
    x = torch.randn((7, len(weight)), generator=torch.Generator().manual_seed(0)).to(dtype)
    y = module(x)
    for offset in (0.0, 1.0):
        for rounds_normed in (True, False):
            ours = rms_norm_reference(x, weight.data, eps, offset, rounds_normed)
            if torch.allclose(ours, y, 1e-5, 1e-6) or (ours != y).float().mean() < _MOST_UNEQUAL:
                return RMSNorm(weight.data.to(device, copy=True), eps, offset, rounds_normed)
    return None
