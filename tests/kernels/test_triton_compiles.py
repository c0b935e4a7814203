"""Kernels through the compiler for an H100, which refuses what the interpreter takes, and what it makes of
them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("triton")

# Some 15 s of one core, which a loaded machine may not have at once; compiled kernels are cached after that.
_TIMEOUT_S = 280.0
pytestmark = pytest.mark.timeout(_TIMEOUT_S + 20)

# In a process of its own, because Triton decides at its import whether it interprets. Each argument is
# (which launches, architecture, whether programmatic dependent launch is enabled, the case).
_SCRIPT = """
import json, re, sys, torch
from quire.kernels.attention.attention_plan_triton import launch_plan, plan_attention
from quire.kernels.attention.paged_attention_triton import count_head_tiles, launch_paged_attention
from quire.kernels.attention.rotate_and_write import QKNorm
from quire.kernels.attention.rotate_and_write_triton import launch_rotate_and_write, launch_rotate_latent
from quire.kernels.linear.experts_triton import multiply_grouped
from quire.kernels.linear.gated_activation_triton import launch_gated_activation
from quire.kernels.linear.linear_triton import launch_linear
from quire.kernels.norm.rms_norm_triton import launch_rms_norm
from quire.kernels.program.gather_rows_triton import launch_gather_rows
from quire.kernels.recurrent.delta_rule import DeltaRule
from quire.kernels.recurrent.delta_rule_triton import launch_delta_rule
from quire.kernels.recurrent.states import RequestStates
from quire.kernels.sampling.log_totals_triton import launch_log_totals
from quire.kernels.sampling.penalties_triton import launch_penalties
from quire.kernels.sampling.sample_triton import launch_sample
from quire.kernels.sampling.token_bitmask_triton import launch_token_bitmask
from quire.kernels.triton import dependent_launch_triton
from quire.tools.gpu.compiler import SHARED_BYTES, compile_launches, make

def launch_dependent(_case, _architecture):
    launch_rms_norm(make(2, 1024), make(2, 1024), make(1024), 1e-6)
    launch_linear(make(1, 1024), make(1024, 1024))
    cache, weight, angle = make(4, 2, 16, 64), make(64), make(2, 32, dtype=torch.float32)
    slots = make(2, dtype=torch.int64)
    launch_rotate_and_write(make(2, 512), 4, angle, angle, QKNorm(weight, weight, 1e-6), cache, cache, slots)

def launch_dense(_case, _architecture):
    launch_gather_rows(make(9, 1024), make(2, dtype=torch.int64))
    order, ends = make(8, dtype=torch.int32), make(32, dtype=torch.int32)
    multiply_grouped(make(2, 1024), make(32, 512, 1024), make(32, 512), order, ends, make(8, 512), 4, True)
    for activation in ("silu", "gelu", "gelu_tanh", "clamped_swiglu"):
        launch_gated_activation(make(2, 6144), activation)
    integers = [make(count, dtype=torch.int32) for count in (2, 3, 2, 3, 1, 1)]
    states = RequestStates(make(9, 600_000, dtype=torch.float32), *integers)
    for shift in (32, 32 * 128):
        numbers = make(32, dtype=torch.float32), make(shift, dtype=torch.float32)
        rule = DeltaRule(*numbers, 16, 32, 128, 128)
        launch_delta_rule(rule, states, make(7, 8192), make(7, shift), make(7, 32))
    scale = make(6144, dtype=torch.float32)
    launch_linear(make(1, 1024), make(1024, 1024), make(1024))
    launch_linear(make(20, 1024), make(6144, 1024, dtype=torch.int8), None, scale)
    launch_linear(make(2048, 1024), make(6144, 1024, dtype=torch.int8), make(6144), scale)
    logits, rows = make(2, 151_936, dtype=torch.float32), make(2, dtype=torch.int64)
    launch_sample(logits, make(2, 5, dtype=torch.float64), True)
    launch_log_totals(logits, rows)
    launch_token_bitmask(logits, make(2, 4748, dtype=torch.int32), rows)
    seen = make(40, dtype=torch.float32)
    launch_penalties(logits.view(-1), make(40, dtype=torch.int64), seen, make(3, 40, dtype=torch.float32))

