"""`quire doctor` says what is missing, and its exit code says whether generation could work."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.cli.commands import doctor
from quire.frontend.cli.commands.doctor import Check, Status
from quire.frontend.models.model_folder import pocket_encoder_folder, pocket_folder
from quire.frontend.options.engine_args import EngineArgs
from quire.frontend.options.gpu_cards import Card
from quire.ipc.processes.cpu_cores import CpuCore
from quire.tools.bench import machine
from tool_template import PLAIN_TEMPLATE, TEMPLATE

REPORT: dict[str, Any] = {
    "torch": "2.11.0+cu130",
    "cpu_capability": "AVX512",
    "num_threads": 8,
    "cuda_built": "13.0",
    "gpu_fault": None,
    "gpus": [],
    "cpu_kernels": {"is_native": True, "detail": "native"},
    "triton": {"is_needed": False, "is_usable": False, "detail": "not needed without a GPU"},
    "flashinfer": {"is_needed": False, "is_usable": False, "detail": "not needed without a GPU"},
}


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the calls in this process none starts another one with torch."""
    monkeypatch.setattr(doctor, "probe", lambda: REPORT)


def test_this_machine_can_generate() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire", "doctor", "--json"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["can_generate"]
    by_name = {check["name"]: check for check in report["checks"]}
    assert by_name["run directory"]["status"] == "ok"
    assert by_name["torch"]["detail"].split(",")[0].startswith("2.")
    assert "cpu kernels" in by_name
    assert by_name["triton"]["status"] == "ok"
    if not Path("/dev/nvidiactl").exists():
        assert by_name["flashinfer"]["status"] == "ok"
        assert by_name["flashinfer"]["detail"].endswith("without a GPU")


def test_what_is_missing_is_named_and_the_exit_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    def check_nothing() -> Iterator[Check]:
        yield Check("packages", Status.MISSING, "pip install torch")

    assert doctor.run([], {"packages": check_nothing}) == 1
    assert capsys.readouterr().out.splitlines() == [
        "missing packages  pip install torch",
        "",
        "Quire cannot generate here; see 'missing'.",
    ]


def test_a_check_that_raises_is_a_finding_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def check_badly() -> Iterator[Check]:
        raise OSError("no space left on device")

    assert doctor.run([], {"run directory": check_badly, "pocket models": doctor.check_pocket_models}) == 1
    out = capsys.readouterr().out
    assert "missing run directory   no space left on device" in out
    assert "ok      pocket model" in out
    assert "ok      pocket encoder" in out


def test_a_run_directory_that_others_may_enter_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="q", dir="/tmp") as folder:  # pytest's own may be too long
        (Path(folder) / "quire").mkdir(mode=0o755)
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        assert doctor.run([], {"run directory": doctor.check_run_directory}) == 1
    assert "mode 0700" in capsys.readouterr().out


def test_the_required_packages_are_those_of_pyproject() -> None:
    import tomllib

    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    listed = {line.split(">")[0].strip() for line in pyproject["project"]["dependencies"]}
    assert set(doctor.list_required_packages()) == listed


def test_a_model_is_looked_at_with_how_its_calls_would_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(pocket_folder(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert doctor.run([str(folder)], {}) == 0
    shown = capsys.readouterr().out
    assert "formats  calls: hermes; thoughts: <think> ... </think> (from the chat template)" in shown
    assert "native: 6 layers of Quire's own" in shown
    (folder / "chat_template.jinja").write_text(PLAIN_TEMPLATE)
    assert doctor.run([str(folder)], {}) == 0
    assert "note    formats  calls: none; thoughts: none (from" in capsys.readouterr().out
    assert doctor.run([str(folder), "--tool-call-parser", "llama3_json"], {}) == 0
    assert "calls: llama3_json; thoughts: none (as chosen by --tool-call-parser" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "list_cores", lambda: [CpuCore(0, 0), CpuCore(0, 1)])
    assert doctor.run([str(folder), "--tensor-parallel-size", "64"], {}) == 1  # no model is cut so often
    assert "note    ranks  64 ranks share" in capsys.readouterr().out
    assert doctor.run(["--tensor-parallel-size", "65"], {}) == 1
    assert "tensor_parallel_size=65: expected an integer from 1 to 64" in capsys.readouterr().out
    assert doctor.run([str(folder), "--pipeline-parallel-size", "2", "--tensor-parallel-size", "2"], {}) == 0
    shown = capsys.readouterr().out
    assert "4 ranks share 2 cores" in shown
    assert "stage 0: layers 0-2 (ranks 0, 1), stage 1: layers 3-5 (ranks 2, 3)" in shown
    assert doctor.run([str(folder), "--pipeline-parallel-size", "7"], {}) == 1
    assert "pipeline_parallel_size=7: expected at most 6" in capsys.readouterr().out
    assert doctor.run([str(folder / "none")], {}) == 1
    assert "missing model  model=" in capsys.readouterr().out


def test_the_plan_of_several_engines_says_which_cores_each_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "list_cores", lambda: [CpuCore(0, 0), CpuCore(0, 1)])
    assert doctor.run(["--engines", "2"], {}) == 0
    assert "ok      engines  2 engines with 1 thread each (cores 0, 1)" in capsys.readouterr().out
    assert doctor.run(["--engines", "3"], {}) == 0
    assert "note    engines  3 engines with 1 thread each" in capsys.readouterr().out
    assert doctor.run(["--engines", "65"], {}) == 1
    assert "data_parallel_size=65: expected an integer from 1 to 64" in capsys.readouterr().out


