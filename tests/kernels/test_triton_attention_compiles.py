"""Attention and rotation through the compiler for an H100, which refuses what the interpreter takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(300)  # 2 to 9 s of one core a case, on a machine that has it

# In a process of its own, because Triton decides at its import whether it interprets.
_SCRIPT = """
import json, sys, torch
from quire.kernels.attention.attention_plan_triton import launch_plan, plan_attention
from quire.kernels.attention.paged_attention_triton import launch_paged_attention
from quire.kernels.attention.rotate_and_write_triton import launch_rotate_and_write
from quire.tools.gpu.compiler import SHARED_BYTES, compile_launches, make

case = json.loads(sys.argv[1])
dtype, head_size, block_size = getattr(torch, case["dtype"]), case["head_size"], case.get("block_size", 16)
architecture = case.get("architecture", 90)
num_heads = 2 * case["group"]
row_size = (num_heads + 4) * head_size
cache, qkv = (make(*size, dtype=dtype) for size in ((4, 2, block_size, head_size), (34, row_size)))
weight, angle = make(head_size, dtype=dtype), make(34, head_size // 2, dtype=torch.float32)
tables, starts, lengths = (make(*size, dtype=torch.int32) for size in ((4, 9), (5,), (4,)))
slots = make(34, dtype=torch.int64)
window = case.get("window")

def launch():
    launch_rotate_and_write(qkv, num_heads, angle, angle, (weight, weight, 1e-6), cache, cache, slots)
    plan = plan_attention(
        2, 2, 4, 2, 4096, 132, case.get("is_strict", False), shared_bytes=SHARED_BYTES[architecture]
    )
    work = launch_plan(plan, starts, lengths, window)
    launch_paged_attention(
        qkv, row_size, num_heads, cache, cache, tables, starts, lengths, window, plan, work,
        case.get("soft_cap"), None, case.get("ahead", 0),
        make(num_heads, 1023, dtype=torch.float32) if case.get("has_bias") else None,
    )

found = compile_launches(launch, architecture)
print(json.dumps([
    [one.name, one.shared_bytes, one.num_spills, one.copies_in_flight, one.has_wgmma] for one in found
]))
"""
_SHARED_BYTES = {89: 99 << 10, 90: 227 << 10}

BFLOAT16 = {"dtype": "bfloat16", "head_size": 128, "group": 4}
CASES = {
    "strict": BFLOAT16 | {"is_strict": True},
    "window and cap": BFLOAT16 | {"dtype": "float16", "window": 4096, "soft_cap": 30.0},
    "both ways": BFLOAT16 | {"head_size": 64, "group": 1, "ahead": 1 << 30, "has_bias": True},
    "padded heads": {"dtype": "bfloat16", "head_size": 80, "group": 7, "block_size": 8},
    "small heads": {"dtype": "bfloat16", "head_size": 16, "group": 1, "block_size": 128},
    "large heads": {"dtype": "bfloat16", "head_size": 256, "group": 2, "block_size": 32},
    "large heads, strict": {"dtype": "bfloat16", "head_size": 256, "group": 2, "is_strict": True},
    "many heads a kv head": {"dtype": "bfloat16", "head_size": 256, "group": 128},
    "float32": {"dtype": "float32", "head_size": 128, "group": 4},
    "on Ada": BFLOAT16 | {"architecture": 89},
    "large heads on Ada": {"dtype": "bfloat16", "head_size": 256, "group": 2, "architecture": 89},
    "large float32, strict": {"dtype": "float32", "head_size": 256, "group": 8, "is_strict": True},
}


@dataclass
class Kernel:
    name: str
    shared_bytes: int
    num_spills: int
    copies_in_flight: int
    has_wgmma: bool


def compile_case(case: dict[str, object]) -> list[Kernel]:
    """Each launch of a mixed step in order."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", _SCRIPT, json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [Kernel(*found) for found in json.loads(done.stdout.splitlines()[-1])]


def test_a_mixed_step_in_bfloat16_compiles_to_five_kernels_that_copy_keys_ahead() -> None:
    found = compile_case(BFLOAT16)
    names = ["_rotate_and_write_kernel", "_plan_kernel"]
    names += ["_paged_attention_kernel", "_combine_kernel", "_paged_attention_kernel"]
    assert [kernel.name for kernel in found] == names
    assert not any(kernel.num_spills for kernel in found)
    singles, chunks = found[2], found[4]
    # A tile's products wait for its own K or V, and leave those of the next tile on their way.
    assert singles.copies_in_flight == chunks.copies_in_flight == 2
    assert 2 * singles.shared_bytes <= _SHARED_BYTES[90]  # two programs of a processor at once
    assert chunks.has_wgmma


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_kernel_compiles_and_fits_the_shared_memory(name: str) -> None:
    case = CASES[name]
    for kernel in compile_case(case):
        assert kernel.shared_bytes <= _SHARED_BYTES[int(str(case.get("architecture", 90)))], kernel
        if kernel.name == "_paged_attention_kernel":
            assert kernel.copies_in_flight or case["dtype"] == "float32", kernel