def launch_attention(case, architecture):
    dtype, head_size = getattr(torch, case["dtype"]), case["head_size"]
    block_size = case.get("block_size", 16)
    value_size = case.get("value_size")  # of latents
    num_kv_heads = 2 if value_size is None else 1
    num_heads = num_kv_heads * case["group"]
    row_size = (num_heads + 2 * num_kv_heads) * head_size
    cache = make(4, num_kv_heads, block_size, head_size, dtype=dtype)
    qkv = make(34, row_size, dtype=dtype)
    weight, angle = make(head_size, dtype=dtype), make(34, head_size // 2, dtype=torch.float32)
    tables, starts, lengths = (make(*size, dtype=torch.int32) for size in ((4, 9), (5,), (4,)))
    slots, window = make(34, dtype=torch.int64), case.get("window")
    if value_size is None:
        norm = QKNorm(weight, weight, 1e-6)
        launch_rotate_and_write(qkv, num_heads, angle, angle, norm, cache, cache, slots)
    else:
        rope = head_size - value_size
        if case.get("is_narrow"):
            cache, rope = make(4, 1, block_size, head_size + 4, dtype=torch.int8), rope // 2
        query, rows = (make(34, num_heads, size, dtype=dtype) for size in (128 + rope, head_size))
        angle = make(34, rope // 2, dtype=torch.float32)
        latent = make(34, value_size + rope, dtype=dtype)
        launch_rotate_latent(query, rows, latent, value_size, angle, angle, cache, slots)
    tiles, is_strict = count_head_tiles(num_heads, num_kv_heads, value_size), case.get("is_strict", False)
    plan = plan_attention(2, 2, 4, tiles, 4096, 132, is_strict, shared_bytes=SHARED_BYTES[architecture])
    sinks = make(num_heads, dtype=torch.float32) if case.get("has_sinks") else None
    launch_paged_attention(
        qkv, row_size, num_heads, cache, cache, tables, starts, lengths, window, plan,
        launch_plan(plan, starts, lengths, window), case.get("soft_cap"), None, case.get("ahead", 0),
        make(num_heads, 1023, dtype=torch.float32) if case.get("has_bias") else None, sinks,
        value_size,
    )

wanted = r"griddepcontrol\\.\\w+|prefetch\\.global|[ls][dt]\\.global|cp\\.async\\.c\\w|\\w+(?:\\.\\w+)*\\.f32"
made = []
for name, architecture, is_enabled, case in json.loads(sys.argv[1]):
    dependent_launch_triton.IS_ENABLED = is_enabled
    kernels = compile_launches(lambda: globals()["launch_" + name](case, architecture), architecture)
    made.append([
        [each.name, each.shared_bytes, each.copies_in_flight, each.has_wgmma,
         each.num_spills if each.name == "_paged_attention_kernel" else 0,  # it takes 0.6 s to look
         re.findall(wanted, each.asm["ptx"]) if name == "dependent" else []]
        for each in kernels
    ])
print(json.dumps(made))
"""
_SHARED_BYTES = {89: 99 << 10, 90: 227 << 10}  # of a program

BFLOAT16 = {"dtype": "bfloat16", "head_size": 128, "group": 4}
LATENTS = {"dtype": "bfloat16", "head_size": 576, "value_size": 512, "group": 128}
ATTENTION_CASES = {
    "strict": BFLOAT16 | {"is_strict": True},
    "window and cap": BFLOAT16 | {"dtype": "float16", "window": 4096, "soft_cap": 30.0},
    "both ways": BFLOAT16 | {"head_size": 64, "group": 1, "ahead": 1 << 30, "has_bias": True},
    "sinks": BFLOAT16 | {"head_size": 64, "window": 128, "has_sinks": True},
    "padded heads": {"dtype": "bfloat16", "head_size": 80, "group": 7, "block_size": 8},
    "small heads": {"dtype": "bfloat16", "head_size": 16, "group": 1, "block_size": 128},
    "large heads": {"dtype": "bfloat16", "head_size": 256, "group": 2, "block_size": 32},
    "large heads, strict": {"dtype": "bfloat16", "head_size": 256, "group": 2, "is_strict": True},
    "many heads a kv head": {"dtype": "bfloat16", "head_size": 256, "group": 128},
    "float32": {"dtype": "float32", "head_size": 128, "group": 4},
    "on Ada": BFLOAT16 | {"architecture": 89},
    "large heads on Ada": {"dtype": "bfloat16", "head_size": 256, "group": 2, "architecture": 89},
    "latents": LATENTS,
    "latents, strict": LATENTS | {"is_strict": True},
    "latents in 8 bits, strict": LATENTS | {"head_size": 640, "is_narrow": True, "is_strict": True},
    "latents on Ada": LATENTS | {"architecture": 89},
    "latents, float32": LATENTS | {"dtype": "float32"},
    "large float32, strict": {"dtype": "float32", "head_size": 256, "group": 8, "is_strict": True},
}


@dataclass
class Kernel:
    name: str
    shared_bytes: int
    copies_in_flight: int
    has_wgmma: bool
    num_spills: int  # of attention
    instructions: list[str]  # those that matter here, in order


def compile_all(*cases: tuple[str, int, bool, dict[str, Any]]) -> list[list[Kernel]]:
    """Of each case its launches in order."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", _SCRIPT, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [[Kernel(*each) for each in kernels] for kernels in json.loads(done.stdout.splitlines()[-1])]


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[Kernel]]:
    cases = {
        "dense": ("dense", 90, True, {}),
        "attention": ("attention", 90, True, BFLOAT16),
        "dependent": ("dependent", 90, True, {}),
        "independent": ("dependent", 90, False, {}),
    }
    return dict(zip(cases, compile_all(*cases.values()), strict=True))


def test_every_dense_kernel_compiles_for_an_h100(compiled: dict[str, list[Kernel]]) -> None:
    assert {kernel.name for kernel in compiled["dense"]} == {
        *(
            "_gather_rows",
            "_gated_activation",
            "_multiply_grouped",
            "_linear_few",
            "_add_segments",
            "_linear_many",
        ),
        *("_summarize", "_choose", "_choose_filtered", "_sum_chunks", "_add_chunks"),
        *("_apply_token_bitmask", "_penalize", "_delta_rule"),
    }


def test_every_program_fits_the_shared_memory_of_a_multiprocessor(
    compiled: dict[str, list[Kernel]],
) -> None:
    for kernels in compiled.values():
        assert all(kernel.shared_bytes <= _SHARED_BYTES[90] for kernel in kernels)


def test_the_matrix_units_take_every_number_of_rows(compiled: dict[str, list[Kernel]]) -> None:
    linear = [each for each in compiled["dense"] if each.name in ("_linear_few", "_linear_many")]
    assert [kernel.has_wgmma for kernel in linear] == [True, True, True]


def test_a_mixed_step_in_bfloat16_compiles_to_five_kernels_that_copy_keys_ahead(
    compiled: dict[str, list[Kernel]],
) -> None:
    kernels = compiled["attention"]
    names = ["_rotate_and_write_kernel", "_plan_kernel"]
    names += ["_paged_attention_kernel", "_combine_kernel", "_paged_attention_kernel"]
    assert [kernel.name for kernel in kernels] == names
    assert not any(kernel.num_spills for kernel in kernels)
    singles, chunks = kernels[2], kernels[4]
    # A tile's products wait for its own K or V, and leave those of the next tile on their way.
    assert singles.copies_in_flight == chunks.copies_in_flight == 2
    assert 2 * singles.shared_bytes <= _SHARED_BYTES[90]  # two programs of a processor at once
    assert chunks.has_wgmma


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_every_kind_of_attention_compiles_and_fits_the_shared_memory(name: str) -> None:
    case = ATTENTION_CASES[name]
    architecture = int(str(case.get("architecture", 90)))
    [kernels] = compile_all(("attention", architecture, True, case))
    for kernel in kernels:
        assert kernel.shared_bytes <= _SHARED_BYTES[architecture], kernel
        if kernel.name == "_paged_attention_kernel":
            assert kernel.copies_in_flight or case["dtype"] == "float32", kernel
            assert not kernel.num_spills or case not in (LATENTS, LATENTS | {"is_strict": True}), kernel


def test_kernels_wait_once_before_they_touch_what_others_write(compiled: dict[str, list[Kernel]]) -> None:
    loads_of_weights = {"_rms_norm": True, "_rotate_and_write_kernel": True}
    for kernel in compiled["dependent"]:
        name, instructions = kernel.name, kernel.instructions
        waits = [each for each in instructions if each.startswith("griddepcontrol")]
        assert waits == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"], name
        before = instructions[: instructions.index("griddepcontrol.wait")]
        assert "st.global" not in before, name
        assert ("ld.global" in before) == loads_of_weights.get(name, False), name
        assert ("prefetch.global" in before) == (name == "_linear_few"), name


def test_the_arithmetic_is_the_same_with_dependent_launches_and_without(
    compiled: dict[str, list[Kernel]],
) -> None:
    def split(kernel: Kernel) -> tuple[Counter[str], Counter[str]]:
        """Instructions of dependent launches, and all others."""
        is_of_launch = [each.startswith(("griddepcontrol", "prefetch")) for each in kernel.instructions]
        pairs = list(zip(kernel.instructions, is_of_launch, strict=True))
        return Counter(a for a, is_its in pairs if is_its), Counter(a for a, is_its in pairs if not is_its)

    for dependent, independent in zip(compiled["dependent"], compiled["independent"], strict=True):
        assert dependent.name == independent.name
        assert split(independent) == (Counter(), split(dependent)[1]), dependent.name
