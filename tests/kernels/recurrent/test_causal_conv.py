"""The causal convolution: torch's own, and the same bits in any chunks, company and from any saved state."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import pytest
import torch
from kernel_checks import CPU, EPS, TRITON_DEVICE, assert_within
from quire.kernels.recurrent.causal_conv import CausalConv, causal_conv_reference, launch_causal_conv
from recurrent_steps import OTHERS, Compute, Piece, check_steps, find_state, make_slots, run_step
from torch import Tensor
from torch.nn import functional as F

# (channels, kernel size, other numbers before the channels or None for gates, has a bias, activation)
CASES = [
    (64, 3, None, True, None),
    (150, 3, None, False, None),
    (5, 4, 3, True, "silu"),
    (130, 2, 64, False, "silu"),
    (33, 16, 0, True, None),
]


def make_conv(case: tuple[Any, ...], device: torch.device) -> tuple[CausalConv, int]:
    """The layer, and how wide its rows are."""
    num_channels, kernel_size, before, has_bias, activation = case
    generator = torch.Generator().manual_seed(1)
    weight, bias = (
        torch.randn(*shape, generator=generator).to(device)
        for shape in ((kernel_size, num_channels), (num_channels,))
    )
    first = 2 * num_channels if before is None else before
    conv = CausalConv(weight, bias if has_bias else None, OTHERS, first, before is None, activation)
    return conv, first + num_channels + (0 if before is None else 9)


def find_compute(implementation: str, library: ctypes.CDLL | None, conv: CausalConv) -> Compute:
    if implementation == "torch":
        return partial(causal_conv_reference, conv)
    if implementation == "native":
        assert library is not None
        return partial(launch_causal_conv, library, conv)
    from quire.kernels.recurrent import causal_conv_triton

    return partial(causal_conv_triton.launch_causal_conv, conv)


def compute_at_once(conv: CausalConv, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens by one convolution in float64: results, how large their terms are, and the last state."""
    count = conv.weight.shape[1]
    wide = x.double()
    u = wide[:, conv.first : conv.first + count]
    if conv.is_gated:
        u = u * wide[:, :count]
    padded = F.pad(u, (0, 0, len(conv.weight) - 1, 0)).t()
    bias = torch.zeros(count).double() if conv.bias is None else conv.bias.double().cpu()
    weight = conv.weight.double().cpu().t().unsqueeze(1)
    y = F.conv1d(padded, weight, bias, groups=count).t()
    sizes = F.conv1d(padded.abs(), weight.abs(), bias.abs(), groups=count).t()
    if conv.activation == "silu":
        y = F.silu(y)
    if conv.is_gated:
        after = wide[:, count : 2 * count]
        y, sizes = y * after, sizes * after.abs()
    return y, sizes, padded.t()[len(padded.t()) - len(conv.weight) + 1 :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("implementation", ["torch", "native", "triton"])
def test_chunks_and_saved_states_give_the_convolution_of_the_whole(
    implementation: str,
    case: tuple[Any, ...],
    dtype: torch.dtype,
    library: ctypes.CDLL,
    request: pytest.FixtureRequest,
) -> None:
    if implementation == "triton":
        request.getfixturevalue("triton_kernels")
    device = TRITON_DEVICE if implementation == "triton" else CPU
    conv, width = make_conv(case, device)
    x = torch.randn(73, width, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    compute, slots = find_compute(implementation, library, conv), make_slots(conv.state_size, device)
    [actual] = run_step(compute, slots, [Piece(2, 0, x)])
    expected, sizes, state = compute_at_once(conv, x.cpu())
    # A chain of products and sums, then exp and a quotient of silu; the rounding of the result.
    bound = (len(conv.weight) + 8) * EPS * sizes + (dtype is torch.bfloat16) * 2**-8 * expected.abs() + 1e-30
    assert_within(actual.cpu().double(), expected, bound)
    assert_within(find_state(slots, 2).cpu().double().view_as(state), state, EPS * state.abs())
    # Interpreted, many steps take long: one case has them.
    chunks = (29,) if implementation == "triton" and len(conv.weight) != 4 else (1, 7, 33)
    check_steps(compute, conv.state_size, x, 2**-7 if implementation == "torch" else 0.0, chunks)
