"""A feed-forward layer of experts: a router sends each token to K of E networks, whose results are added.

The router's logits [T, E] become probabilities by a softmax in float32. A token goes to the K experts with
the largest ones, which weigh their results; some models scale them to a sum of 1 (Mixtral, arXiv 2401.04088).
The sum is taken in float32 over rising experts and rounded once: a token's row depends on itself alone.
Bytes: each expert that some token goes to is read once a step.
Legend: T tokens, E experts, K experts a token, H hidden size, F width of an expert.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..program.program import LinearTable
from .gated_activation import ACTIVATIONS


def route_reference(logits: Tensor, per_token: int, normalizes: bool) -> tuple[Tensor, Tensor]:
    """(experts int64 [T, K] in rising order, their weights float32 [T, K]) for logits [T, E]."""
    weights, choices = logits.float().softmax(-1).topk(per_token, dim=-1)
    if normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    choices, order = choices.sort(dim=-1)
    return choices, weights.gather(-1, order)


def experts_reference(
    x: Tensor, choices: Tensor, weights: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """[T, H] for x [T, H], with the choices and weights of `route_reference`; waits for the device."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index in choices.unique().tolist():  # rising, as a row's sum is to be taken
        rows, places = (choices == index).nonzero(as_tuple=True)
        total[rows] += experts[index](x[rows]).float() * weights[rows, places].unsqueeze(1)
    return total.to(x.dtype)


def launch_route(
    library: ctypes.CDLL, logits: Tensor, per_token: int, normalizes: bool
) -> tuple[Tensor, Tensor]:
    """As `route_reference`, with int32 choices, for contiguous float32 or bfloat16 logits on the CPU."""
    rows, num_experts = logits.shape
    choices = torch.empty((rows, per_token), dtype=torch.int32)
    weights = torch.empty((rows, per_token), dtype=torch.float32)
    is_bf16, sizes = logits.dtype is torch.bfloat16, (rows, num_experts, per_token)
    library.quire_route(is_bf16, logits, *sizes, normalizes, choices, weights)
    return choices, weights


class _Scratch(ctypes.Structure):
    """QuireExpertsScratch."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("routed", "gate_up", "gated"))


def launch_experts(
    library: ctypes.CDLL,
    x: Tensor,
    choices: Tensor,
    weights: Tensor,
    gate_up: ctypes.Array[LinearTable],
    down: ctypes.Array[LinearTable],
    activation: str,
) -> Tensor:
    """[T, H] for a contiguous x [T, H] on the CPU, float32 or bfloat16, with what `launch_route` gives.

    `gate_up` and `down` are the layers of each of the E experts.
    """
    width, count = down[0].num_in, choices.numel()
    parts = [x.new_empty((count, size)) for size in (x.shape[1], 2 * width, width)]
    scratch = _Scratch(*(part.data_ptr() for part in parts))
    y = torch.empty_like(x)
    library.quire_experts(
        *(x.dtype is torch.bfloat16, ACTIVATIONS[activation], x, x.shape[0], choices, weights),
        *(len(down), choices.shape[1], *map(ctypes.addressof, (gate_up, down, scratch)), y),
    )
    return y
