"""Every operation of the table (operation_cases.py): right, and the same bits for a row in any company."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kernel_checks import EPS, TRITON_DEVICE, assert_within
from operation_cases import (
    FORMS,
    NORM_KINDS,
    VARIANTS,
    Draw,
    Form,
    OpCase,
    draw_narrow,
    find_launch,
    list_cases,
    narrow_linear,
    plain_linear,
)
from quire.kernels.linear import linear
from quire.kernels.linear.experts import Router, launch_route
from quire.kernels.linear.gated_activation import launch_gated_activation
from quire.kernels.linear.linear import Variant, find_variants
from quire.kernels.norm.rms_norm import rms_norm_reference

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # as meant: the gate is then 0
    pytest.mark.filterwarnings("ignore:invalid value encountered"),  # of NaN, in the interpreter
]

# Around the rows that kernels take together.
COUNTS = (1, 2, 3, 6, 7, 13, 16, 17, 31, 33, 48, 65, 97, 128, 250, 257)


def require(implementation: str, library: ctypes.CDLL) -> None:
    if implementation == "triton":
        pytest.importorskip("triton")
    elif implementation in VARIANTS and Variant[implementation] not in find_variants(library):
        pytest.skip("this processor has no such instructions")


@pytest.fixture
def cases(request: pytest.FixtureRequest, library: ctypes.CDLL) -> list[tuple[Any, ...]]:
    require(request.param[0][1], library)
    return request.param


def check_all(cases: list[tuple[Any, ...]], check: Callable[[OpCase], object]) -> None:
    """Each case; what fails says which it is of."""
    for make, *arguments in cases:
        try:
            check(make(*arguments))
        except Exception as error:
            error.add_note(f"{make.__name__} of {arguments}")
            raise


@pytest.mark.parametrize("cases", list_cases(), indirect=True)
def test_an_operation_gives_what_its_reference_does(cases: list[tuple[Any, ...]]) -> None:
    def check(case: OpCase) -> None:
        for actual, expected, bound in zip(case.run(), case.expected, case.bounds, strict=True):
            assert actual.dtype in (expected.dtype, case.rows[0].dtype)
            if isinstance(bound, float) and bound == 0.0:
                assert torch.equal(actual, expected.to(actual.dtype))
            else:
                assert_within(actual.double(), expected.double(), bound)

    check_all(cases, check)


@pytest.mark.usefixtures("dots_in_order")
@pytest.mark.parametrize("cases", list_cases("by parts"), indirect=True)
def test_rows_have_the_same_bits_in_any_company_and_on_any_threads(
    cases: list[tuple[Any, ...]], set_threads: Callable[[int], None]
) -> None:
    is_triton = cases[0][1] == "triton"

    def check(case: OpCase) -> None:
        num_rows = len(case.rows[0])
        set_threads(1)
        whole = case.run()
        set_threads(3)
        counts = [count for count in ((1, 3) if is_triton else COUNTS) if count < num_rows]
        parts = [slice(num_rows - count, num_rows) for count in counts]
        if not is_triton:
            parts += [slice(0, count) for count in (0, *counts, num_rows)]
            parts += [slice(row, row + 1) for row in range(0, num_rows, 1 + num_rows // 40)]
        for part in parts:
            for actual, expected in zip(case.run(part), whole, strict=True):
                assert torch.equal(actual, expected[part]), part
        set_threads(8)
        assert is_triton or all(map(torch.equal, case.run(), whole))

    check_all(cases, check)


@pytest.mark.parametrize("cases", list_cases("last"), indirect=True)
def test_what_is_not_finite_stays_in_its_row(cases: list[tuple[Any, ...]]) -> None:
    [(make, *arguments)] = cases
    case: OpCase = make(*arguments)
    x, num_rows = case.rows[0], len(case.rows[0])
    if num_rows < 3 or not x.is_floating_point():
        pytest.skip("rows of numbers are too few")
    clean = case.run()
    for row, value in ((1, torch.nan), (num_rows - 1, torch.inf)):
        x[row : row + 1].view(-1)[x[0].numel() // 2] = value
    dirty = case.run()
    others = [0, *range(2, num_rows - 1)]
    for actual, expected in zip(dirty, clean, strict=True):
        assert torch.equal(actual[others], expected[others])
    if dirty[0].is_floating_point() and clean[0][1].isfinite().all():
        assert dirty[0][1].isnan().any()


@pytest.mark.parametrize("implementation", ["native", "triton"])
def test_a_norm_rounds_where_its_reference_does(implementation: str, library: ctypes.CDLL) -> None:
    """In bfloat16 nearly all numbers equal the reference's; rounded in another place a quarter would not."""
    require(implementation, library)
    launch, draw = find_launch(implementation, "norm.rms_norm"), Draw(implementation, torch.bfloat16)
    x, weight = draw(8, 1500), draw(1500)
    for kind in NORM_KINDS:
        expected = rms_norm_reference(x, weight, 1e-5, *kind)
        assert (launch(x, None, weight, 1e-5, *kind) == expected).float().mean() > 0.98, kind


