"""Mamba-2's recurrence: transformers' own, and the same bits in any chunks, company and from saved states."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from kernel_checks import CPU, TRITON_DEVICE
from quire.kernels.recurrent.mamba2 import Mamba2, from_native_state, launch_mamba2, mamba2_reference
from quire.kernels.recurrent.states import RequestStates
from recurrent_steps import OTHERS, Piece, check_steps, find_state, make_slots, run_step
from torch import Tensor

# (heads, numbers of a head, groups, rows of a state, least step): whole blocks, halves, less than a vector.
CASES = [(4, 64, 1, 128, 0.0), (6, 80, 2, 17, 0.3), (3, 9, 3, 8, 0.0)]
SMALL_CASES = [(2, 20, 1, 17, 0.3), (2, 9, 2, 8, 0.0)]  # the interpreter takes long


def make_scan(case: tuple[int, int, int, int, float], device: torch.device) -> Mamba2:
    heads, head_size, num_groups, num_rows, least = case
    generator = torch.Generator().manual_seed(1)
    rate, shift, skip = (torch.randn(heads, generator=generator).to(device) for _ in range(3))
    return Mamba2(rate.exp(), shift, skip, head_size, num_groups, num_rows, (least, 4.0), OTHERS)


def compute_by_transformers(scan: Mamba2, rows: Tensor) -> tuple[Tensor, Tensor]:
    """One token after the other by the update of the state that decodes take."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

    heads = len(scan.rate)
    x, b, c = scan.split(rows[:, heads:].float())
    step = torch.nn.functional.softplus(rows[:, :heads].float() + scan.shift).clamp(*scan.step_limit)
    state = torch.zeros(1, heads, scan.head_size, scan.num_rows)
    parts = list[Tensor]()
    spread: Any = lambda numbers: numbers[:, None].expand(-1, scan.head_size)  # noqa: E731
    for token in range(len(rows)):
        parts.append(
            mamba2_selective_state_update(
                state,
                x[token][None],
                spread(step[token])[None],
                -spread(scan.rate)[..., None].expand(-1, -1, scan.num_rows),
                b[token][None],
                c[token][None],
                spread(scan.skip),
            )
        )
    return torch.cat(parts).flatten(1), state[0].transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("implementation", "case"),
    [
        *((name, case) for name in ("torch", "native") for case in CASES),
        *(("triton", case) for case in SMALL_CASES),
    ],
    ids=str,
)
def test_chunks_and_saved_states_give_transformers_recurrence(
    implementation: str,
    case: tuple[int, int, int, int, float],
    dtype: torch.dtype,
    library: ctypes.CDLL,
    request: pytest.FixtureRequest,
) -> None:
    device = CPU
    if implementation == "triton":
        request.getfixturevalue("triton_kernels")
        device = TRITON_DEVICE
    scan = make_scan(case, device)
    heads = len(scan.rate)

    def compute(states: RequestStates, rows: Tensor) -> Tensor:
        dt, x = rows[:, :heads], rows[:, heads:].contiguous()
        if implementation == "torch":
            return mamba2_reference(scan, states, x, dt)
        if implementation == "native":
            return launch_mamba2(library, scan, states, x, dt)
        from quire.kernels.recurrent import mamba2_triton

        return mamba2_triton.launch_mamba2(scan, states, x, dt)

    width = heads * (1 + scan.head_size) + 2 * scan.num_groups * scan.num_rows
    rows = torch.randn(71, width, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    slots = make_slots(scan.state_size, device)
    [actual] = run_step(compute, slots, [Piece(2, 0, rows)])
    expected, state = compute_by_transformers(
        scan._replace(rate=scan.rate.cpu(), shift=scan.shift.cpu(), skip=scan.skip.cpu()), rows.cpu()
    )
    # Each sum's terms are rounded some ten times, and errors of a state decay as it does.
    size, rounding = expected.abs().max().item(), 2**-8 if dtype is torch.bfloat16 else 0.0
    torch.testing.assert_close(actual.cpu().float(), expected, rtol=rounding, atol=2**-20 * size)
    own = find_state(slots, 2).cpu()
    found = from_native_state(scan, own) if implementation == "native" else own.view(scan.state_shape)
    torch.testing.assert_close(found[:, :, : scan.head_size], state, rtol=1e-5, atol=2**-20 * size)
    check_steps(
        compute,
        scan.state_size,
        rows,
        2**-7 if implementation == "torch" else 0.0,
        (29,) if implementation == "triton" else (1, 7, 33),
    )
