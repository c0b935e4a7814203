"""Every operation whose rows are computed by themselves: inputs, right results, and bounds of errors.

One table for all implementations. u is half of a type's epsilon. A chain of n roundings of float32 is off by
at most n u relative to the sum of magnitudes (Higham 3.1); kernel and reference may each be off by that, and
may then round to 16 bits apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from cache_layout import from_native_layout
from kernel_checks import CPU, EPS, TRITON_DEVICE
from quire.kernels.attention.narrow_cache import SCALE_SIZE, view_parts
from quire.kernels.attention.rotate_and_write import (
    QKNorm,
    rotate_and_write_reference,
    rotate_latent_reference,
)
from quire.kernels.choice import native_library
from quire.kernels.linear import linear
from quire.kernels.linear.experts import (
    Router,
    experts_reference,
    launch_experts,
    launch_route,
    route_reference,
)
from quire.kernels.linear.gated_activation import ACTIVATIONS, FUNCTIONS, gated_activation_reference
from quire.kernels.linear.head_products import launch_multiply_heads, multiply_heads_reference
from quire.kernels.linear.linear import Variant
from quire.kernels.linear.product import product_reference
from quire.kernels.linear.xielu import XieluNumbers, xielu_reference
from quire.kernels.norm.layer_norm import layer_norm_reference
from quire.kernels.norm.rms_norm import add_rms_norm_reference, rms_norm_reference
from quire.kernels.program.program import LinearTable
from quire.kernels.sampling.argmax import argmax_reference
from quire.kernels.sampling.log_totals import log_totals_reference
from quire.kernels.sampling.penalties import penalize_reference
from quire.kernels.sampling.soft_cap import soft_cap_reference
from quire.kernels.sampling.token_bitmask import apply_token_bitmask_reference
from quire.worker.layers.feed_forward import MLP, GatedActivation
from quire.worker.layers.linear import NativeLinear
from torch import Tensor
from torch.nn import functional as F

Outputs = tuple[Tensor, ...]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
VARIANTS = tuple(variant.name for variant in Variant)
# (weight offset, rounds_normed) of the norms that models have.
NORM_KINDS = [(0.0, True), (0.0, False), (1.0, False)]


@dataclass(frozen=True, eq=False)
class OpCase:
    """An operation on some inputs.

    `compute` takes copies of `rows`, which it may overwrite, or of some rows of each; all that it gives has a
    row for each of theirs, `expected` within `bounds`.
    """

    rows: Outputs
    compute: Callable[..., Outputs]
    expected: Outputs
    bounds: tuple[Tensor | float, ...]

    def run(self, rows: slice = slice(None)) -> Outputs:
        return self.compute(*(part[rows].clone() for part in self.rows))


class Draw:
    """Random numbers around 0 of standard deviation 1, other ones with each call."""

    def __init__(self, implementation: str, dtype: torch.dtype = F32) -> None:
        self.device = TRITON_DEVICE if implementation == "triton" else CPU
        self._dtype, self.generator = dtype, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, dtype or self._dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype).to(self.device)


def find_launch(implementation: str, operation: str, name: str | None = None) -> Callable[..., Any]:
    """The launcher in the operation's file, of the same name or `name`; the native one with its library."""
    name = name or operation.rpartition(".")[2]
    suffix = "_triton" if implementation == "triton" else ""
    launch = getattr(import_module(f"quire.kernels.{operation}{suffix}"), f"launch_{name}")
    return launch if suffix else partial(launch, native_library())


def unit(dtype: torch.dtype) -> float:
    """Of the one rounding to 16 bits; a chain's bound has that of float32."""
    return 0.0 if dtype is F32 else torch.finfo(dtype).eps / 2


def rms_norm(
    implementation: str, dtype: torch.dtype, rows: int, size: int, kind: tuple[float, bool], form: str
) -> OpCase:
    launch, draw = find_launch(implementation, "norm.rms_norm"), Draw(implementation, dtype)
    x, weight = draw(rows, size), draw(size)
    # The product is rounded to the type, and the normed value before it; the sum of squares adds its chain.
    relative = (1 + kind[1]) * torch.finfo(dtype).eps + (size + 6) * EPS
    if form == "added":

        def add(x: Tensor, residual: Tensor) -> Outputs:
            return launch(x, residual, weight, 1e-5, *kind), residual

        residual = draw(rows, size)
        expected = add_rms_norm_reference(x, residual, weight, 1e-5, *kind)
        return OpCase((x, residual), add, expected, (relative * expected[0].abs(), 0.0))
    normed = rms_norm_reference(x, weight, 1e-5, *kind)
    if form == "alone":
        bound = relative * normed.abs()
        return OpCase((x,), lambda x: (launch(x, None, weight, 1e-5, *kind),), (normed,), (bound,))

    def compute_in_place(wide: Tensor) -> Outputs:
        launch(wide[:, 20 : 20 + size], None, weight, 1e-5, *kind, in_place=True)
        return (wide,)

    wide = torch.cat([draw(rows, 20), x, draw(rows, 17)], 1)
    expected = torch.cat([wide[:, :20], normed, wide[:, 20 + size :]], 1)
    bound = torch.zeros_like(expected)
    bound[:, 20 : 20 + size] = relative * normed.abs()
    return OpCase((wide,), compute_in_place, (expected,), (bound,))