def test_the_exponential_is_good_to_two_units_in_the_last_place(library: ctypes.CDLL) -> None:
    x = torch.cat([torch.linspace(-80, 80, 200_001), torch.linspace(-1, 1, 100_001), torch.zeros(1)])
    gate_up = torch.stack([x, torch.ones_like(x)])
    actual = launch_gated_activation(library, gate_up.t().contiguous(), "silu").flatten().double()
    expected = x.double() * torch.sigmoid(x.double())
    # x / (1 + e^-x): two units of the exponential, then half a unit each for the sum and the quotient.
    assert_within(actual, expected, 3 * EPS * expected.abs())


def test_every_code_in_every_place_of_a_tile_is_multiplied_as_itself(
    library: ctypes.CDLL, variant: Variant
) -> None:
    codes = (torch.arange(64 * 160).view(64, 160) * 7 % 256).to(torch.uint8)
    for bits in (4, 8):
        whole = codes & (1 << bits) - 1
        stored = whole if bits == 8 else whole[:, 0::2] | whole[:, 1::2] << 4
        packed = linear.pack_narrow_linear(library, variant, stored, torch.ones(64, 1), bits, 160)
        expected = (whole.T.int() - (1 << bits - 1)).bfloat16()
        table = linear.make_table(packed, variant)
        assert torch.equal(linear.launch_linear(library, table, torch.eye(160).bfloat16()), expected)


def test_the_best_variant_is_the_last_that_runs_here(library: ctypes.CDLL) -> None:
    assert linear.choose_variant(library) == find_variants(library)[-1]
    assert find_variants(library)[0] == Variant.VECTOR


@pytest.mark.usefixtures("dots_in_order", "triton_kernels")
@pytest.mark.parametrize(
    "case",
    [
        (plain_linear, "triton", torch.bfloat16, (20, 272, 70), True, None, is_int8)
        for is_int8 in (False, True)
    ]
    + [(narrow_linear, "triton", torch.bfloat16, FORMS[3], (20, 272, 70), True, None)],
    ids=lambda case: case[0].__name__,
)
def test_many_rows_in_triton_have_the_bits_that_few_have(case: tuple[Any, ...]) -> None:
    make, *arguments = case
    [few], [many] = make(*arguments).run(), make(*arguments, takes_many=True).run()
    assert torch.equal(few, many)


@pytest.mark.skipif(TRITON_DEVICE.type == "cpu", reason="the sizes of real models, for a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_in", "num_out"), [(3072, 1024), (1024, 6144), (4096, 28672), (1024, 151_936)])
def test_rows_of_real_layers_have_the_same_bits_in_any_number(
    num_in: int, num_out: int, dtype: torch.dtype
) -> None:
    draw, launch = Draw("triton", dtype), find_launch("triton", "linear.linear")
    x, weight = draw(2048, num_in), draw(num_out, num_in)
    many = launch(x, weight)
    for rows in (1, 3, 16, 17, 64, 65, 300, 1024):
        assert torch.equal(launch(x[:rows], weight), many[:rows]), rows
        assert torch.equal(launch(x[-rows:], weight), many[-rows:]), rows


