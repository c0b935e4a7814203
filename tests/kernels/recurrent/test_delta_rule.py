"""The gated delta rule: transformers' recurrence, and the same bits in any chunks, company and threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from kernel_checks import CPU, EPS, TRITON_DEVICE, assert_within
from quire.kernels.recurrent.delta_rule import (
    DeltaRule,
    delta_rule_reference,
    from_native_state,
    launch_delta_rule,
)
from quire.kernels.recurrent.states import RequestStates
from torch import Tensor

# (key heads, value heads, key size, value size): whole blocks, a block and a part, less than a vector.
SHAPES = [(2, 4, 128, 128), (1, 1, 32, 56), (3, 3, 8, 9), (1, 2, 17, 33)]
NUM_SLOTS, NUM_BEFORE, NUM_AFTER = 9, 12, 20  # slots; numbers of other layers beside a state in a slot


@dataclass
class Layer:
    """A layer with random numbers; inputs are drawn for as many tokens as are asked for."""

    rule: DeltaRule
    dtype: torch.dtype
    device: torch.device

    def draw(self, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator, rule = torch.Generator().manual_seed(seed), self.rule
        keys, values = rule.num_key_heads * rule.key_size, rule.num_value_heads * rule.value_size
        sizes = 2 * keys + values, len(rule.shift), rule.num_value_heads
        rows = torch.randn(count, sum(sizes) + 3, generator=generator) * 2
        qkv, decay, beta, _ = rows.to(self.device, self.dtype).split((*sizes, 3), dim=1)
        return qkv, decay, beta

    def make_states(self) -> Tensor:
        """Of all slots; where nothing was written they hold what would be seen in a result."""
        size = NUM_BEFORE + self.rule.state_size + NUM_AFTER
        return torch.full((NUM_SLOTS, size), 7.0, device=self.device)

    def get_state(self, states: Tensor, slot: int) -> Tensor:
        return states[slot, NUM_BEFORE:-NUM_AFTER]


def make_layer(
    shape: tuple[int, int, int, int], by_channel: bool, dtype: torch.dtype, device: torch.device = CPU
) -> Layer:
    generator = torch.Generator().manual_seed(1)
    _, value_heads, key_size, _ = shape
    rate = torch.rand(value_heads, generator=generator) * 2
    shift = torch.randn(value_heads * (key_size if by_channel else 1), generator=generator)
    return Layer(DeltaRule(rate.to(device), shift.to(device), *shape, NUM_BEFORE), dtype, device)


@dataclass
class Piece:
    """Some tokens of a request, from `first` of its sequence on, with saves (after so many tokens, slot)."""

    slot: int
    first: int
    inputs: tuple[Tensor, Tensor, Tensor]
    saves: tuple[tuple[int, int], ...] = ()


def run_step(
    compute: Callable[..., Tensor], layer: Layer, states: Tensor, pieces: list[Piece]
) -> list[Tensor]:
    """What each piece's tokens give, all computed in one step."""
    counts = [len(piece.inputs[0]) for piece in pieces]
    starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    saves = [
        [(starts[i] + n - piece.first - 1, slot) for n, slot in piece.saves] for i, piece in enumerate(pieces)
    ]
    each = [sum(map(len, saves[:index])) for index in range(len(saves) + 1)]
    flat = [save for part in saves for save in part]

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=layer.device)

    requests = RequestStates(
        states,
        ints([piece.slot for piece in pieces]),
        ints(starts),
        ints([piece.first + count for piece, count in zip(pieces, counts, strict=True)]),
        ints(each),
        ints([token for token, _ in flat]),
        ints([slot for _, slot in flat]),
    )
    rows = [torch.cat(parts) for parts in zip(*(piece.inputs for piece in pieces), strict=True)]
    return list(compute(layer.rule, requests, *rows).split(counts))


