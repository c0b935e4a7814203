"""A layer of experts where one of them has no native form."""

from __future__ import annotations

import ctypes

import torch
from kernel_checks import CPU, EPS, random
from quire.ipc.spec.model_spec import ExpertsSpec
from quire.worker.layers.feed_forward import MLP, Experts, GatedActivation
from quire.worker.layers.linear import NativeLinear, TorchLinear


def test_layers_without_a_native_form_take_the_reference(library: ctypes.CDLL) -> None:
    hidden, width, activation = 48, 72, GatedActivation("silu", torch.float32, CPU)

    def make_expert(seed: int) -> MLP:
        weights = random(2 * width, hidden, seed=seed) * 0.2, random(hidden, width, seed=99 + seed) * 0.2
        gate_up, down = (NativeLinear(library, weight, None, torch.float32) for weight in weights)
        return MLP(gate_up, activation, down, width)

    spec = ExpertsSpec(num_experts=8, num_experts_per_tok=2, intermediate_size=width)
    router, experts = TorchLinear(random(8, hidden), None), [make_expert(seed) for seed in range(8)]
    x, native = random(5, hidden, seed=3), Experts(spec, router, experts)
    expected = native(x)
    experts[3].down_proj = TorchLinear(random(hidden, width, seed=102) * 0.2, None)
    plain = Experts(spec, router, experts)
    torch.testing.assert_close(plain(x), expected, rtol=0, atol=200 * EPS * expected.abs().max().item())