def layer_norm(
    implementation: str, dtype: torch.dtype, rows: int, size: int, has_bias: bool, adds: bool
) -> OpCase:
    launch, draw = find_launch(implementation, "norm.layer_norm"), Draw(implementation, dtype)
    x, residual, weight = draw(rows, size) + 3, draw(rows, size), draw(size)
    bias = draw(size) if has_bias else None
    total = x.float() + residual.float() if adds else x.float()
    expected = layer_norm_reference(total, weight, bias, 1e-5)
    # Less the mean, numbers keep the rounding of their size; a chain adds up mean and variance.
    mean = total.mean(-1, keepdim=True)
    factor = torch.rsqrt((total - mean).square().mean(-1, keepdim=True) + 1e-5)
    sizes = (total.abs() + total.abs().mean(-1, keepdim=True)) * factor * weight.float().abs()
    bound = torch.finfo(dtype).eps * expected.abs().float() + (size + 6) * EPS * (sizes + 1)
    if not adds:
        return OpCase((x,), lambda x: (launch(x, None, weight, bias, 1e-5),), (expected,), (bound,))

    def add(x: Tensor, residual: Tensor) -> Outputs:
        return launch(x, residual, weight, bias, 1e-5), residual

    return OpCase((x, residual), add, (expected, total.to(dtype)), (bound, 0.0))


def gated_activation(
    implementation: str, dtype: torch.dtype, rows: int, size: int, activation: str
) -> OpCase:
    launch, draw = find_launch(implementation, "linear.gated_activation"), Draw(implementation, dtype)
    gate_up = draw(rows, 2 * size) * 5
    gate_up[0, 0] = -200.0  # exp(200) is beyond float32
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gated_activation_reference(gate_up.double(), activation)
    if implementation == "triton":
        # 1 + erf and 1 + tanh cancel for negative gates: their error is relative to the gate, not the result.
        bound = 2 * torch.finfo(dtype).eps * expected.abs() + 8 * EPS * (gate * up).abs()
        bound += torch.finfo(dtype).tiny * (1 + up.abs())  # a GPU may flush what is below to 0
    else:
        # exp is good to 2 units, then a sum, a quotient, a product.
        bound = (2 * max(unit(dtype), EPS) + 8 * EPS) * expected.abs() + torch.finfo(F32).tiny * 1e4
        if activation == "clamped_swiglu":  # the exponent and up + 1 are rounded in float32
            alone = gated_activation_reference(torch.cat((gate, torch.zeros_like(up)), 1), activation)
            bound += 8 * EPS * alone.abs() + 4 * EPS * (1.702 * gate.abs()).clamp(1, 88) * expected.abs()
        if activation.startswith("gelu"):
            # The gelus' exponent takes 4 roundings to compute: the tail is off by as many units times it.
            exponent = gate**2 / 2 if activation == "gelu" else 1.6 * gate.abs() * (1 + 0.045 * gate**2)
            bound += 4 * EPS * torch.where(gate < 0, exponent.clamp(1, 88), 1) * expected.abs()
            bound += 1e-15 * (gate * up).abs()  # the reference's own cancellation
    return OpCase((gate_up,), lambda x: (launch(x, activation),), (expected,), (bound,))


def gather_rows(implementation: str, dtype: torch.dtype, size: int) -> OpCase:
    launch, draw = find_launch(implementation, "program.gather_rows"), Draw(implementation, dtype)
    table, index = draw(7, size), torch.tensor([6, 0, 3, 3, 6], device=draw.device)
    return OpCase((index,), lambda index: (launch(table, index),), (table[index],), (0.0,))


def plain_linear(
    implementation: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    has_bias: bool = False,
    activation: str | None = None,
    is_int8: bool = False,
    takes_many: bool = False,
) -> OpCase:
    """`shape` is (rows, inputs, outputs)."""
    draw, (rows, num_in, num_out) = Draw(implementation, dtype), shape
    x, bias = draw(rows, num_in) * (num_in**-0.5 if activation else 1), draw(num_out) if has_bias else None
    if is_int8:
        weight, scale = (
            draw.integers(-127, 128, num_out, num_in, dtype=torch.int8),
            draw(num_out).abs().float(),
        )
        numbers = weight.double() * scale.double()[:, None]
    else:
        weight, scale = draw(num_out, num_in), None
        numbers = weight.double()
    if implementation == "triton":
        launch = partial(launch_in_segments, takes_many, "linear", weight=weight, bias=bias, scale=scale)
    else:
        packed = linear.pack_linear(native_library(), weight)
        launch = make_native_linear(implementation, packed, bias, activation)
    expected, bound = bound_linear(x, numbers, bias, activation, num_in + 2)
    return OpCase((x,), lambda x: (launch(x),), (expected,), (bound,))


