"""`quire bench launches`: what the host does for a GPU's steps without graphs, on a machine without a GPU.

A worker on CPU tensors launches Triton's kernels through Triton's own binder and a driver that does nothing.
Launches, copies and products are counted, and the host's time is that of Python and of torch's dispatch: the
driver's calls are not in it, and products are not computed. Each way to launch has a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...ipc.errors import QuireError
from .machine import describe_machine, format_machine
from .model_configs import DUMMY_MODELS
from .table import format_table

MODEL = "qwen3-0.6b"
# Its layers and heads; widths are such that what is allocated costs nothing.
_NARROW = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 512}
_PROMPT_LEN, _MIXED_CHUNK, _WARM_STEPS = 16, 12, 4
_TIMEOUT_S = 300.0
_WAYS = {"triton": "Triton's launcher", "direct": "direct launches"}


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Of one step; what a step took is the least of all."""

    name: str
    launches: int  # of Triton's kernels
    slow_launches: int  # of those, through Triton's own launcher
    products: int
    uploads: int
    host_us: float


def run_launches(batch: int, num_steps: int, json_path: str | None) -> int:
    """Print a row for each way to launch and kind of step."""
    found = {way: measure(way, batch, num_steps) for way in _WAYS}
    rows = [
        [
            f"{_WAYS[way]}, {step.name}",
            *(str(count) for count in (step.launches, step.slow_launches, step.products, step.uploads)),
            f"{step.host_us:,.0f}",
            f"{step.host_us / (step.launches + step.products):.1f}",
        ]
        for way, steps in found.items()
        for step in steps
    ]
    print(format_machine(describe_machine()))
    print(f"\n{MODEL}, {batch} requests, no graphs; the driver's own time is not in it\n")
    print(format_table(_HEADER, rows))
    if json_path is not None:
        records = [{"way": way, **asdict(step)} for way, steps in found.items() for step in steps]
        Path(json_path).write_text(json.dumps(records, indent=1) + "\n")
    return 0


_HEADER = ["step", "launches", "by Triton", "products", "uploads", "host us", "us a launch"]


def measure(way: str, batch: int, num_steps: int) -> list[StepCounts]:
    """A decode step and a mixed one; `way` is "triton" or "direct"."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["QUIRE_NATIVE_KERNELS"] = "0"
    command = [sys.executable, "-P", "-m", __name__, way, str(batch), str(num_steps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode != 0:
        raise QuireError(f"bench launches: {(done.stderr.strip().splitlines() or ['it ended early'])[-1]}")
    return [StepCounts(**step) for step in json.loads(done.stdout.splitlines()[-1])]


class _Counts:
    launches = slow_launches = products = uploads = 0


def _measure_here(way: str, batch: int, num_steps: int) -> list[StepCounts]:
    """In this process, whose Triton and torch are of no other use afterwards."""
    from ..gpu import counted_launches

    counted_launches.count_launches()
    _count_calls(counted_launches)

    from ...worker import worker
    from ..gpu.steps import StepDriver

    if way == "triton":
        worker.launch_directly = lambda: 0
    with tempfile.TemporaryDirectory() as folder:
        config = DUMMY_MODELS[MODEL] | _NARROW
        Path(folder, "config.json").write_text(json.dumps(config))
        driver = StepDriver(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cpu",
            max_model_len=1024,
            max_num_seqs=max(32, batch + 1),
            max_num_batched_tokens=max(512, batch * _PROMPT_LEN),
            kv_cache_memory_bytes=1 << 28,
            num_threads=1,
        )
    rows = list(range(batch))
    driver.run([driver.enter(rows, _PROMPT_LEN, num_steps * 3)])
    decode = _time_steps("decode", num_steps, lambda: driver.run([driver.decode(rows)]))
    mixed = _time_steps("mixed", num_steps, lambda: driver.run([driver.decode(rows, batch, _MIXED_CHUNK)]))
    return [decode, mixed]


def _count_calls(counted_launches: Any) -> None:
    from triton.runtime.jit import JITFunction

    from ...kernels.triton import triton_runtime

    triton_runtime.DEVICE_TYPES = frozenset({"cpu"})
    run = JITFunction.run

    def launch(*_: Any) -> None:
        _Counts.launches += 1

    def run_slowly(*args: Any, **options: Any) -> Any:
        _Counts.slow_launches += 1
        return run(*args, **options)

    counted_launches._Kernel.run = launch
    JITFunction.run = run_slowly
    from ...worker.steps import staging

    for name in ("to_device", "send_together"):
        setattr(staging, name, _count_uploads(getattr(staging, name)))
    from ...worker.layers.linear import TorchLinear

    def multiply(self: Any, x: Any) -> Any:
        _Counts.products += 1
        return x.new_zeros((x.shape[0], self.weight.shape[0]))

    TorchLinear.multiply = multiply


def _count_uploads(send: Any) -> Any:
    def count(*args: Any) -> Any:
        _Counts.uploads += 1
        return send(*args)

    return count


def _time_steps(name: str, num_steps: int, run: Any) -> StepCounts:
    for _ in range(_WARM_STEPS):
        run()
    least = float("inf")
    for _ in range(num_steps):
        _Counts.launches = _Counts.slow_launches = _Counts.products = _Counts.uploads = 0
        start = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - start)
    counts = _Counts.launches, _Counts.slow_launches, _Counts.products, _Counts.uploads
    return StepCounts(name, *counts, host_us=round(least * 1e6, 1))


if __name__ == "__main__":
    print(json.dumps([asdict(step) for step in _measure_here(sys.argv[1], *map(int, sys.argv[2:]))]))