@pytest.mark.usefixtures("triton_kernels")
def test_triton_gives_nothing_for_no_rows_and_refuses_what_it_would_read_wrongly() -> None:
    draw = Draw("triton")
    turned, table, weight = draw(8, 3).t(), draw(4, 8), draw(8)
    nothing = torch.zeros(0, dtype=torch.int64, device=draw.device)
    words, rows = (torch.zeros(*shape, device=draw.device) for shape in ((1, 2), (1,)))
    gather, norm = (find_launch("triton", name) for name in ("program.gather_rows", "norm.rms_norm"))
    activate, multiply = (find_launch("triton", f"linear.{name}") for name in ("gated_activation", "linear"))
    total, mask = (find_launch("triton", f"sampling.{name}") for name in ("log_totals", "token_bitmask"))
    assert gather(table, nothing).shape == (0, 8)
    assert norm(draw(0, 8), None, weight, 1e-6).shape == (0, 8)
    assert activate(draw(0, 8), "silu").shape == multiply(draw(0, 8), table).shape == (0, 4)
    assert [part.shape for part in total(draw(0, 5), nothing)] == [(0,), (0,)]
    for refused in (
        lambda: gather(turned, nothing),
        lambda: norm(turned, None, weight, 1e-6),
        lambda: activate(draw(1, 8), "softmax"),
        lambda: multiply(turned, table),
        lambda: multiply(draw(3, 8), table, None, draw(4)),
        lambda: total(turned, nothing),
        lambda: mask(draw(1, 65), words.int(), rows.long()),
    ):
        with pytest.raises(AssertionError):
            refused()


@pytest.mark.usefixtures("triton_kernels")
def test_a_narrow_weight_on_a_gpu_holds_no_more_bytes_than_its_format_says() -> None:
    from quire.kernels.linear.narrow_linear_triton import launch_narrow_linear, pack_narrow_weight

    arguments, _ = draw_narrow(Draw("triton"), Form(4, 64, has_offsets=True), 64, 256)
    packed = pack_narrow_weight(**arguments)
    assert packed.size_bytes == 64 * 128 + 64 * 4 * (4 + 4)
    assert launch_narrow_linear(Draw("triton")(0, 256), packed).shape == (0, 64)


@pytest.mark.usefixtures("triton_kernels")
def test_a_negative_slot_is_written_nowhere() -> None:
    draw = Draw("triton")
    qkv, cos = draw(3, 4 * 16), torch.ones(3, 8, device=draw.device)
    k_cache, v_cache = (torch.zeros(2, 1, 8, 16, device=draw.device) for _ in range(2))
    slots = torch.tensor([-1, 5, -1], device=draw.device)
    launch = find_launch("triton", "attention.rotate_and_write")
    launch(qkv, 2, cos, torch.zeros_like(cos), None, k_cache, v_cache, slots)
    for written, column in ((k_cache, 2), (v_cache, 3)):
        assert torch.equal(written[0, 0, 5], qkv[1, column * 16 : (column + 1) * 16])
        assert written.count_nonzero() == 16


@pytest.mark.usefixtures("triton_kernels")
@pytest.mark.skipif(TRITON_DEVICE.type != "cpu", reason="of the interpreter")
def test_the_interpreters_product_and_sum_are_rounded_once() -> None:
    from triton_interpreter import multiply_and_add

    # The product is half way between two numbers, and float64 loses what is added to it.
    x, z = np.float32([1 + 2.0**-12] * 3), np.float32([2.0**-60, 0, -(2.0**-60)])
    assert multiply_and_add(x, x, z).tolist() == [1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-11, 1 + 2.0**-11]


def test_equal_logits_go_to_the_first_experts_and_bad_ones_to_some(library: ctypes.CDLL) -> None:
    logits = torch.tensor(
        [[1.0, 2.0, 2.0, 2.0], [torch.nan] * 4, [-torch.inf] * 4, [0.0, torch.nan, 1.0, 3.0]]
    )
    choices, weights = launch_route(library, logits, Router(4, 2))
    assert choices[0].tolist() == [1, 2]
    assert ((choices >= 0) & (choices < 4)).all()
    assert (choices[:, 0] < choices[:, 1]).all()
    assert weights[1:].isnan().all()