def launch_in_segments(takes_many: bool, name: str, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Through the kernels for few rows, or for many, with sums cut as those of much longer rows are."""
    module = import_module(f"quire.kernels.linear.{name}_triton")
    constants = {"_MIN_SEGMENT": 128} | ({"_FEW_ROWS": 16, "_ENOUGH_TILES": 1} if takes_many else {})
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in constants.items():
            patch.setattr(f"quire.kernels.linear.linear_triton.{constant}", value)
        if takes_many:
            patch.setattr(module, f"_{name}_few", None)
        return getattr(module, f"launch_{name}")(x, *arguments, **options)


def make_native_linear(
    variant: str, packed: linear.PackedWeight, bias: Tensor | None, activation: str | None
) -> Callable[[Tensor], Tensor]:
    table = linear.make_table(packed, Variant[variant], bias, activation)
    return partial(launch_with, table, (packed, bias))


def launch_with(table: LinearTable, kept: object, x: Tensor) -> Tensor:
    """`kept` is what the table has addresses of."""
    del kept
    return linear.launch_linear(native_library(), table, x)


def bound_linear(
    x: Tensor,
    numbers: Tensor,
    bias: Tensor | None,
    activation: str | None,
    num_roundings: int,
    magnitudes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y in float64 for float64 `numbers`, and how far off the sum of x's type may be.

    A sum of n products, each addition rounded to float32 in any order, is off by at most n * eps times the
    sum of magnitudes, of the numbers themselves or larger ones; then there is the rounding of the result.
    """
    shift = torch.zeros(()).double() if bias is None else bias.double()
    expected = x.double() @ numbers.T + shift
    magnitudes = numbers.abs() if magnitudes is None else magnitudes
    bound = num_roundings * EPS * (x.double().abs() @ magnitudes.T + shift.abs()) + 1e-30
    if activation is not None:
        expected = FUNCTIONS[activation](expected)
        bound = 1.2 * bound + 8 * EPS  # 1.2: the steepest slope of all of them
        bound += 7e-5 * (activation == "gelu" and x.dtype is BF16)
    return expected, bound + unit(x.dtype) * expected.abs()


@dataclass(frozen=True, slots=True)
class Form:
    """How a narrow weight is stored."""

    bits: int
    group_size: int = 0
    scale_dtype: torch.dtype = F32
    has_offsets: bool = False
    has_codebook: bool = False
    is_fp8: bool = False
    is_permuted: bool = False


FORMS = [
    Form(4, 16),
    Form(4, 32, has_offsets=True),
    Form(4, 64, BF16),
    Form(4, 128, has_codebook=True),
    Form(4, 48, BF16, has_offsets=True, has_codebook=True),
    Form(4),
    Form(4, is_permuted=True),
    Form(8),
    Form(8, 16, has_offsets=True),
    Form(8, 64, BF16),
    Form(8, 32, is_permuted=True),
    Form(8, has_offsets=True),
    Form(8, is_fp8=True),
    Form(8, 128, is_fp8=True),
]


def draw_narrow(draw: Draw, form: Form, num_out: int, num_in: int) -> tuple[dict[str, Any], Tensor]:
    """Arguments of `pack_narrow_linear`, and the numbers as float64 [N, K], in which they are exact.

    A codebook's are bfloat16's. A permuted weight's numbers are in the order of its codes.
    """
    groups = -(-num_in // form.group_size) if form.group_size else 1
    scales = (draw(num_out, groups, dtype=F32).abs() / 8).to(form.scale_dtype)
    offsets = draw(num_out, groups, dtype=F32) if form.has_offsets else None
    codebook = draw(16, dtype=BF16).float() if form.has_codebook else None
    codes = draw.integers(0, 1 << form.bits, num_out, num_in, dtype=torch.uint8)
    stored, units = codes, codes.double()
    if form.is_fp8:
        stored = torch.where(codes & 127 == 127, 0, codes).view(torch.float8_e4m3fn)
        units = stored.double()
    elif form.bits == 4:
        padded = torch.nn.functional.pad(codes, (0, num_in % 2))
        stored = padded[:, 0::2] | padded[:, 1::2] << 4
    if codebook is not None:
        units = codebook.double()[codes.int()]
    elif offsets is None and not form.is_fp8:
        units = units - (1 << form.bits - 1)

    def spread(numbers: Tensor) -> Tensor:
        return numbers.double().repeat_interleave(form.group_size or num_in, 1)[:, :num_in]

    arguments: dict[str, Any] = {"codes": stored, "scales": scales, "bits": form.bits, "num_in": num_in}
    arguments |= {"group_size": form.group_size, "offsets": offsets, "codebook": codebook}
    if form.is_permuted:
        arguments["permutation"] = torch.randperm(num_in, generator=draw.generator).int().to(draw.device)
    return arguments, units * spread(scales) - (0 if offsets is None else spread(offsets))


def narrow_linear(
    implementation: str,
    dtype: torch.dtype,
    form: Form,
    shape: tuple[int | None, int, int],
    has_bias: bool = False,
    activation: str | None = None,
    takes_many: bool = False,
) -> OpCase:
    """`shape` is (rows, inputs, outputs); without rows each input is 1 by itself.

    PAIR rounds no weight and adds a group up before it scales the sum; the other native variants have the
    bits of a plain layer with the numbers that the codes stand for, but for where the bias is added.
    """
    draw, (rows, num_in, num_out) = Draw(implementation, dtype), shape
    arguments, numbers = draw_narrow(draw, form, num_out, num_in)
    x = draw(rows, num_in) / 16 if rows else torch.eye(num_in, dtype=dtype, device=draw.device)
    bias = draw(num_out) if has_bias else None
    order = arguments.get("permutation")
    sorted_x = x if order is None else x[:, order.long()].contiguous()
    if implementation == "triton":
        module = import_module("quire.kernels.linear.narrow_linear_triton")
        weight = module.pack_narrow_weight(**arguments)
        launch = partial(launch_in_segments, takes_many, "narrow_linear", weight=weight, bias=bias)
        rounded = numbers.float().to(dtype).double()
        expected, bound = bound_linear(sorted_x, rounded, bias, None, num_in + 8)
        return OpCase((x,), lambda x: (launch(x),), (expected,), (bound if rows else 0.0,))
    variant = Variant[implementation]
    packed = linear.pack_narrow_linear(native_library(), variant, **arguments)
    launch = make_native_linear(implementation, packed, bias, activation)
    rounded = numbers.bfloat16() if variant is Variant.TILE else numbers.float()
    if has_bias or (variant is Variant.PAIR and dtype is BF16):
        numbers = rounded.double() if variant is Variant.TILE else numbers
        largest = numbers.abs()
        if form.has_offsets:  # units and offset are added up apart, and may cancel out
            largest = largest.amax(1, keepdim=True).expand_as(numbers) * 2
        num_roundings = num_in + 4 * arguments["scales"].shape[1] + 2
        expected, bound = bound_linear(sorted_x, numbers, bias, activation, num_roundings, largest)
        return OpCase((x,), lambda x: (launch(x),), (expected,), (bound,))
    plain = make_native_linear(implementation, linear.pack_linear(native_library(), rounded), None, None)
    expected = plain(sorted_x.to(rounded.dtype)).to(dtype)
    return OpCase((x,), lambda x: (launch(x),), (expected,), (0.0,))


def xielu(implementation: str, dtype: torch.dtype, size: int) -> OpCase:
    launch, draw = find_launch(implementation, "linear.xielu"), Draw(implementation, dtype)
    numbers = XieluNumbers(alpha_p=0.7, alpha_n=1.2, beta=0.5, eps=-1e-6)
    x = draw(size) * 5
    x[0] = -200.0
    expected = xielu_reference(x.double(), numbers)
    # A few roundings of the largest term; exp(x) - 1 - x cancels near 0.
    bound = unit(dtype) * expected.abs() + 16 * EPS * (1 + x.double().square())
    return OpCase((x,), lambda x: (launch(x.clone(), numbers),), (expected,), (bound,))


def product(implementation: str, dtype: torch.dtype, rows: int, size: int, gate: str | None) -> OpCase:
    """By columns of longer rows."""
    launch, draw = find_launch(implementation, "linear.product"), Draw(implementation, dtype)
    x, y = draw(rows, size), draw(rows, size + 5) * 5
    y[0, 3] = -200.0  # exp(200) is beyond float32
    expected = product_reference(x.double(), y[:, 3 : 3 + size].double(), gate)
    # exp is good to 2 units, then a sum, a quotient, a product.
    bound = (unit(dtype) + 8 * EPS) * expected.abs() + torch.finfo(F32).tiny * 1e4
    return OpCase((x, y), lambda x, y: (launch(x, y[:, 3 : 3 + size], gate),), (expected,), (bound,))


def soft_cap(implementation: str, dtype: torch.dtype, count: int) -> OpCase:
    launch, x = find_launch(implementation, "sampling.soft_cap"), Draw(implementation, dtype)(count) * 40
    return OpCase((x,), lambda x: (launch(x, 30.0),), (soft_cap_reference(x, 30.0),), (30 * 8 * EPS,))


def route(
    implementation: str,
    dtype: torch.dtype,
    rows: int,
    num_experts: int,
    per_token: int,
    router: dict[str, Any],
) -> OpCase:
    del implementation
    # Distinct in bfloat16 too: which of two equal ones is taken is the kernel's own rule, the lower.
    logits = (Draw("native")(rows, num_experts).argsort(1) * 0.25 - 4).to(dtype)
    correction = Draw("native", dtype=F32)(num_experts) if router.get("is_sigmoid") else None
    routing = Router(num_experts, per_token, correction=correction, **router)
    choices, weights = route_reference(logits, routing)
    return OpCase(
        (logits,),
        lambda logits: launch_route(native_library(), logits, routing),
        (choices.int(), weights),
        (0.0, (num_experts + 8) * EPS * weights),
    )


def experts(implementation: str, dtype: torch.dtype) -> OpCase:
    draw, hidden, width = Draw(implementation, dtype), 48, 72
    activation = GatedActivation("silu", dtype, CPU)

    def make_linear(*shape: int) -> NativeLinear:
        return NativeLinear(native_library(), draw(*shape) * 0.2, None, dtype)

    def list_tables(linears: list[NativeLinear]) -> Any:
        return (LinearTable * len(linears))(*(linear.to_table() for linear in linears))

    gate_up = [make_linear(2 * width, hidden) for _ in range(8)]
    down = [make_linear(hidden, width) for _ in range(8)]
    layers = [MLP(*pair, width) for pair in zip(gate_up, itertools.repeat(activation), down, strict=False)]
    x, logits = draw(130, hidden), draw(130, 8, dtype=F32)
    choices, weights = launch_route(native_library(), logits, Router(8, 3))
    expected = experts_reference(x, choices, weights, layers)
    # The same kernels, and the same order of the sum: what differs is a rounding of each product.
    bound = (4 * EPS if dtype is F32 else unit(dtype)) * expected.abs().max().item()

    def compute(x: Tensor, choices: Tensor, weights: Tensor) -> Outputs:
        tables = list_tables(gate_up), list_tables(down)  # addresses that hold while the layers live
        return (launch_experts(native_library(), x, choices, weights, *tables, "silu"),)

    return OpCase((x, choices, weights), compute, (expected,), (bound,))


def grouped_experts(
    implementation: str, dtype: torch.dtype, activation: str, has_bias: bool, scales_inputs: bool
) -> OpCase:
    from quire.kernels.linear.experts_triton import launch_grouped_experts

    draw, hidden, width, count = Draw(implementation, dtype), 48, 40, 8
    stacks = draw(count, 2 * width, hidden) * 0.2, draw(count, hidden, width) * 0.2
    biases = (draw(count, 2 * width), draw(count, hidden)) if has_bias else (None, None)
    x, logits = draw(33, hidden), draw(33, count, dtype=F32)
    choices, weights = route_reference(logits, Router(count, 3))

    def multiply(rows: Tensor, part: int, expert: int) -> Tensor:
        bias = biases[part]
        return F.linear(rows, stacks[part][expert].float(), None if bias is None else bias[expert].float())

    def compute_expert(rows: Tensor, expert: int) -> Tensor:
        wide = multiply(rows.float(), 0, expert).to(dtype)
        return multiply(gated_activation_reference(wide, activation).float(), 1, expert).to(dtype)

    experts = [partial(compute_expert, expert=expert) for expert in range(count)]
    expected = experts_reference(x, choices, weights, experts, scales_inputs)
    # What rounds differs in the last place of each of three numbers on the way.
    bound = (40 * EPS if dtype is F32 else 4 * unit(dtype)) * expected.abs().max().item()

    def compute(x: Tensor, choices: Tensor, weights: Tensor) -> Outputs:
        gate_up, down = stacks
        first, last = biases
        edits = activation, first, last, scales_inputs
        return (launch_grouped_experts(x, choices, weights, gate_up, down, *edits),)

    return OpCase((x, choices, weights), compute, (expected,), (bound,))


def argmax(implementation: str, dtype: torch.dtype, size: int, value: float) -> OpCase:
    launch, draw = find_launch(implementation, "sampling.argmax"), Draw(implementation, dtype)
    logits = draw.integers(-9, 9, 40, size).float()  # most rows have several maxima
    logits[0, size // 2] = value
    logits[1, [0, size - 1]] = value
    logits[2, [max(0, size - 2), size - 1]] = value
    logits[3] = value
    return OpCase((logits,), launch, argmax_reference(logits), (0.0, 0.0))


def log_totals(implementation: str, dtype: torch.dtype, size: int) -> OpCase:
    launch, draw = find_launch(implementation, "sampling.log_totals"), Draw(implementation, dtype)
    logits = draw(3, size) * 4
    logits[1, : size // 2] = -torch.inf
    logits[2] = logits[2].round()  # equal logits share the rank of the first
    token_ids = torch.tensor([0, size - 1, size // 2], device=draw.device)
    # A sum of positive numbers by a tree of depth 12 and more by halves; the exponential errs by some units.
    return OpCase((logits, token_ids), launch, log_totals_reference(logits, token_ids), (64 * EPS, 0.0))


def token_bitmask(implementation: str, dtype: torch.dtype, rows: int, size: int) -> OpCase:
    """A row in five has none; the others come last first."""
    launch, draw = find_launch(implementation, "sampling.token_bitmask"), Draw(implementation, dtype)
    bitmask = draw.integers(-(2**31), 2**31, rows, -(-size // 32)).int()
    bitmask[0, ::2] = 0  # words of one bit alone are taken a shorter way
    bitmask[-1, ::2] = -1

    def apply(function: Callable[..., None], logits: Tensor, bitmask: Tensor, has_mask: Tensor) -> Outputs:
        places = has_mask.nonzero().flatten().flip(0)
        function(logits, bitmask[places].contiguous(), places)
        return (logits,)

    inputs = draw(rows, size), bitmask, torch.arange(rows, device=draw.device) % 5 != 1
    bits = np.unpackbits(bitmask.cpu().numpy().view(np.uint8), axis=1, count=size, bitorder="little")
    is_forbidden = (torch.from_numpy(bits).to(draw.device) == 0) & inputs[2].unsqueeze(1)
    expected = inputs[0].masked_fill(is_forbidden, -torch.inf)
    [by_reference] = apply(apply_token_bitmask_reference, inputs[0].clone(), *inputs[1:])
    assert torch.equal(by_reference, expected)
    return OpCase(inputs, partial(apply, launch), (expected,), (0.0,))


def penalties(implementation: str, dtype: torch.dtype, num_places: int) -> OpCase:
    """Of places that are spread over logits which else stay as they are."""
    launch, draw = find_launch(implementation, "sampling.penalties"), Draw(implementation, dtype)

    def launch_native(logits: Tensor, places: Tensor, counts: Tensor, penalties: Tensor) -> None:
        """Each place as a row's only token."""
        addresses = [(0, places.data_ptr() + 8 * i, counts.data_ptr() + 4 * i, 1) for i in range(len(places))]
        launch(logits.view(1, -1), np.array(addresses), penalties.T.contiguous().numpy())

    def penalize(function: Callable[..., None], seen: Tensor, counts: Tensor, rates: Tensor) -> Outputs:
        logits, places = torch.full((3 * len(seen) + 1,), 7.0, device=draw.device), torch.arange(len(seen))
        places = (3 * places.flip(0) + 1).to(draw.device)
        logits[places] = seen
        function(logits, places, counts, rates.T.contiguous())
        edited = logits[places]
        logits[places] = 7.0
        assert (logits == 7.0).all()
        return (edited,)

    counts = draw.integers(0, 4, num_places).float()
    inputs = draw(num_places), counts, draw(num_places, 3).abs() + 0.5
    expected = penalize(penalize_reference, *inputs)
    # One product or quotient, two products and two differences, which may be fused.
    penalize_by_kernel = partial(penalize, launch if implementation == "triton" else launch_native)
    return OpCase(inputs, penalize_by_kernel, expected, (5 * EPS * (expected[0].abs() + 10),))


_SEVENS = torch.full((4,), 7, dtype=torch.uint8).view(F32).item()  # a scale that nobody has written


def rotate_and_write(
    implementation: str,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    block_size: int,
    norms: str,
    rows: int,
    kv_dtype: torch.dtype | None = None,
) -> OpCase:
    """`heads` is (heads, kv heads, head size). Slots are some neighbours in a block, the rest shuffled.

    `kv_dtype`: of caches in 8 bits, of which scales and codes come back.
    """
    launch, draw = find_launch(implementation, "attention.rotate_and_write"), Draw(implementation, dtype)
    num_heads, num_kv_heads, head_size = heads
    num_blocks, near = 9, 3 + rows * 3 // 5
    qk_norm = QKNorm(draw(head_size), draw(head_size), 1e-6, norms == "after") if norms else None
    angle = draw(rows, head_size // 2, dtype=F32) * 3
    shuffled = torch.randperm(num_blocks * block_size - near, generator=draw.generator)
    slots = torch.cat([torch.arange(3, near), near + shuffled])[:rows].to(draw.device)

    def compute(
        function: Callable[..., Tensor | None], is_native: bool, qkv: Tensor, *parts: Tensor
    ) -> Outputs:
        """Queries, keys and values of each token."""
        *angles, slots = parts
        shape = (num_blocks, num_kv_heads, block_size, head_size + (SCALE_SIZE if kv_dtype else 0))
        caches = [torch.full(shape, 7, dtype=kv_dtype or dtype, device=qkv.device) for _ in range(2)]
        query = function(qkv, num_heads, *angles, qk_norm, *caches, slots)
        if query is None:  # it is left in qkv
            query = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, head_size))[:, :num_heads]
        scales: list[Tensor] = []
        if kv_dtype is not None:
            (keys, key_scales), (values, value_scales) = map(view_parts, caches)
            caches, scales = [keys, values], [key_scales.unsqueeze(3), value_scales.unsqueeze(3)]
        if is_native:
            caches = list(from_native_layout(*caches, is_paired=dtype == BF16))
        written: list[Tensor] = []
        for cache in (*caches, *scales):
            by_slot = cache.transpose(1, 2).flatten(0, 1)
            written.append(by_slot[slots])
            by_slot[slots] = unwritten = _SEVENS if any(cache is scale for scale in scales) else 7
            assert (by_slot == unwritten).all(), "a slot of nobody is written"
        if kv_dtype == torch.uint8:
            written[:2] = [part.view(torch.float8_e4m3fn) for part in written[:2]]
        if scales:
            written = [part.float() * scale for part, scale in zip(written[:2], written[2:], strict=True)]
        return query, *written

    inputs = draw(rows, (num_heads + 2 * num_kv_heads) * head_size), angle.cos(), angle.sin(), slots
    expected = compute(rotate_and_write_reference, False, inputs[0].clone(), *inputs[1:])
    # The reference rounds cos, sin, both products and the sum to the type; the norm rounds twice.
    roundings = (5 + 2 * bool(norms)) * torch.finfo(dtype).eps / 2 + head_size * EPS * bool(norms)
    largest = max(part.abs().max().item() for part in expected[:2])
    bound = key_bound = roundings * largest
    if kv_dtype is not None:  # a code that is another by one
        key_bound += largest * (1 / 127 if kv_dtype == torch.int8 else 1 / 8)
    bounds = bound, key_bound, 0.0
    return OpCase(inputs, partial(compute, launch, implementation != "triton"), expected, bounds)


def rotate_latent(
    implementation: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    block_size: int,
    rows: int,
    kv_dtype: torch.dtype | None = None,
) -> OpCase:
    """`sizes` is (heads, nope, rope, rank); `kv_dtype` of a cache in 8 bits."""
    launch = find_launch(implementation, "attention.rotate_and_write", "rotate_latent")
    draw, (num_heads, nope, rope, rank), num_blocks = Draw(implementation, dtype), sizes, 9
    angle = draw(rows, rope // 2, dtype=F32) * 3
    slots = torch.randperm(num_blocks * block_size, generator=draw.generator)[:rows].to(draw.device)

    def compute(
        function: Callable[..., None], is_native: bool, query: Tensor, latent: Tensor, *parts: Tensor
    ) -> Outputs:
        """Ends of queries, latents and what is in the cache."""
        *angles, slots = parts
        size = rank + rope * (1 if kv_dtype is None else 2)
        y = torch.full((len(query), num_heads, size), 7.0, dtype=dtype, device=query.device)
        shape = num_blocks, 1, block_size, size + (SCALE_SIZE if kv_dtype else 0)
        cache = torch.full(shape, 7, dtype=kv_dtype or dtype, device=query.device)
        function(query, y, latent, rank, *angles, cache, slots)
        assert (y[..., :rank] == 7.0).all()
        codes, *scales = (cache,) if kv_dtype is None else view_parts(cache)
        if is_native:
            codes = from_native_layout(codes, codes, is_paired=dtype == BF16)[0]
        by_slot = codes.transpose(1, 2).flatten(0, 1)
        written = by_slot[slots].squeeze(1)
        by_slot[slots] = 7
        assert (by_slot == 7).all(), "a slot of nobody is written"
        if kv_dtype is None:
            assert torch.equal(written, latent)
            return y[..., rank:], written
        scale = scales[0].transpose(1, 2).flatten(0, 1)[slots]
        numbers = written if kv_dtype == torch.int8 else written.view(torch.float8_e4m3fn)
        high, low = (128, 1) if kv_dtype == torch.int8 else (1, 1 / 16)
        numbers = numbers.float() * scale
        ends = numbers[:, rank : rank + rope] * high + numbers[:, rank + rope :] * low
        return y[..., rank:], numbers[:, :rank], ends

    inputs = draw(rows, num_heads, nope + rope), draw(rows, rank + rope), angle.cos(), angle.sin(), slots
    expected = compute(rotate_latent_reference, False, *(part.clone() for part in inputs))
    bounds = [5 * torch.finfo(dtype).eps / 2 * part.abs().max().item() for part in expected]
    if kv_dtype is not None:  # a code that is another by one, of the rotated numbers a second one
        steps = (1 / 127, 1 / 127) if kv_dtype == torch.int8 else (1 / 8, 1 / 128)
        largest = expected[1].abs().max().item(), max(part.abs().max().item() for part in expected[1:])
        bounds[1:] = [bound + step * top for bound, step, top in zip(bounds[1:], steps, largest, strict=True)]
    return OpCase(inputs, partial(compute, launch, implementation != "triton"), expected, tuple(bounds))


def multiply_heads(
    implementation: str, dtype: torch.dtype, rows: int, heads: int, num_in: int, num_out: int
) -> OpCase:
    """Heads of x and y lie within longer ones."""
    draw = Draw(implementation, dtype)
    x, weight = draw(rows, heads, num_in + 5), draw(heads, num_out, num_in)
    layers = [NativeLinear(native_library(), part, None, dtype) for part in weight]
    tables = (LinearTable * heads)(*(layer.to_table() for layer in layers))

    def compute(x: Tensor) -> Outputs:
        y = torch.full((len(x), heads, num_out + 3), 7.0, dtype=dtype)
        launch_multiply_heads(native_library(), x, tables, y)
        assert len(layers) == heads
        assert (y[..., num_out:] == 7.0).all()
        return (y[..., :num_out],)

    exact = x[..., :num_in].double(), weight.double()
    expected = multiply_heads_reference(x[..., :num_in], weight)
    magnitudes = torch.einsum("thk,hnk->thn", exact[0].abs(), exact[1].abs())
    bound = 2 * (num_in + 2) * EPS * magnitudes + 2 * unit(dtype) * expected.double().abs()
    return OpCase((x,), compute, (expected,), (bound,))


def cycle(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Points in which each value of every axis appears, as many as the longest has, in place of all pairs."""
    count = max(map(len, axes))
    return list(itertools.islice(zip(*map(itertools.cycle, axes), strict=True), count))


cross = itertools.product
NATIVE, TRITON = ("native",), ("triton",)
BOTH, ALL = (F32, BF16), (F32, BF16, F16)
_LINEAR = [
    *((1, 1, 1), (1, 64, 96), (2, 300, 65), (5, 17, 128), (7, 513, 200), (15, 48, 33)),
    *((16, 64, 64), (17, 32, 31), (33, 600, 40), (97, 64, 130), (300, 256, 63), (600, 700, 200)),
]
# K and N are whole tiles, by which many rows are multiplied in another order of rows and panels.
_TILES = [(600, 384, 1152), (600, 96, 32), (257, 1024, 1376)]
# One segment and several, whole tiles and parts of them.
_TRITON_LINEAR = [(1, 1, 1), (3, 64, 64), (5, 200, 65), (20, 272, 70)]
_TRITON_MANY = [(17, 40, 7), (130, 272, 140)]
_NARROW = [(7, 1, 1), (65, 513, 33), (33, 384, 256), (300, 300, 65), (260, 128, 96)]
_FORMS = ["alone", "added", "in place"]
_GATED = ["silu", "gelu", "gelu_tanh", "clamped_swiglu"]
_ROTATED = [
    ((1, 1, 512), 16),
    ((1, 1, 8), 8),
    ((4, 2, 16), 16),
    ((6, 1, 40), 16),
    ((3, 3, 72), 32),
    ((8, 2, 128), 16),
]

# Operation, implementations, types, arguments of its cases; how many of the last are also computed by parts.
Line = tuple[Callable[..., OpCase], Sequence[str], Sequence[torch.dtype], list[tuple[Any, ...]], int]
TABLE: list[Line] = [
    (rms_norm, NATIVE, BOTH, [
        (*shape, *kind) for shape in [(1, 1), (3, 16), (2, 17), (5, 48), (300, 260)]
        for kind in cross(NORM_KINDS, _FORMS)
    ], 9),
    (rms_norm, TRITON, ALL, [
        (*shape, *kind) for shape, kind in
        cycle([(1, 1), (3, 16), (2, 17), (2, 1500), (9, 200)], list(cross(NORM_KINDS, _FORMS)))
    ], 1),
    (layer_norm, NATIVE, BOTH, [
        (*shape, *kind) for shape in [(1, 2), (3, 16), (2, 17), (5, 48), (300, 260)]
        for kind in cross([False, True], [False, True])
    ], 4),
    (layer_norm, TRITON, ALL, [(3, 16, True, False), (2, 17, False, True), (5, 260, True, True)], 1),
    (gated_activation, NATIVE, BOTH, [
        (*shape, each) for shape in [(1, 1), (2, 16), (3, 33), (200, 250)] for each in _GATED
    ], 3),
    (gated_activation, TRITON, ALL, [(1, 1, "silu"), (2, 2050, "gelu"), (3, 33, "gelu_tanh")], 1),
    (gated_activation, TRITON, [BF16], [
        (3, 33, "silu"), (3, 33, "relu"), (3, 33, "clamped_swiglu"), (3, 33, "relu2")
    ], 0),
    (product, NATIVE, BOTH, [
        (*shape, gate) for shape in [(1, 1), (3, 16), (2, 33), (200, 250)]
        for gate in (None, "sigmoid", "silu")
    ], 3),
    (xielu, NATIVE, BOTH, [(1,), (16,), (33,), (40_001,)], 1),
    (gather_rows, TRITON, ALL, [(1,), (33,), (4099,)], 0),
    (plain_linear, VARIANTS, BOTH, list(cross(_LINEAR, [False, True])), 4),
    (plain_linear, VARIANTS, BOTH, [((33, 48, 70), True, each) for each in ACTIVATIONS], 1),
    (plain_linear, VARIANTS, [BF16], cycle(_TILES, [True, False, True], ["gelu", None, "silu"]), 3),
    (plain_linear, TRITON, BOTH, cycle(_TRITON_LINEAR, [False, True]), 1),
    (plain_linear, TRITON, [F16], [(_TRITON_LINEAR[-1],)], 0),
    (plain_linear, TRITON, BOTH, [(each, True, None, True) for each in _TRITON_LINEAR], 1),
    (plain_linear, TRITON, [BF16], [(each, False, None, False, True) for each in _TRITON_MANY], 0),
    (narrow_linear, VARIANTS, BOTH, [(form, shape) for shape, form in cross(_NARROW, FORMS)], 28),
    (narrow_linear, VARIANTS, BOTH, [(FORMS[2], (260, 300, 65), True, "silu")], 1),
    (narrow_linear, TRITON, [BF16], [(form, (3, 288, 70), True) for form in FORMS], 3),
    (narrow_linear, TRITON, [F32], [(form, (None, 96, 33)) for form in FORMS], 0),
    (narrow_linear, TRITON, [BF16], [(FORMS[3], (20, 272, 70), True, None, True)], 0),
    (soft_cap, NATIVE, [F32], [(1,), (16,), (100_003,)], 1),
    (route, NATIVE, BOTH, [
        *((*shape, {"normalizes": each})
          for shape in [(1, 1, 1), (3, 4, 2), (5, 8, 8), (70, 61, 8)] for each in (False, True)),
        *((*shape, {"is_sigmoid": True, "scale": 2.5, **more, "num_groups": groups,
                    "num_groups_per_token": kept})
          for shape, groups, kept, more in [
              ((70, 64, 8), 1, 1, {}), ((70, 64, 6), 8, 3, {}), ((5, 24, 3), 4, 2, {"sums_two": False}),
              ((5, 24, 12), 4, 2, {"normalizes": False}),
          ]),
        (70, 16, 2, {"mixer_threshold": 0.7}), (3, 8, 3, {"mixer_threshold": 0.02}),
    ], 2),
    (experts, NATIVE, BOTH, [()], 1),
    (grouped_experts, TRITON, BOTH, [("silu", False, False)], 1),
    (grouped_experts, TRITON, [BF16], [("clamped_swiglu", True, False), ("silu", False, True)], 1),
    (argmax, NATIVE, [F32], list(cross(
        [1, 5, 15, 16, 255, 256, 257, 300, 511, 2048, 20_000], [torch.nan, torch.inf, -torch.inf, 3.0]
    )), 1),
    (log_totals, TRITON, [F32], [(1,), (33,), (8200,)], 1),
    (token_bitmask, NATIVE, [F32], [(3, 1), (3, 31), (3, 32), (3, 33), (3, 1000), (32, 20_000)], 1),
    (token_bitmask, TRITON, [F32], [(3, 1), (3, 31), (3, 32), (4, 8200)], 0),
    (penalties, NATIVE, [F32], [(1,), (511,), (1300,)], 0),
    (penalties, TRITON, [F32], [(1,), (511,), (1300,)], 0),
    (rotate_and_write, NATIVE, BOTH, [
        (*shape, norms, 37) for shape in _ROTATED for norms in ("", "before", "after")
    ], 3),
    (rotate_and_write, NATIVE, BOTH, [
        (*shape, "", 37, kv_dtype) for shape in _ROTATED for kv_dtype in (torch.int8, torch.uint8)
    ], 2),
    (rotate_latent, NATIVE, BOTH, [
        *(((4, 8, 16, 32), 16, 37, kv_dtype) for kv_dtype in (None, torch.int8, torch.uint8)),
        ((3, 8, 12, 44), 8, 5, torch.uint8), ((1, 16, 2, 16), 8, 3), ((5, 64, 64, 512), 32, 70, torch.int8),
        ((5, 64, 64, 512), 32, 70),
    ], 3),
    (rotate_latent, TRITON, BOTH, [
        ((8, 16, 16, 32), 8, 5), ((8, 16, 16, 32), 8, 5, torch.int8), ((3, 16, 12, 40), 8, 5, torch.uint8),
        ((7, 8, 12, 40), 16, 11),
    ], 1),
    (multiply_heads, NATIVE, BOTH, [
        (1, 1, 1, 1), (3, 4, 16, 48), (70, 3, 24, 33), (130, 16, 128, 96)
    ], 3),
    (rotate_and_write, TRITON, BOTH, [
        ((1, 1, 2), 8, "", 11), ((7, 1, 40), 128, "before", 11), ((3, 3, 80), 16, "after", 11),
        ((14, 2, 256), 32, "before", 5), ((3, 3, 40), 16, "after", 11, torch.int8),
        ((7, 1, 16), 8, "", 11, torch.uint8),
    ], 0),
]  # fmt: skip


def list_cases(kind: str = "all") -> list[Any]:
    """A pytest.param of each line, implementation and type: its cases, each who makes it and of what.

    `kind`: all, those that are computed by parts, or the last of these in each line.
    """
    params: list[Any] = []
    for number, (make, implementations, dtypes, points, num_by_parts) in enumerate(TABLE):
        count = {"all": len(points), "by parts": num_by_parts, "last": min(1, num_by_parts)}[kind]
        for implementation, dtype in cross(implementations, dtypes) if count else ():
            if make is narrow_linear and (implementation, dtype) == ("TILE", F32):
                continue  # what is packed for AMX goes with bfloat16
            cases = [(make, implementation, dtype, *point) for point in points[len(points) - count :]]
            name = f"{make.__name__}-{implementation}-{str(dtype).removeprefix('torch.')}-{number}"
            params.append(pytest.param(cases, id=name))
    return params
