"""Our linear layers in the place of transformers' own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ...layers.linear import Linear

# Of a plain weight [out, in] and a bias, by the name of the layer.
MakeLinear = Callable[[str, Tensor, Tensor | None], Linear]


class LinearModule(nn.Module):
    """A linear layer of ours as a module."""

    def __init__(self, linear: Linear, num_out: int) -> None:
        super().__init__()
        self.linear, self.out_features = linear, num_out

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] for [..., in]."""
        rows = x.reshape(-1, x.shape[-1])
        return self.linear(rows if rows.is_contiguous() else rows.contiguous()).view(
            *x.shape[:-1], self.out_features
        )


def replace_linears(model: nn.Module, make_linear: MakeLinear) -> None:
    """Put ours in the place of every plain linear layer. Their weights are dropped one by one."""
    places = [
        (name, parent, key, child)
        for name, parent in model.named_modules()
        for key, child in parent.named_children()
    ]
    made: dict[int, LinearModule] = {}
    for name, parent, key, child in places:
        weight, bias = _find_weight(child)
        if weight is None:
            continue
        if id(child) not in made:
            linear = make_linear(f"{name}.{key}" if name else key, weight, bias)
            made[id(child)] = LinearModule(linear, weight.shape[0])
        setattr(parent, key, made[id(child)])


def _find_weight(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """[out, in] and the bias of a module that computes x W^T + b and nothing else; else None."""
    from transformers.pytorch_utils import Conv1D

    if type(module) is nn.Linear:
        return module.weight.data, None if module.bias is None else module.bias.data
    if type(module) is Conv1D:
        return module.weight.data.t().contiguous(), module.bias.data
    return None, None
