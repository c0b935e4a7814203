"""The table of compiled kernels (tools/gpu/variants.py) is what serving launches; what spills is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from checkpoints import Recipe, make_checkpoint
from quire.ipc.spec.config import EngineConfig, SchedulerConfig

pytest.importorskip("triton")

TABLE = Path(__file__).parent / "compiled_kernels.json"
SHARED_BYTES = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
_TIMEOUT_S = 280.0
pytestmark = pytest.mark.timeout(_TIMEOUT_S + 20)

# Of each case how many variants a kernel has, and which kernels are not fused.
_COUNT = """
import json
from collections import Counter
from quire.tools.gpu.variants import CASES, record_case
found = {}
for name, case in CASES.items():
    launches = record_case(case, 90)
    unfused = sorted({one.name for one in launches if not one.options.enable_fp_fusion})
    found[name] = Counter(one.name for one in launches), unfused
print(json.dumps(found))
"""
_COMPILE = """
import json, sys
from quire.tools.gpu.variants import CASES, compile_case
print(json.dumps(compile_case(CASES[sys.argv[1]], int(sys.argv[2]))))
"""
# What a worker's start launches and what is listed of its model, each only there. Each in a fork of its own:
# imports, which take as long as a start, are done once.
_START = """
import json, os, sys
import msgspec, torch
from triton.runtime import driver
from quire.ipc.spec.config import EngineConfig
from quire.kernels.triton import triton_runtime
from quire.tools.gpu.compiler import SHARED_BYTES, record_launches
from quire.tools.gpu.counted_launches import Driver
from quire.tools.gpu.variants import Case, record_model
from quire.worker.attention import triton_attention
from quire.worker.worker import Worker

def compare(config):
    case = Case("", is_exact=config.exact, is_int4=config.model.quantization == "int4")
    listed = {launch.key for launch in record_model(config.model.spec, case, 90)}
    triton_runtime.DEVICE_TYPES = frozenset({"cpu"})
    triton_attention.find_card = lambda device: triton_attention.Card(132, SHARED_BYTES[90])
    driver.set_active(Driver())
    record_launches(lambda: triton_runtime.find_fault("cpu"))  # the kernel that shows whether kernels run
    torch.Tensor.new_empty, torch.empty_like = torch.Tensor.new_zeros, torch.zeros_like
    started = {launch.key for launch in record_launches(Worker(config, lambda phase: None).start)}
    return len(started), sorted(started - listed), sorted(listed - started)

found = []
for config in msgspec.json.decode(sys.argv[1], type=list[EngineConfig]):
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(sink, json.dumps(compare(config)).encode())
        os._exit(0)
    os.close(sink)
    with open(source) as answer:
        found.append(json.loads(answer.read() or "null"))
    os.waitpid(pid, 0)
print(json.dumps(found))
"""
_WIDTHS: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 400}
_GEMMA = Recipe("gemma2", head_size=256, sliding_window=512, tied=True, **_WIDTHS)
# A recipe, whether its kernels are exact, and what its weights become: plain weights and narrow ones.
Start = tuple[Recipe, bool, str | None]
_USUAL: dict[str, Start] = {
    "plain": (Recipe("qwen3", num_heads=8, num_kv_heads=4, head_size=64, **_WIDTHS), False, None),
    "int4": (Recipe(head_size=128, **_WIDTHS), False, "int4"),
}
_OTHERS: dict[str, Start] = {
    "exact": (Recipe(head_size=128, **_WIDTHS), True, None),
    "gemma2": (_GEMMA, False, None),
    "gemma2, exact": (_GEMMA, True, None),
}


def run(script: str, *arguments: str, timeout_s: float = _TIMEOUT_S) -> Any:
    """In a process of its own, because Triton decides at its import whether it interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["QUIRE_NATIVE_KERNELS"] = "0"
    command = [sys.executable, "-P", "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def counted() -> Iterator[dict[str, tuple[dict[str, int], list[str]]]]:
    """By case, where Triton itself would not fuse."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
        yield run(_COUNT)


def test_serving_launches_as_many_variants_as_the_table_has(counted: dict[str, Any]) -> None:
    table = json.loads(TABLE.read_text())
    wanted = {
        name: {kernel: row["variants"] for kernel, row in own["sm_90"].items()} for name, own in table.items()
    }
    assert {name: variants for name, (variants, _) in counted.items()} == wanted


def test_products_and_sums_are_fused_whatever_triton_does_unasked(counted: dict[str, Any]) -> None:
    assert {name: unfused for name, (_, unfused) in counted.items()} == {
        name: ["_combine_kernel", "_paged_attention_kernel"] if "exact" in name else [] for name in counted
    }


@pytest.mark.parametrize("starts", [_USUAL, pytest.param(_OTHERS, marks=pytest.mark.slow)], ids=", ".join)
def test_a_start_launches_the_variants_that_are_listed_and_no_others(
    starts: dict[str, Start], tmp_path: Path
) -> None:
    configs: list[EngineConfig] = []
    for name, (recipe, is_exact, quantization) in starts.items():
        checkpoint = make_checkpoint(tmp_path / name, recipe)
        config = msgspec.structs.replace(
            checkpoint.engine_config("bfloat16", max_model_len=4096, quantization=quantization),
            scheduler=SchedulerConfig(max_num_seqs=1024, max_num_batched_tokens=2048),
            exact=is_exact,
        )
        configs.append(config)
    found = run(_START, msgspec.json.encode(configs).decode())
    for name, (num_started, only_started, only_listed) in zip(starts, found, strict=True):
        assert (name, only_started, only_listed) == (name, [], [])
        assert num_started >= 20


def test_no_kernel_of_the_table_spills_and_all_fit_their_card() -> None:
    for name, cards in json.loads(TABLE.read_text()).items():
        assert cards.keys() == SHARED_BYTES.keys()
        for card, kernels in cards.items():
            for kernel, row in kernels.items():
                assert row["shared_bytes"] <= SHARED_BYTES[card], (name, card, kernel)
                assert row["spills"] == 0, (name, card, kernel)
            assert kernels["_paged_attention_kernel"]["copies_in_flight"] >= 2, (name, card)


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("architecture", ["80", "89", "90", "100"])
@pytest.mark.parametrize("name", list(json.loads(TABLE.read_text())))
def test_the_table_is_what_the_compiler_makes(name: str, architecture: str) -> None:
    wanted = json.loads(TABLE.read_text())[name][f"sm_{architecture}"]
    found = run(_COMPILE, name, architecture, timeout_s=1800)
    assert found.keys() == wanted.keys()
    for kernel, row in found.items():
        assert row["spills"] <= wanted[kernel]["spills"], (kernel, row)
        assert row["copies_in_flight"] >= wanted[kernel]["copies_in_flight"], (kernel, row)
