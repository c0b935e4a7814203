"""The folder that `quire quantize` writes: compressed-tensors' pack-quantized weights, the rest as it was.

Source of the layout: compressed-tensors 0.20.0, PackedQuantizationCompressor; vLLM and transformers read it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...worker.weights.integer_weight import pack_nibbles
from .rounding import RoundedWeight

_SHARD_BYTES = 2 << 30
_INDEX = "model.safetensors.index.json"
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.md", "LICENSE*")


class FolderWriter:
    """Writes tensors into shards as they come; `finish` adds what the plain checkpoint has beside them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self._total_bytes = 0
        self._shards: list[list[str]] = []
        self._done: set[str] = set()  # modules that were quantized, by the names in the files

    def add(self, module: str, weight: RoundedWeight) -> None:
        """The linear layer `module`, in place of its `weight`."""
        num_out, num_in = weight.codes.shape
        packed = pack_nibbles(weight.codes) if weight.bits == 4 else weight.codes
        self._put(f"{module}.weight_packed", packed.contiguous().view(torch.int32))
        self._put(f"{module}.weight_scale", weight.scales)
        self._put(f"{module}.weight_shape", torch.tensor([num_out, num_in]))
        self._done.add(module)

    def finish(self, source: Path, files: Sequence[str], config: dict[str, Any]) -> None:
        """Copy all other tensors and files; `config` is config.json without the quantization_config.

        Modules with a matrix that stays as it is are listed under "ignore".
        """
        plain: list[str] = []
        for name in files:
            with safe_open(source / name, framework="pt") as file:  # pyright: ignore[reportArgumentType]
                for key in list(file.keys()):
                    module = key.removesuffix(".weight")
                    if module in self._done:
                        continue
                    tensor = file.get_tensor(key)
                    if tensor.dim() == 2 and module != key and "embed" not in module:
                        plain.append(module)
                    self._put(key, tensor)
        self._write_shard()
        self._write_index()
        self._copy_files(source)
        self._write_config(config, sorted({"lm_head", *plain}))

    def _put(self, name: str, tensor: Tensor) -> None:
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes
        if self._pending_bytes >= _SHARD_BYTES:
            self._write_shard()

    def _write_shard(self) -> None:
        if not self._pending:
            return
        tensors = {name: tensor.contiguous() for name, tensor in self._pending.items()}
        path = self._folder / f"shard-{len(self._shards)}"
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _write_index(self) -> None:
        """Name the files, now that their number is known."""
        count, weight_map = len(self._shards), dict[str, str]()
        for index, tensors in enumerate(self._shards):
            name = "model.safetensors" if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"
            (self._folder / f"shard-{index}").rename(self._folder / name)
            weight_map.update(dict.fromkeys(tensors, name))
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._folder / _INDEX).write_text(json.dumps(index, indent=1))

    def _copy_files(self, source: Path) -> None:
        for pattern in _COPIED:
            for path in source.glob(pattern):
                if path.is_file() and path.name not in ("config.json", _INDEX):
                    shutil.copyfile(path, self._folder / path.name)

    def _write_config(self, config: dict[str, Any], ignored: list[str]) -> None:
        config["quantization_config"]["ignore"] = ignored
        (self._folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def make_quantization_config(bits: int, group_size: int | None) -> dict[str, Any]:
    """The quantization_config of all Linear layers; without a group size there is a scale an output."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": scheme},
        "ignore": [],
    }
