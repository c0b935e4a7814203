"""The feed-forward part of a layer: one network for every token, or some of many.

Legend: T tokens, E experts, K experts a token.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ...ipc.spec.model_spec import ExpertsSpec
from ...kernels.choice import choose_kernel, native_library
from ...kernels.linear.experts import (
    Router,
    experts_reference,
    launch_experts,
    launch_route,
    route_reference,
)
from ...kernels.linear.gated_activation import (
    ACTIVATIONS,
    gated_activation_reference,
    launch_gated_activation,
)
from ...kernels.linear.xielu import XieluNumbers, XieluTable, launch_xielu, xielu_reference
from ...kernels.program import program as ops
from ...kernels.program.program import Activate, Kind, LinearTable, NotNativeError, Program, Slot
from .linear import Linear, NativeLinear

# The gated activation between the two projections of a feed-forward layer.


class GatedActivation:
    """act(gate) * up, from the fused projection."""

    def __init__(self, activation: str, dtype: torch.dtype, device: torch.device) -> None:
        self._activation = activation
        self._compute = _choose_kernel(dtype, device)

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[T, F] from [T, 2 F]."""
        return self._compute(gate_up, self._activation)

    def emit(self, program: Program, x: Slot, y: Slot, size: int) -> None:
        """The same as an operation: y [T, size] of x [T, 2 size]."""
        program.add(Kind.ACTIVATE, Activate(x=x, y=y, size=size, activation=ACTIVATIONS[self._activation]))


def _choose_kernel(dtype: torch.dtype, device: torch.device) -> Callable[[Tensor, str], Tensor]:
    chosen = choose_kernel("gated_activation", dtype, device)
    if chosen == "triton":
        from ...kernels.linear import gated_activation_triton

        return gated_activation_triton.launch_gated_activation
    return (
        partial(launch_gated_activation, native_library())
        if chosen == "native"
        else gated_activation_reference
    )


class Xielu:
    """xIELU, in place where there is a kernel."""

    def __init__(self, numbers: XieluNumbers, dtype: torch.dtype, device: torch.device) -> None:
        self._numbers = numbers
        is_native = choose_kernel("xielu", dtype, device) == "native"
        self._compute = partial(launch_xielu, native_library()) if is_native else xielu_reference

    def __call__(self, x: Tensor) -> Tensor:
        return self._compute(x, self._numbers)

    def emit(self, program: Program, x: Slot, size: int) -> None:
        """The same as an operation: x [T, size]."""
        program.add(Kind.XIELU, ops.Xielu(numbers=XieluTable(*astuple(self._numbers)), x=x, size=size))


