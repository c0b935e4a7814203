"""The golden files of tests/golden/weights: one linear layer each as its format's library stored it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from quire.frontend.models.quantization import read_rule
from quire.ipc.spec.linear_shapes import LinearShape
from quire.ipc.spec.weight_format import WeightFormat
from quire.worker.weights.integer_weight import NarrowWeight
from quire.worker.weights.readers import read_weight
from safetensors import safe_open
from safetensors.torch import load_file

FOLDER = Path(__file__).parent / "golden" / "weights"
GOLDEN_NAMES = sorted(path.stem for path in FOLDER.glob("*.safetensors") if path.stem != "gpt_oss_blocks")
LAYER = "model.layers.0.self_attn.o_proj"  # what "linear" is taken for


def load_golden(name: str) -> dict[str, torch.Tensor]:
    """A file's tensors."""
    return load_file(FOLDER / f"{name}.safetensors")


class GoldenWeight:
    """The layer's tensors, its format by the file's own config, and what the library makes of them."""

    def __init__(self, name: str) -> None:
        with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            self.config = json.loads(file.metadata()["config"])
        self.expected: torch.Tensor = tensors.pop("expected")
        self.tensors = {key.replace("linear", LAYER, 1): tensor for key, tensor in tensors.items()}
        self.unread = set(self.tensors)
        num_out, num_in = self.expected.shape
        self.shape = (num_out, num_in)

    @property
    def format(self) -> WeightFormat:
        """By config.json."""
        found = self.find_format()
        assert found is not None
        return found

    def find_format(self) -> WeightFormat | None:
        """None where config.json leaves the layer out."""
        return read_rule(self.config)(LinearShape(LAYER, *self.shape))

    def find(self, name: str, *, is_read: bool) -> torch.Tensor | None:
        """A TensorFinder."""
        if is_read:
            self.unread.discard(name)
        return self.tensors.get(name)

    def read(self) -> NarrowWeight:
        """By the format's reader."""
        return read_weight(self.find, LAYER, self.format, self.shape)
