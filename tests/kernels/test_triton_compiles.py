"""The interpreter takes what the compiler refuses: here every dense kernel is compiled for an H100."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Some 10 s of one core, which a loaded machine may not have at once; compiled kernels are cached after that.
pytestmark = pytest.mark.timeout(300)
_TIMEOUT_S = 280.0

# In a process of its own, because Triton decides at its import whether it interprets.
_SCRIPT = """
import json, torch
from quire.kernels.linear.gated_activation_triton import launch_gated_activation
from quire.kernels.program.gather_rows_triton import launch_gather_rows
from quire.kernels.linear.linear_triton import launch_linear
from quire.kernels.sampling.log_totals_triton import launch_log_totals
from quire.kernels.sampling.penalties_triton import launch_penalties
from quire.kernels.norm.rms_norm_triton import launch_rms_norm
from quire.kernels.sampling.sample_triton import launch_sample
from quire.kernels.sampling.token_bitmask_triton import launch_token_bitmask
from quire.tools.gpu.compiler import compile_launches, make

def launch():
    launch_rms_norm(make(2, 1024), make(2, 1024), make(1024), 1e-6)
    launch_gather_rows(make(9, 1024), make(2, dtype=torch.int64))
    for activation in ("silu", "gelu", "gelu_tanh"):
        launch_gated_activation(make(2, 6144), activation)
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

found = compile_launches(launch)
print(json.dumps([[one.name, one.shared_bytes, one.has_wgmma] for one in found]))
"""
_MAX_SHARED_BYTES = 227 << 10  # of a program on sm_90


@pytest.fixture(scope="module")
def compiled() -> list[tuple[str, int, bool]]:
    """(kernel, bytes of shared memory, has Hopper's matrix instruction) of each launch."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", _SCRIPT]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [(name, size, has) for name, size, has in json.loads(done.stdout.splitlines()[-1])]


def test_every_dense_kernel_compiles_for_an_h100(compiled: list[tuple[str, int, bool]]) -> None:
    assert {name for name, _, _ in compiled} == {
        "_rms_norm",
        "_gather_rows",
        "_gated_activation",
        "_linear_few",
        "_add_segments",
        "_linear_many",
        "_summarize",
        "_choose",
        "_choose_filtered",
        "_sum_chunks",
        "_add_chunks",
        "_apply_token_bitmask",
        "_penalize",
    }


def test_every_program_fits_the_shared_memory_of_a_multiprocessor(
    compiled: list[tuple[str, int, bool]],
) -> None:
    assert all(size <= _MAX_SHARED_BYTES for _, size, _ in compiled)


def test_the_matrix_units_take_every_number_of_rows(compiled: list[tuple[str, int, bool]]) -> None:
    linear = [has for name, _, has in compiled if name in ("_linear_few", "_linear_many")]
    assert linear == [True, True, True]
