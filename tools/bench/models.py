"""Writes the bench's checkpoints: random bfloat16 weights of a fixed seed in Hugging Face's layout.

`python -m quire.tools.bench.models NAME` writes one if it is not there yet and prints its folder. Needs torch
and safetensors, not transformers.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .model_configs import BENCH_MODELS, DUMMY_MODELS, WEIGHT_STD, list_tensor_shapes

_LAYOUT_VERSION = 1  # raise it when a checkpoint's contents change: the folders are cached by it


def ensure_model(name: str, cache_folder: Path | None = None) -> Path:
    """The folder of the bench model `name`, written first if it is not there (small: 1.2 GB, about 20 s)."""

    def write(folder: Path) -> None:
        if name in DUMMY_MODELS:
            write_config(DUMMY_MODELS[name], folder)
        else:
            write_checkpoint(BENCH_MODELS[name], folder)

    return ensure_folder(name, write, cache_folder)


def ensure_folder(name: str, write: Callable[[Path], None], cache_folder: Path | None = None) -> Path:
    """The cached folder of that name, which `write` fills if it is not there."""
    folder = (cache_folder or default_cache_folder()) / f"{name}-v{_LAYOUT_VERSION}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and renamed, so that a run that was cut off leaves no half checkpoint there.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
        part = Path(scratch) / "model"
        write(part)
        try:
            part.rename(folder)
        except OSError:  # another run was faster
            if not folder.exists():
                raise
    return folder


def default_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/quire/bench`, or the same under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "bench"


def write_checkpoint(config: dict[str, Any], folder: Path, seed: int = 0) -> None:
    """Write config.json, model.safetensors and tokenizer.json for `config` into a new `folder`."""
    write_config(config, folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _make_tensor(name, shape, generator) for name, shape in list_tensor_shapes(config).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_config(config: dict[str, Any], folder: Path) -> None:
    """Write config.json and tokenizer.json for `config` into a new `folder`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "tokenizer.json").write_text(json.dumps(_make_tokenizer(config["vocab_size"])))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t2", "bos_token": "t1"})
    )


def _make_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, WEIGHT_STD, generator=generator)


def _make_tokenizer(vocab_size: int) -> dict[str, Any]:
    """A tokenizer.json whose words are t0, t1, ...: the bench talks in ids, but a model folder has one."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(vocab_size)}, "unk_token": "t0"},
    }


def main() -> None:
    """Write the named models and print their folders."""
    for name in sys.argv[1:]:
        if name == "--remove":
            shutil.rmtree(default_cache_folder(), ignore_errors=True)
        else:
            print(ensure_model(name))


if __name__ == "__main__":
    main()
