"""What the bench reads from config.json and headers of safetensors or GGUF files: vocabulary and sizes."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...frontend.models.gguf.files import find_gguf_files
from ...frontend.models.gguf.folder import open_gguf
from ...ipc.spec.gguf_tensor import find_main_type
from ...ipc.spec.weight_format import Quantization
from .floors import ModelSize
from .model_configs import list_tensor_shapes

_HEADER_LENGTH = struct.Struct("<Q")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BYTES_PER_PARAM = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's facts."""

    name: str
    folder: Path  # or a GGUF file
    vocab_size: int
    dtype: str
    num_params: int
    size: ModelSize
    is_dummy: bool = False  # a config without weights

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file."""
        return self.folder.is_file()


def read_model_facts(name: str, folder: Path, is_dummy: bool = False) -> ModelFacts:
    """Read the facts; raises OSError or ValueError when the folder is not a checkpoint."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if is_dummy:
        sizes, dtype = _list_sizes(config), "BF16"
    else:
        sizes, dtype = _read_sizes(folder)
    return _make_facts(name, folder, config, sizes, dtype, is_dummy)


def read_gguf_facts(file: Path) -> ModelFacts:
    """Those of a GGUF file, or the first part of one. Raises ModelError and what `open_gguf` raises."""
    model = open_gguf(find_gguf_files(str(file)), with_tokenizer=False)
    config = json.loads((model.folder / "config.json").read_text())
    sizes = {tensor.name: math.prod(tensor.shape) for tensor in model.tensors}
    facts = _make_facts(file.stem, file, config, sizes, "BF16", False)
    num_bytes = {tensor.name: tensor.size_bytes for tensor in model.tensors}
    step_bytes = model.size_bytes - (num_bytes[_EMBEDDING] if _HEAD in sizes else 0)
    mean = step_bytes / (facts.size.num_layer_params + facts.size.num_head_params)
    size = replace(facts.size, bytes_per_param=mean)
    return replace(facts, dtype=find_main_type(model.tensors).lower(), size=size)


def _make_facts(
    name: str, folder: Path, config: dict[str, Any], sizes: dict[str, int], dtype: str, is_dummy: bool
) -> ModelFacts:
    embedding = sizes.get(_EMBEDDING, 0)
    num_params = sum(sizes.values())
    num_layer_params = num_params - embedding - sizes.get(_HEAD, 0)
    return ModelFacts(
        name=name,
        folder=folder,
        vocab_size=int(config["vocab_size"]),
        dtype=dtype.lower(),
        num_params=num_params,
        size=_make_model_size(config, num_layer_params, sizes.get(_HEAD, embedding), dtype),
        is_dummy=is_dummy,
    )


def quantize_facts(facts: ModelFacts, quantization: Quantization) -> ModelFacts:
    """The same with narrow weights, of which a step reads fewer bytes. Keys and values stay as they are."""
    size = facts.size
    layer_bytes = 4.25 / 8 if quantization == "int4" else 1.0  # groups of 64 with a scale of 16 bits
    num_bytes = size.num_layer_params * layer_bytes + size.num_head_params
    mean = num_bytes / (size.num_layer_params + size.num_head_params)
    return replace(facts, size=replace(size, bytes_per_param=mean))


def _make_model_size(
    config: dict[str, Any], num_layer_params: int, num_head_params: int, dtype: str
) -> ModelSize:
    bytes_per_param = _BYTES_PER_PARAM.get(dtype, 2)
    num_layers, num_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    head_size = int(config.get("head_dim") or config["hidden_size"] // num_heads)
    return ModelSize(
        num_layer_params=num_layer_params,
        num_head_params=num_head_params,
        bytes_per_param=bytes_per_param,
        kv_bytes_per_token=num_layers * 2 * num_kv_heads * head_size * bytes_per_param,
        attention_flops_per_key=num_layers * 4 * num_heads * head_size,  # q.k and its part of the sum of v
    )


def _list_sizes(config: dict[str, Any]) -> dict[str, int]:
    return {name: math.prod(shape) for name, shape in list_tensor_shapes(config).items()}


def _read_sizes(folder: Path) -> tuple[dict[str, int], str]:
    """Elements of every tensor, and the number format of the first in order."""
    sizes: dict[str, int] = {}
    dtypes: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        for tensor, entry in _read_header(path).items():
            if tensor != "__metadata__":
                sizes[tensor] = math.prod(entry["shape"])
                dtypes.add(entry["dtype"])
    if not sizes:
        raise ValueError(f"{folder} has no safetensors")
    return sizes, sorted(dtypes)[0]


def _read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (length,) = _HEADER_LENGTH.unpack(file.read(_HEADER_LENGTH.size))
        return json.loads(file.read(length))
