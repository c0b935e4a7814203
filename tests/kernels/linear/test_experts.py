"""Routing, experts and soft caps against their references, and rows alone against rows in a crowd."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from kernel_checks import EPS, random
from quire.ipc.spec.model_spec import ExpertsSpec
from quire.kernels.linear.experts import experts_reference, launch_experts, launch_route, route_reference
from quire.kernels.program.program import LinearTable
from quire.kernels.sampling.soft_cap import launch_soft_cap, soft_cap_reference
from quire.worker.layers.feed_forward import MLP, Experts, GatedActivation
from quire.worker.layers.linear import NativeLinear, TorchLinear

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "num_experts", "per_token"), [(1, 1, 1), (3, 4, 2), (70, 61, 8), (5, 8, 8)])
def test_routing_equals_its_reference(
    library: ctypes.CDLL, rows: int, num_experts: int, per_token: int, dtype: torch.dtype, normalizes: bool
) -> None:
    # Distinct in bfloat16 too: which of two equal ones is taken is the kernel's own rule, the lower.
    order = torch.argsort(random(rows, num_experts), dim=1)
    logits = (order * 0.25 - 4).to(dtype)
    choices, weights = launch_route(library, logits, per_token, normalizes)
    expected, expected_weights = route_reference(logits, per_token, normalizes)
    assert torch.equal(choices.long(), expected)
    torch.testing.assert_close(weights, expected_weights, rtol=(num_experts + 8) * EPS, atol=0)


def test_equal_logits_go_to_the_first_experts_and_bad_ones_to_some(library: ctypes.CDLL) -> None:
    logits = torch.tensor(
        [[1.0, 2.0, 2.0, 2.0], [torch.nan] * 4, [-torch.inf] * 4, [0.0, torch.nan, 1.0, 3.0]]
    )
    choices, weights = launch_route(library, logits, 2, normalizes=True)
    assert choices[0].tolist() == [1, 2]
    assert ((choices >= 0) & (choices < 4)).all()
    assert (choices[:, 0] < choices[:, 1]).all()
    assert weights[1:].isnan().all()


def make_layer(library: ctypes.CDLL, dtype: torch.dtype, hidden: int = 48, width: int = 72) -> list[MLP]:
    def make_linear(*shape: int, seed: int) -> NativeLinear:
        return NativeLinear(library, (random(*shape, seed=seed) * 0.2).to(dtype), None, dtype)

    activation = GatedActivation("silu", dtype, CPU)
    return [
        MLP(
            make_linear(2 * width, hidden, seed=e), activation, make_linear(hidden, width, seed=99 + e), width
        )
        for e in range(8)
    ]


def tables_of(linears: list[NativeLinear]) -> ctypes.Array[LinearTable]:
    return (LinearTable * len(linears))(*(linear.to_table() for linear in linears))


@pytest.mark.parametrize("num_threads", [1, 2, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_equal_their_reference_alone_and_in_a_crowd_on_any_threads(
    library: ctypes.CDLL, dtype: torch.dtype, num_threads: int, set_threads: Callable[[int], None]
) -> None:
    """With 2 threads each takes whole experts, with 8 they share each product."""
    experts = make_layer(library, dtype)
    gate_up = tables_of([expert.gate_up_proj for expert in experts])  # type: ignore[misc]
    down = tables_of([expert.down_proj for expert in experts])  # type: ignore[misc]
    x = random(130, 48, seed=7).to(dtype)
    choices, weights = launch_route(library, random(130, 8, seed=8), 3, normalizes=True)
    set_threads(num_threads)
    together = launch_experts(library, x, choices, weights, gate_up, down, "silu")
    parts = [slice(0, 1), slice(1, 40), slice(40, 130)]
    apart = [launch_experts(library, x[p], choices[p], weights[p], gate_up, down, "silu") for p in parts]
    assert torch.equal(together, torch.cat(apart))
    # The same kernels, and the same order of the sum: what differs is a rounding of each product.
    expected = experts_reference(x, choices, weights, experts)
    relative = 4 * EPS if dtype == torch.float32 else 2.0**-8
    bound = relative * expected.abs().max().item()
    torch.testing.assert_close(together, expected, rtol=0, atol=bound)


def test_layers_without_a_native_form_take_the_reference(library: ctypes.CDLL) -> None:
    spec = ExpertsSpec(num_experts=8, num_experts_per_tok=2, intermediate_size=72)
    router = TorchLinear(random(8, 48), None)
    experts = make_layer(library, torch.float32)
    native = Experts(spec, router, experts)
    x = random(5, 48, seed=3)
    expected = native(x)
    experts[3].down_proj = TorchLinear(random(48, 72, seed=102) * 0.2, None)
    plain = Experts(spec, router, experts)
    torch.testing.assert_close(plain(x), expected, rtol=0, atol=200 * EPS * expected.abs().max().item())


@pytest.mark.parametrize("count", [1, 16, 100_003])
def test_a_soft_cap_equals_its_reference_and_keeps_a_nan(library: ctypes.CDLL, count: int) -> None:
    x = random(count) * 40
    expected = soft_cap_reference(x, 30.0)
    torch.testing.assert_close(launch_soft_cap(library, x.clone(), 30.0), expected, rtol=0, atol=30 * 8 * EPS)
    x[0], x[-1] = torch.nan, torch.nan
    assert launch_soft_cap(library, x, 30.0)[[0, -1]].isnan().all()
