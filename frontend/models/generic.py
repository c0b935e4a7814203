"""Decoders that no family here reads: a child is asked whether transformers' code can compute them here.

The frontend loads neither torch nor transformers. The child builds the model without memory and runs it once
so (worker/models/generic/plan.py), which takes some 6 s of a processor; who uses a family here pays nothing.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Mapping
from typing import Any

import msgspec

from ...ipc.decoding import decode_json
from ...ipc.errors import EngineStartError, ModelError, describe_install
from ...ipc.processes.process import module_command
from ...ipc.spec.model_spec import ModelSpec
from .families import describe_families, refuse_architecture

_PLANNER = "quire.worker.models.generic.plan"
_MIN_VERSION = 5
_TIMEOUT_S = 300.0


class _Refusal(msgspec.Struct, array_like=True):
    field: str
    value: str | int | float | list[Any] | None
    allowed: str


def read_generic_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The model of config.json as transformers computes it. ModelError: what is not covered, or missing."""
    _check_installed(config)
    command, question = module_command(_PLANNER), msgspec.json.encode(config)
    try:
        done = subprocess.run(command, input=question, capture_output=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        text = f"one that transformers builds within {_TIMEOUT_S:g} s"
        raise ModelError("config.json", config.get("model_type"), text) from None
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        errors = done.stderr.decode(errors="replace").strip().splitlines()
        raise EngineStartError(errors[-1] if errors else f"{_PLANNER} ended with code {done.returncode}")
    spec, refusal = decode_json(lines[-1], tuple[ModelSpec | None, _Refusal | None])
    if refusal is not None:
        raise ModelError(
            refusal.field,
            refusal.value,
            f"{refusal.allowed} (by transformers' code; {describe_families(config)})",
        )
    assert spec is not None
    return spec


def _check_installed(config: Mapping[str, Any]) -> None:
    """ModelError without a transformers of a version that the planner knows."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if not version or int(version.partition(".")[0]) < _MIN_VERSION:
        there = f"; {version} is installed" if version else ""
        others = f"; other decoders by transformers {_MIN_VERSION} or newer{there}"
        raise refuse_architecture(config, f"{others} ({describe_install('transformers')})")
