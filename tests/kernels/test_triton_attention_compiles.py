"""Attention and rotation through the compiler for an H100, which refuses what the interpreter takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(300)  # 2 to 9 s of one core a case, on a machine that has it

# In a process of its own, because Triton decides at its import whether it interprets.
_SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from triton_compiler import compile_launches
from quire.kernels.paged_attention_triton import launch_paged_attention, plan_attention
from quire.kernels.rotate_and_write_triton import launch_rotate_and_write

case = json.loads(sys.argv[2])
dtype, head_size, block_size = getattr(torch, case["dtype"]), case["head_size"], case.get("block_size", 16)
num_heads = 2 * case["group"]
row_size = (num_heads + 4) * head_size
cache, qkv = (torch.empty(size, dtype=dtype) for size in ((4, 2, block_size, head_size), (34, row_size)))
weight, angle = torch.empty(head_size, dtype=dtype), torch.empty(34, head_size // 2)
tables, starts, lengths = (torch.zeros(size, dtype=torch.int32) for size in ((4, 9), 5, 4))
slots = torch.empty(34, dtype=torch.int64)

def launch():
    launch_rotate_and_write(qkv, num_heads, angle, angle, (weight, weight, 1e-6), cache, cache.clone(), slots)
    for num_processors in (132, 1):  # the keys of single tokens in several programs, then in one
        plan = plan_attention(2, 2, 2, 4096, num_processors, case.get("is_strict", False))
        launch_paged_attention(
            qkv, row_size, num_heads, cache, cache.clone(), tables, starts, lengths,
            case.get("window"), plan, case.get("soft_cap"), None, case.get("ahead", 0),
            torch.empty(num_heads, 1023) if case.get("has_bias") else None,
        )

found = compile_launches(launch)
print(json.dumps([[one.name, one.shared_bytes, "wgmma.mma_async" in one.asm["ptx"]] for one in found]))
"""
_MAX_SHARED_BYTES = 227 << 10  # of a program on sm_90

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
    "large float32, strict": {"dtype": "float32", "head_size": 256, "group": 8, "is_strict": True},
}


def compile_case(case: dict[str, object]) -> list[tuple[str, int, bool]]:
    """(kernel, bytes of shared memory, has Hopper's matrix instruction) of each launch."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", _SCRIPT, str(Path(__file__).parents[1]), json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [(name, size, has) for name, size, has in json.loads(done.stdout.splitlines()[-1])]


def test_a_mixed_step_in_bfloat16_compiles_to_five_kernels_and_chunks_to_wgmma() -> None:
    rotate, singles_split, combine, chunks, singles, chunks_again = compile_case(BFLOAT16)
    assert rotate[0] == "_rotate_and_write_kernel"
    assert combine[0] == "_combine_kernel"
    assert singles_split[0] == singles[0] == chunks[0] == "_paged_attention_kernel"
    assert chunks == chunks_again
    assert chunks[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_kernel_compiles_and_fits_the_shared_memory(name: str) -> None:
    for kernel, shared_bytes, _ in compile_case(CASES[name]):
        assert shared_bytes <= _MAX_SHARED_BYTES, kernel