class FeedForward(Protocol):
    """An MLP, a PlainMLP or Experts."""

    @property
    def is_capturable(self) -> bool:
        """True if it waits for nothing on the host, so that a CUDA graph can hold it."""
        ...

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, hidden] for contiguous [T, hidden]."""
        ...

    def emit(self, program: Program, x: Slot, y: Slot) -> None:
        """The same as operations. Raises NotNativeError where there are none."""
        ...


@dataclass(eq=False)
class MLP:
    """down(act(gate(x)) * up(x)), gate and up in one projection."""

    gate_up_proj: Linear
    activation: GatedActivation
    down_proj: Linear
    width: int
    is_capturable = True

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(hidden)))

    def emit(self, program: Program, x: Slot, y: Slot) -> None:
        """As FeedForward.emit."""
        gate_up, gated = program.slot("gate_up", 2 * self.width), program.slot("gated", self.width)
        self.gate_up_proj.emit(program, x, gate_up)
        self.activation.emit(program, gate_up, gated, self.width)
        self.down_proj.emit(program, gated, y)


@dataclass(eq=False)
class PlainMLP:
    """down(act(up(x))), the activation as part of `up_proj`, or xIELU of what that gives."""

    up_proj: Linear
    down_proj: Linear
    width: int
    xielu: Xielu | None = None
    is_capturable = True

    def __call__(self, hidden: Tensor) -> Tensor:
        activated = self.up_proj(hidden)
        return self.down_proj(activated if self.xielu is None else self.xielu(activated))

    def emit(self, program: Program, x: Slot, y: Slot) -> None:
        """As FeedForward.emit."""
        activated = program.slot("gated", self.width)
        self.up_proj.emit(program, x, activated)
        if self.xielu is not None:
            self.xielu.emit(program, activated, self.width)
        self.down_proj.emit(program, activated, y)


class Experts:
    """The sum of what a token's K experts make of it, by the router's weights (kernels/linear/experts.py).

    `correction` is the router's, float32 [E]. What the shared network makes of a token is added, weighed by
    the sigmoid of its gate where there is one.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        router: Linear,
        experts: list[MLP],
        correction: Tensor | None = None,
        shared: MLP | PlainMLP | None = None,
        shared_gate: Linear | None = None,
        expert_scales: Tensor | None = None,
    ) -> None:
        self._spec = spec
        self._router = router
        self._experts = experts
        self._shared, self._shared_gate = shared, shared_gate
        self._routing = Router(
            num_experts=spec.num_experts,
            per_token=spec.num_experts_per_tok,
            normalizes=spec.norm_topk_prob,
            is_sigmoid=spec.scoring == "sigmoid",
            correction=correction,
            num_groups=spec.num_groups,
            num_groups_per_token=spec.num_groups_per_tok,
            sums_two=spec.group_score == "two",
            scale=spec.routed_scaling_factor,
            expert_scales=expert_scales,
            mixer_threshold=spec.mixer_threshold or 0.0,
        )
        gate_up, down = ([getattr(each, name) for each in experts] for name in ("gate_up_proj", "down_proj"))
        self._tables = make_tables(gate_up), make_tables(down)
        self._stacks = _stack(gate_up), _stack(down)
        # Else which experts have tokens is asked on the host.
        self.is_capturable = None not in self._stacks

    def __call__(self, hidden: Tensor) -> Tensor:
        routed = self.run_routed(hidden, hidden)
        if self._shared is None:
            return routed
        shared = self._shared(hidden)
        if self._shared_gate is not None:
            shared = shared * self._shared_gate(hidden).sigmoid()
        return routed + shared

    def run_routed(self, hidden: Tensor, router_input: Tensor) -> Tensor:
        """Without the shared network; what the router reads may differ from what experts are given."""
        spec, (gate_up, down) = self._spec, self._tables
        logits = self._router(router_input.float() if spec.router_is_float32 else router_input)
        scales = spec.scales_inputs
        if gate_up is None or down is None:
            choices, weights = route_reference(logits, self._routing)
            wide, narrow = self._stacks
            if wide is not None and narrow is not None:
                from ...kernels.linear.experts_triton import launch_grouped_experts

                stacks = wide.weight, narrow.weight, spec.activation, wide.bias, narrow.bias
                return launch_grouped_experts(hidden, choices, weights, *stacks, scales)
            return experts_reference(hidden, choices, weights, self._experts, scales)
        library = native_library()  # it is there: each of the linear layers is native
        choices, weights = launch_route(library, logits, self._routing)
        return launch_experts(library, hidden, choices, weights, gate_up, down, spec.activation, scales)

    def emit(self, program: Program, x: Slot, y: Slot) -> None:
        """As FeedForward.emit; NotNativeError where a layer's weights are not the native kernels'."""
        self.emit_routed(program, x, x, y)
        if self._shared is None:
            return
        assert self._tables[1] is not None
        hidden = self._tables[1][0].num_out
        shared = program.slot("shared", hidden)
        self._shared.emit(program, x, shared)
        operation = ops.Add(x=shared, residual=y, size=hidden)
        if self._shared_gate is not None:
            operation.gate = program.slot("shared_gate", 1)
            self._shared_gate.emit(program, x, operation.gate)
        program.add(Kind.ADD, operation)

    def emit_routed(self, program: Program, x: Slot, router_input: Slot, y: Slot) -> None:
        """`run_routed` as operations."""
        spec, (gate_up, down) = self._spec, self._tables
        if gate_up is None or down is None:
            raise NotNativeError(type(self).__name__)
        most, hidden, width = spec.num_experts_per_tok, down[0].num_out, spec.intermediate_size
        logits, routed = program.slot("router", spec.num_experts, torch.float32), router_input
        if spec.router_is_float32 and program.dtype is not torch.float32:
            routed = program.slot("routed_floats", hidden, torch.float32)
            program.add(Kind.WIDEN, ops.Widen(x=router_input, y=routed, size=hidden))
        choices = program.slot("choices", most, torch.int32)
        weights = program.slot("expert_weights", most, torch.float32)
        self._router.emit(program, routed, logits)
        table = self._routing.to_table()
        route = ops.Route(router=table, logits=logits, choices=choices, weights=weights)
        route.is_float32 = spec.router_is_float32
        program.add(Kind.ROUTE, route)
        program.add(
            Kind.EXPERTS,
            ops.Experts(
                gate_up=ctypes.addressof(gate_up),
                down=ctypes.addressof(down),
                x=x,
                choices=choices,
                weights=weights,
                routed=program.slot("routed", most * hidden),
                wide=program.slot("gate_up", most * 2 * width),
                gated=program.slot("gated", most * width),
                y=y,
                num_experts=spec.num_experts,
                per_token=most,
                activation=ACTIVATIONS[spec.activation],
                scales_inputs=spec.scales_inputs,
            ),
        )


@dataclass(frozen=True, slots=True)
class _Stack:
    """A projection of all experts: the weight [E, out, in], and the bias [E, out] or None."""

    weight: Tensor
    bias: Tensor | None


def _stack(linears: list[Linear]) -> _Stack | None:
    """The layers in one tensor, whose parts become their weights; None where no kernel takes it."""
    weights = [linear.plain_weight for linear in linears]
    plain = [weight for weight in weights if weight is not None]
    if len(plain) < len(linears) or choose_kernel("experts", plain[0].dtype, plain[0].device) != "triton":
        return None
    weight = torch.stack(plain)
    for linear, part in zip(linears, weight, strict=True):
        linear.weight = part
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return _Stack(weight, torch.stack(biases) if biases else None)


def make_tables(linears: list[Linear]) -> ctypes.Array[LinearTable] | None:
    """The layers as operations take them, None unless all are native."""
    tables = [linear.to_table() for linear in linears if isinstance(linear, NativeLinear)]
    return (LinearTable * len(linears))(*tables) if len(tables) == len(linears) else None
