"""A feed-forward layer of experts: a router sends each token to K of E networks, whose results are added.

The router's logits [T, E] become scores in float32, by a softmax or each by a sigmoid. A token goes to the K
experts with the largest scores, of equal ones to the first; `Router` says what else is weighed. Their scores
weigh the results, in some models scaled to a sum of 1 (Mixtral, arXiv 2401.04088).
The sum is taken in float32 over rising experts and rounded once: a token's row depends on itself alone.
Bytes: each expert that some token goes to is read once a step.
Legend: T tokens, E experts, K experts a token, H hidden size, F width of an expert.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..program.program import LinearTable, RouterTable
from .gated_activation import ACTIVATIONS


@dataclass(frozen=True, slots=True)
class Router:
    """How experts are chosen by their logits, and how they are weighed.

    With `num_groups` above 1 a token's experts are of its `num_groups_per_token` best groups of neighbours. A
    group counts by its best expert, or by the sum of its best two (DeepSeek V3, arXiv 2412.19437, 2.1.2).
    """

    num_experts: int
    per_token: int
    normalizes: bool = True  # weights of a token are scaled to a sum of 1
    is_sigmoid: bool = False
    correction: Tensor | None = None  # float32 [E]: added to the scores for the choice, not to the weights
    num_groups: int = 1
    num_groups_per_token: int = 1
    sums_two: bool = True
    scale: float = 1.0  # multiplies the weights at last
    expert_scales: Tensor | None = None  # float32 [E]: after that, each the weight of its expert
    # Above 0 SparseMixer (arXiv 2409.12136) in the place of all this: per_token passes, of which each takes
    # the largest logit m left. Its weight is that of a softmax over the logits s left that are near it:
    # (m - s) / max(|s|, m) is at most this.
    mixer_threshold: float = 0.0

    def to_table(self) -> RouterTable:
        """As the operation takes it; the tensors stay this object's."""
        names = "num_experts per_token is_sigmoid normalizes num_groups num_groups_per_token sums_two scale"
        names += " mixer_threshold"
        table = RouterTable(**{name: getattr(self, name) for name in names.split()})
        for name in ("correction", "expert_scales"):
            if (numbers := getattr(self, name)) is not None:
                setattr(table, name, numbers.data_ptr())
        return table


def route_reference(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """(experts int64 [T, K] in rising order, their weights float32 [T, K]) for logits [T, E]."""
    logits = logits.float()
    if router.mixer_threshold:
        return _mix(logits, router)
    scores = logits.sigmoid() if router.is_sigmoid else logits.softmax(-1)
    ranks = logits if router.correction is None else scores + router.correction
    if router.num_groups > 1:
        groups = ranks.unflatten(-1, (router.num_groups, -1))
        best = groups.topk(2, -1).values.sum(-1) if router.sums_two else groups.amax(-1)
        is_kept = torch.zeros_like(best, dtype=torch.bool)
        is_kept.scatter_(-1, _choose(best, router.num_groups_per_token), True)
        ranks = groups.masked_fill(~is_kept.unsqueeze(-1), -math.inf).flatten(-2)
    choices = _choose(ranks, router.per_token).sort(dim=-1).values
    weights = scores.gather(-1, choices)
    if router.normalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * router.scale
    return choices, weights if router.expert_scales is None else weights * router.expert_scales[choices]


def _mix(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    choices, weights, left = list[Tensor](), list[Tensor](), logits
    for _ in range(router.per_token):
        best = _choose(left, 1)
        most = left.gather(-1, best)
        is_far = (most - logits) / logits.abs().maximum(most) > router.mixer_threshold
        weights.append(left.masked_fill(is_far, -math.inf).softmax(-1).gather(-1, best))
        choices.append(best)
        left = left.scatter(-1, best, -math.inf)
    rising = torch.cat(choices, -1).sort(dim=-1)
    return rising.values, torch.cat(weights, -1).gather(-1, rising.indices)


def _choose(numbers: Tensor, count: int) -> Tensor:
    """The places of the largest, of equal ones the first."""
    return numbers.argsort(dim=-1, descending=True, stable=True)[..., :count]


def experts_reference(
    x: Tensor,
    choices: Tensor,
    weights: Tensor,
    experts: Sequence[Callable[[Tensor], Tensor]],
    scales_inputs: bool = False,
) -> Tensor:
    """[T, H] for x [T, H], with the choices and weights of `route_reference`; waits for the device.

    `scales_inputs`: what an expert is given is weighed, rounded to x's type, and not what it gives.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index in choices.unique().tolist():  # rising, as a row's sum is to be taken
        rows, places = (choices == index).nonzero(as_tuple=True)
        weight = weights[rows, places].unsqueeze(1)
        if scales_inputs:
            total[rows] += experts[index]((x[rows].float() * weight).to(x.dtype)).float()
        else:
            total[rows] += experts[index](x[rows]).float() * weight
    return total.to(x.dtype)


def launch_route(library: ctypes.CDLL, logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """As `route_reference`, with int32 choices, for contiguous float32 or bfloat16 logits on the CPU."""
    rows = len(logits)
    choices = torch.empty((rows, router.per_token), dtype=torch.int32)
    weights = torch.empty((rows, router.per_token), dtype=torch.float32)
    table = ctypes.addressof(kept := router.to_table())
    library.quire_route(logits.dtype is torch.bfloat16, logits, rows, table, choices, weights)
    del kept
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
    scales_inputs: bool = False,
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
        *(len(down), choices.shape[1], scales_inputs),
        *(*map(ctypes.addressof, (gate_up, down, scratch)), y),
    )
    return y