def test_what_weights_take_is_told_before_they_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(["pocket"], {}) == 0
    said = capsys.readouterr().out
    sizes = "14.9 MB in memory; 5.2 MB with quantization=int8, 3.8 MB with quantization=int4"
    assert re.search(rf"weights +{sizes}\n", said)
    assert doctor.run(["pocket", "--quantization", "int4"], {}) == 0
    said = capsys.readouterr().out
    assert "(int4 weights)" in said
    assert re.search(r"weights +3.8 MB in memory\n", said)
    config = EngineArgs(model="pocket", dtype="float16").create_engine_config().model
    assert doctor.describe_sizes(config).startswith("6.8 MB in memory")  # torch packs no table


def test_weights_that_do_not_fit_the_gpu_are_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "find_card", lambda: Card("Tiny GPU", 10_000_000))
    assert doctor.run(["pocket"], {}) == 0
    said = "13 MB of weights do not fit Tiny GPU with 10 MB: narrower ones, more GPUs, or --device cpu"
    assert f"note    gpu memory  {said}" in capsys.readouterr().out
    assert doctor.run(["pocket", "--tensor-parallel-size", "2"], {}) == 0
    assert "gpu memory" not in capsys.readouterr().out


def test_why_a_gpu_or_its_kernels_are_not_used_is_a_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"torch": doctor.check_torch}
    monkeypatch.setattr(doctor, "probe", lambda: REPORT | {"gpu_fault": "NVIDIA's driver is too old"})
    assert doctor.run([], parts) == 0  # the CPU can
    assert "note    gpu          models run on the CPU: NVIDIA's driver is too old" in capsys.readouterr().out
    card = {"name": "H100", "capability": "9.0", "memory_bytes": 80 << 30, "free_bytes": 70 << 30}
    triton = {"is_needed": True, "is_usable": False, "detail": "slower torch operations instead: no gcc"}
    monkeypatch.setattr(doctor, "probe", lambda: REPORT | {"gpus": [card], "triton": triton})
    assert doctor.run([], parts) == 0
    said = capsys.readouterr().out
    assert "cuda:0: H100, compute capability 9.0, 70.0 GiB free of 80.0 GiB" in said
    assert "note    triton       slower torch operations instead: no gcc" in said


def test_of_a_model_that_makes_vectors_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(pocket_encoder_folder())
    assert doctor.run([folder], {}) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "Quire can embed, token_embed, score here."
    assert "vectors  128 numbers, mean pooling, normalized; texts of up to 256 tokens" in said
    assert "formats" not in said
    assert doctor.run([folder, "--json"], {}) == 0
    report = json.loads(capsys.readouterr().out)
    assert not report["can_generate"]
    assert report["checks"][0]["tasks"] == ["embed", "token_embed", "score"]


@pytest.mark.parametrize(
    ("fault", "status", "text"),
    [
        ("", Status.OK, "1 nodes: 127.0.0.1 has CPU 64, GPU 0; free in all: CPU 64, GPU 0"),
        ("alone", Status.NOTE, "a Ray cluster that this machine belongs to (Could not find any running Ray"),
    ],
)
def test_the_cluster_of_ray_is_asked_what_it_has(
    monkeypatch: pytest.MonkeyPatch, fault: str, status: Status, text: str
) -> None:
    monkeypatch.setattr(machine, "find_version", lambda _name: "2.60.0")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "fake_ray"), prepend=os.pathsep)
    monkeypatch.setenv("FAKE_RAY", fault)
    (check,) = doctor.check_ray()
    assert check.status is status
    assert check.detail.startswith(text)


GPUS = [{"name": "H100", "memory_bytes": 80 << 30}, {"name": "H100", "memory_bytes": 80 << 30}]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((2, 1), "ok      ranks  rank 0: GPU 0 (H100), rank 1: GPU 1 (H100)"),
        ((4, 1), "missing ranks  2 GPUs for 4 ranks, which need one each; or --device cpu"),
        ((1, 2), "ok      ranks  with --device cpu, where stages run: rank 0: cores 0 (node 0), rank 1"),
    ],
)
def test_ranks_have_gpus_of_their_own_where_there_are_any(
    sizes: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "probe", lambda: {"gpus": GPUS})
    monkeypatch.setattr(doctor, "list_cores", lambda: [CpuCore(0, 0), CpuCore(0, 1)])
    words = ["--tensor-parallel-size", str(sizes[0]), "--pipeline-parallel-size", str(sizes[1])]
    code = doctor.run(words, {})
    assert code == expected.startswith("missing")
    assert expected in capsys.readouterr().out
