"""A bench's model, by its name, folder or GGUF file: where it is, and its spec."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ...frontend.models.families import read_model_spec
from ...frontend.models.gguf.files import find_gguf_files
from ...frontend.models.gguf.tensors import make_formats
from ...frontend.models.model_files import read_json
from ...frontend.models.model_folder import find_model_folder, inspect_gguf
from ...frontend.models.quantization import read_weight_formats
from ...ipc.errors import InputError
from ...ipc.spec.model_spec import Dtype, ModelSpec
from ...ipc.spec.weight_format import Quantization, WeightFormats, make_online_formats
from .model_configs import BENCH_MODELS, DUMMY_MODELS


@dataclass(frozen=True, slots=True)
class BenchModel:
    """What contestants are to load. is_dummy: the folder has no weights, they are made up."""

    name: str
    path: Path  # a folder or GGUF file
    spec: ModelSpec
    dtype: Dtype
    is_dummy: bool = False


def load_spec(model: str, quantization: Quantization | None = None) -> ModelSpec:
    """Of a bench's model, of a folder's config.json, or of a GGUF file's header; no weights are read.

    Raises InputError for `quantization` of a model that is narrow as it is.
    """
    config: dict[str, Any] | None = (BENCH_MODELS | DUMMY_MODELS).get(model)
    files = find_gguf_files(model) if config is None else ()
    if files:
        folder = inspect_gguf(files, with_tokenizer=False)
        spec = read_model_spec(folder.config)
        formats = make_formats(folder.gguf_tensors, spec)
    else:
        config = config or read_json(find_model_folder(model) / "config.json")
        spec = read_model_spec(config)
        formats = read_weight_formats(config, spec)
    if quantization is not None:
        if formats != WeightFormats():
            raise InputError(
                "quantization", quantization, "None for a model whose weights are narrow already"
            )
        formats = make_online_formats(quantization)
    return replace(spec, weight_formats=formats)


def load_bench_model(name: str) -> BenchModel:
    """A bench's model (written on first use), 'pocket', a folder, or a GGUF file. Raises InputError."""
    spec = load_spec(name)
    if name in BENCH_MODELS or name in DUMMY_MODELS:
        folder = ensure_written(name)
        return BenchModel(name, folder, spec, "bfloat16", is_dummy=name in DUMMY_MODELS)
    if find_gguf_files(name):
        return BenchModel(Path(name).stem, Path(name).resolve(), spec, "bfloat16")
    folder = find_model_folder(name)
    config = read_json(folder / "config.json")
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return BenchModel(Path(name).name, folder, spec, dtype)


def ensure_written(name: str) -> Path:
    """The folder of a model that models.py writes, by a process that loads torch."""
    command = [sys.executable, "-m", f"{__package__}.models", name]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Path(out.strip().splitlines()[-1])
