"""Which source a model's weights have."""

from __future__ import annotations

from pathlib import Path

import torch

from ..ipc.config import ModelConfig
from .gguf import GgufSource
from .weights import DummySource, SafetensorsSource, WeightSource


def open_weights(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> WeightSource:
    """The source that `model.load_format` and its files name. ModelError when they cannot be used."""
    if model.load_format == "dummy":
        return DummySource(model.seed, dtype, device)
    if model.gguf_tensors:
        return GgufSource(model, dtype, device)
    naming = model.spec.optional_prefix, model.spec.unused_tensors
    return SafetensorsSource(Path(model.model), model.weight_files, dtype, device, *naming)