def cut(inputs: tuple[Tensor, Tensor, Tensor], first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
    qkv, decay, beta = (part[first:end] for part in inputs)
    return qkv, decay, beta


def compute_alone(
    compute: Callable[..., Tensor], layer: Layer, count: int, seed: int
) -> tuple[Tensor, Tensor]:
    """A request's results and its last state, in one step."""
    states = layer.make_states()
    [y] = run_step(compute, layer, states, [Piece(2, 0, layer.draw(count, seed))])
    return y, layer.get_state(states, 2)


def compute_by_transformers(layer: Layer, count: int, seed: int) -> tuple[Tensor, Tensor]:
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    rule = layer.rule
    qkv, decay, beta = (part.float() for part in layer.draw(count, seed))
    decay = -torch.nn.functional.softplus(decay + rule.shift) * rule.rate.repeat_interleave(
        len(rule.shift) // rule.num_value_heads
    )
    query, key, value = (part.unsqueeze(0) for part in rule.split(qkv))
    function = recurrent_kimi_delta_attention if rule.by_channel else torch_recurrent_gated_delta_rule
    decay = decay.view(1, count, rule.num_value_heads, -1)
    y, state = function(
        query,
        key,
        value,
        g=decay if rule.by_channel else decay.squeeze(3),
        beta=torch.sigmoid(beta).unsqueeze(0),
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return y.view(count, -1), state[0]


def find_compute(implementation: str, library: ctypes.CDLL) -> tuple[Callable[..., Tensor], torch.device]:
    if implementation == "torch":
        return delta_rule_reference, CPU
    if implementation == "native":
        return partial(launch_delta_rule, library), CPU
    pytest.importorskip("triton")
    from quire.kernels.recurrent.delta_rule_triton import launch_delta_rule as launch

    return launch, TRITON_DEVICE


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("implementation", ["torch", "native", "triton"])
def test_it_is_the_recurrence_of_transformers(
    implementation: str, by_channel: bool, library: ctypes.CDLL
) -> None:
    compute, device = find_compute(implementation, library)
    for shape in SHAPES[1:] if implementation == "triton" else SHAPES:
        if by_channel:  # transformers' has as many key heads as value heads
            shape = (shape[1], *shape[1:])
        layer = make_layer(shape, by_channel, torch.float32, device)
        count = 7 if implementation == "triton" else 40
        y, state = compute_alone(compute, layer, count, 3)
        expected, expected_state = compute_by_transformers(layer, count, 3)
        if implementation == "native":
            state = from_native_state(layer.rule, state)
        # Sums of K products; decays are exponentials of sums that err by some units, and so do the lengths.
        bound = (2 * layer.rule.key_size + 40) * EPS
        assert_within(y.cpu(), expected.cpu(), bound * expected.abs().max().item())
        scale = expected_state.abs().max().item()
        assert_within(state.view(expected_state.shape).cpu(), expected_state.cpu(), bound * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("implementation", ["native", "triton"])
def test_chunks_company_threads_and_saves_change_no_bit(
    implementation: str,
    by_channel: bool,
    dtype: torch.dtype,
    library: ctypes.CDLL,
    set_threads: Callable[[int], None],
) -> None:
    compute, device = find_compute(implementation, library)
    is_triton = implementation == "triton"
    count = 9 if is_triton else 70
    for shape in SHAPES[2:3] if is_triton else SHAPES:
        layer = make_layer(shape, by_channel, dtype, device)
        set_threads(1)
        expected = {seed: compute_alone(compute, layer, count, seed) for seed in (3, 4)}
        set_threads(3)
        inputs = {seed: layer.draw(count, seed) for seed in (3, 4)}
        for size in (1, 4) if is_triton else (1, 7, 16, 33, count):
            states, parts = layer.make_states(), dict[int, list[Tensor]]({3: [], 4: []})
            for first in range(0, count, size):
                end = min(first + size, count)
                # Request 3 is saved after its 6th token, and where it ends; 4 goes on a chunk behind it.
                saves = [(n, slot) for n, slot in ((6, 7), (end, 8)) if first < n <= end]
                pieces = [(3, Piece(1, first, cut(inputs[3], first, end), tuple(saves)))]
                if first:
                    piece = Piece(5, first - size, cut(inputs[4], first - size, min(first, count)))
                    pieces.insert(0, (4, piece))
                results = run_step(compute, layer, states, [piece for _, piece in pieces])
                for (seed, _), y in zip(pieces, results, strict=True):
                    parts[seed].append(y)
            for seed, (y, _) in expected.items():
                done = torch.cat(parts[seed]) if parts[seed] else y[:0]
                assert torch.equal(done, y[: len(done)]), (shape, size, seed)
            for slot in (1, 8):
                assert torch.equal(layer.get_state(states, slot), expected[3][1]), (shape, size, slot)
            untouched = [0, 2, 3, 4, 6] + ([] if parts[4] else [5])
            assert (states[untouched] == 7.0).all()
            assert (states[:, :NUM_BEFORE] == 7.0).all()
            assert (states[:, -NUM_AFTER:] == 7.0).all()
            # What was saved inside is the state that goes on, in another slot.
            rest = run_step(compute, layer, states, [Piece(7, 6, cut(inputs[3], 6, count))])[0]
            assert torch.equal(rest, expected[3][0][6:])


@pytest.mark.parametrize("implementation", ["torch", "native", "triton"])
def test_tiled_value_heads_are_those_in_groups_in_another_order(
    implementation: str, library: ctypes.CDLL
) -> None:
    compute, device = find_compute(implementation, library)
    grouped = make_layer((2, 6, 8, 9), False, torch.float32, device)
    order = torch.tensor([0, 3, 1, 4, 2, 5], device=device)  # the three heads of each head of keys lie apart
    rule = grouped.rule._replace(
        rate=grouped.rule.rate[order], shift=grouped.rule.shift[order], is_tiled=True
    )
    tiled = replace(grouped, rule=rule)
    qkv, decay, beta = grouped.draw(7, 3)
    values = qkv[:, 32:].unflatten(1, (6, 9))[:, order].flatten(1)
    inputs = torch.cat((qkv[:, :32], values), 1), decay[:, order], beta[:, order]
    [expected] = run_step(compute, grouped, grouped.make_states(), [Piece(2, 0, (qkv, decay, beta))])
    [actual] = run_step(compute, tiled, tiled.make_states(), [Piece(2, 0, inputs)])
    assert torch.equal(actual.unflatten(1, (6, 9)), expected.unflatten(1, (6, 9))[:, order])


def test_a_request_that_is_not_finite_spoils_no_other(library: ctypes.CDLL) -> None:
    layer = make_layer(SHAPES[1], False, torch.float32)
    compute = partial(launch_delta_rule, library)
    clean, states = compute_alone(compute, layer, 5, 3)[0], layer.make_states()
    inputs = layer.draw(5, 4)
    inputs[0][2] = torch.nan
    bad, good = run_step(compute, layer, states, [Piece(1, 0, inputs), Piece(3, 0, layer.draw(5, 3))])
    assert torch.equal(good, clean)
    assert bad[:2].isfinite().all()
    assert bad[2:].isnan().any()
    # The next request in the slot begins from zeros.
    [again] = run_step(compute, layer, states, [Piece(1, 0, layer.draw(5, 3))])
    assert torch.equal(again, clean)


def test_a_step_without_saves_may_leave_them_out(library: ctypes.CDLL) -> None:
    layer = make_layer(SHAPES[2], False, torch.float32)
    y, _ = compute_alone(partial(launch_delta_rule, library), layer, 3, 3)
    states = layer.make_states()

    def compute(rule: DeltaRule, requests: RequestStates, *rows: Tensor) -> Tensor:
        return launch_delta_rule(library, rule, replace(requests, save_starts=torch.zeros(2).int()), *rows)

    assert torch.equal(run_step(compute, layer, states, [Piece(1, 0, layer.draw(3, 3))])[0], y)
