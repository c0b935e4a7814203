"""The kernels' own tests on this GPU: compiled, and some again under compute-sanitizer's memcheck."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .rows import Row, Say

_ROOT = Path(__file__).parents[2]
_TESTS = _ROOT / "tests"
# Of those with other devices' tests only Triton's are run.
_MIXED_FILES = ("kernels/test_operations.py", "kernels/attention/test_attention.py")
_MEMCHECK_FILES = (*_MIXED_FILES, "kernels/test_triton_sample.py")
_TEST_FILES = (
    *(*_MIXED_FILES, "kernels/test_triton_*.py", "worker/test_triton_model.py"),
    "worker/steps/test_cuda_graphs.py",
)
_TIMEOUT_S = 135.0
_MEMCHECK_TIMEOUT_S = 235.0
_SANITIZER = "compute-sanitizer"
_CUDA_FOLDER = Path("/usr/local/cuda/bin")
_MEMCHECK_CODE = 66  # what it exits with after an error that no test has seen


def check_kernel_tests(say: Say) -> None:
    """Every file of tests in a process of its own, all at once."""
    files = sorted(path for pattern in _TEST_FILES for path in _TESTS.glob(pattern))
    with ThreadPoolExecutor(len(files)) as pool:
        for row in pool.map(lambda path: _run_tests(path, (), {}, _TIMEOUT_S), files):
            say(row)


def check_memory(say: Say, names: Sequence[str] = _MEMCHECK_FILES) -> None:
    """Attention, rotation and sampling: no access past what was allocated, however small the miss."""
    sanitizer = shutil.which(_SANITIZER) or shutil.which(_SANITIZER, path=_CUDA_FOLDER)
    if sanitizer is None:
        say(Row("memcheck", f"not run: no {_SANITIZER} (it comes with the CUDA toolkit)", "done", False))
        return
    prefix = (sanitizer, "--tool", "memcheck", "--error-exitcode", str(_MEMCHECK_CODE))
    # torch's allocator would hand out parts of what the driver knows as one piece.
    more = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with ThreadPoolExecutor(len(names)) as pool:
        files = [_TESTS / name for name in names]
        for row in pool.map(lambda path: _run_tests(path, prefix, more, _MEMCHECK_TIMEOUT_S), files):
            say(row)


def _run_tests(path: Path, prefix: Sequence[str], more: Mapping[str, str], timeout_s: float) -> Row:
    name = f"{'memcheck' if prefix else 'test'} {path.name}"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | dict(more)
    # Options of plugins that are not installed here, and warnings of other versions, are no failures.
    pytest = [sys.executable, "-P", "-m", "pytest", "-q", "-W", "default", "-x", "--tb=short", str(path)]
    pytest += ["-k", "triton"] if str(path.relative_to(_TESTS)) in _MIXED_FILES else []
    try:
        done = subprocess.run(
            [*prefix, *pytest], capture_output=True, text=True, timeout=timeout_s, cwd=_ROOT, env=environment
        )
    except subprocess.TimeoutExpired:
        return Row(name, f"not done in {timeout_s:.0f} s", "passes", False)
    summaries = re.findall(r"\d+ (?:passed|failed|error).*|ERROR SUMMARY: .*", done.stdout)
    said = "; ".join(summaries[-2:]) or (done.stdout + done.stderr)[-300:]
    if done.returncode != 0:
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-1000:])
    return Row(name, " ".join(said.split()), "passes", done.returncode == 0)
