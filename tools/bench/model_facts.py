"""What the bench reads from a model folder's config.json and safetensors header: vocabulary and sizes."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .floors import ModelSize

_HEADER_LENGTH = struct.Struct("<Q")
_BYTES_PER_PARAM = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model folder's facts."""

    name: str
    folder: Path
    vocab_size: int
    dtype: str
    num_params: int
    size: ModelSize


def read_model_facts(name: str, folder: Path) -> ModelFacts:
    """Read the facts; raises OSError or ValueError when the folder is not a checkpoint."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    sizes: dict[str, int] = {}
    dtypes: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        for tensor, entry in _read_header(path).items():
            if tensor != "__metadata__":
                sizes[tensor] = math.prod(entry["shape"])
                dtypes.add(entry["dtype"])
    if not sizes:
        raise ValueError(f"{folder} has no safetensors")
    embedding = sizes.get("model.embed_tokens.weight", 0)
    head = sizes.get("lm_head.weight", embedding)
    num_params = sum(sizes.values())
    layers = num_params - embedding - sizes.get("lm_head.weight", 0)
    dtype = sorted(dtypes)[0]
    return ModelFacts(
        name=name,
        folder=folder,
        vocab_size=int(config["vocab_size"]),
        dtype=dtype.lower(),
        num_params=num_params,
        size=ModelSize(layers, head, _BYTES_PER_PARAM.get(dtype, 2)),
    )


def _read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (length,) = _HEADER_LENGTH.unpack(file.read(_HEADER_LENGTH.size))
        return json.loads(file.read(length))
