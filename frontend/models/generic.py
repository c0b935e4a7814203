"""Decoders that no family here reads: a child is asked whether transformers' code can compute them here.

The frontend loads neither torch nor transformers. The child builds the model without memory and runs it once
so (worker/models/generic/plan.py), which takes some 6 s of a processor; its answer is kept on disk, and who
uses a family here pays nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.decoding import decode_json
from ...ipc.errors import EngineStartError, ModelError, describe_install
from ...ipc.files.private_cache import CacheUnusableError, PrivateCache
from ...ipc.processes.process import module_command
from ...ipc.spec.model_spec import ModelSpec
from .families import describe_families, find_family, refuse_architecture

_PLANNER = "quire.worker.models.generic.plan"
_MIN_VERSION = 5
_OTHERS = "transformers by itself or vLLM may run it, docs/features.md lists what Quire runs"
_TIMEOUT_S = 300.0
_CACHE, _NUM_KEPT = "generic", 256  # answers of 1 to 30 kB
_ROOT = Path(__file__).parents[2]
# What an answer is made by and written in: another text of these gives other answers.
_SOURCES = (
    *("worker/models/generic/plan.py", "worker/models/generic/architecture.py"),
    *("ipc/spec/model_spec.py", "ipc/spec/generic_spec.py", "ipc/errors.py"),
)


class _Refusal(msgspec.Struct, array_like=True):
    field: str
    value: bool | str | int | float | list[Any] | None
    allowed: str


def read_generic_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The model of config.json as transformers computes it. ModelError: what is not covered, or missing."""
    version, question = (
        _check_installed(config),
        json.dumps(config).encode(),
    )  # Infinity, which msgspec has not
    texts = [version.encode(), *((_ROOT / name).read_bytes() for name in _SOURCES), question]
    name = hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()
    answer = _recall(name)
    if answer is None:
        answer = _ask(config, question)
        _keep(name, answer)
    spec, refusal = decode_json(answer, tuple[ModelSpec | None, _Refusal | None])
    if refusal is not None:
        others = "" if find_family(config) else f"; {_OTHERS}"
        text = (
            f"{refusal.allowed} (transformers' code cannot do it here; {describe_families(config)}{others})"
        )
        raise ModelError(refusal.field, refusal.value, text)
    assert spec is not None
    return spec


def _ask(config: Mapping[str, Any], question: bytes) -> bytes:
    """The child's answer, JSON."""
    try:
        done = subprocess.run(
            module_command(_PLANNER), input=question, capture_output=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        text = f"one that transformers builds within {_TIMEOUT_S:g} s"
        raise ModelError("config.json", config.get("model_type"), text) from None
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        errors = done.stderr.decode(errors="replace").strip().splitlines()
        raise EngineStartError(errors[-1] if errors else f"{_PLANNER} ended with code {done.returncode}")
    return lines[-1]


def _recall(name: str) -> bytes | None:
    with contextlib.suppress(CacheUnusableError, OSError):
        cache = PrivateCache.open(_CACHE)
        cache.note_used(name)
        return cache.read(name)
    return None


def _keep(name: str, answer: bytes) -> None:
    with contextlib.suppress(CacheUnusableError, OSError):
        cache = PrivateCache.open(_CACHE)
        cache.write(name, answer)
        cache.remove_old(_NUM_KEPT)


def _check_installed(config: Mapping[str, Any]) -> str:
    """The version of transformers. ModelError without one that the planner knows."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if not version or int(version.partition(".")[0]) < _MIN_VERSION:
        there = f"; {version} is installed" if version else ""
        others = f"; other decoders by transformers {_MIN_VERSION} or newer{there}"
        raise refuse_architecture(config, f"{others} ({describe_install('transformers')})")
    return version
