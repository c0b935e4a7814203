"""Quantized checkpoints that lie in shapes, types, numbers or config: one line, or a sound weight."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from golden_weights import GOLDEN_NAMES, LAYER, GoldenWeight
from quire.ipc.errors import ConfigError, ModelError
from quire.worker.weights.integer_weight import IntegerWeight, check_weight, dequantize

DTYPES = (
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
)
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 7, 16, 2**31, 2**63, 10**40, 1e300, float("nan"), "", "gptq", "re:(.*)*x",
    "x" * 10_000, [], [[]], {}, {"a": {}}, [None], ["lm_head"], ["re:" + ".*" * 50],
)  # fmt: skip


def change_tensor(tensor: torch.Tensor, random_: random.Random) -> torch.Tensor | None:
    """The tensor with another shape, type or numbers; None: it is missing."""
    kind = random_.randrange(7)
    if kind == 0:
        return None
    if kind == 1:
        return tensor.to(random_.choice(DTYPES))
    if kind == 2:
        return tensor.flatten()
    if kind == 3:
        return tensor.unsqueeze(random_.randrange(tensor.dim() + 1))
    if kind == 4 and tensor.dim():
        axis = random_.randrange(tensor.dim())
        return tensor.repeat_interleave(2, axis) if random_.random() < 0.5 else tensor.narrow(axis, 0, 0)
    flat = tensor.reshape(-1).clone().view(torch.uint8)
    if not len(flat):
        return tensor
    for _ in range(random_.choice((1, 4, 64))):
        flat[random_.randrange(len(flat))] = random_.randrange(256)
    return flat.view(tensor.dtype).reshape(tensor.shape)


def change_config(config: dict[str, Any], random_: random.Random) -> None:
    """One value of an object in it, at any depth, is another one; or a key is new."""
    while True:
        key = random_.choice([*config, "new_key"])
        if isinstance(config.get(key), dict) and config[key] and random_.random() < 0.8:
            config = config[key]
            continue
        config[key] = random_.choice(ODD_VALUES)
        return


def mutate(golden: GoldenWeight, random_: random.Random) -> None:
    for _ in range(random_.choice((1, 1, 2))):
        if random_.random() < 0.35:
            change_config(golden.config, random_)
        elif golden.tensors:
            name = random_.choice(sorted(golden.tensors))
            changed = change_tensor(golden.tensors.pop(name), random_)
            if changed is not None:
                golden.tensors[name] = changed
    if random_.random() < 0.1:
        golden.shape = random_.choice([(64, 96), (63, 128), (1, 1), (2**40, 2**20), golden.shape])


def check_error(error: Exception) -> bool:
    assert "\n" not in str(error)
    assert len(str(error)) < 2000
    return True


def attack(seed: int) -> bool:
    """Whether the mutation was refused. What is not refused must be a weight of its format, with numbers."""
    random_ = random.Random(seed)
    golden = GoldenWeight(GOLDEN_NAMES[seed % len(GOLDEN_NAMES)])
    mutate(golden, random_)
    try:
        weight_format = golden.find_format()
        if weight_format is None:
            return True
        weight = golden.read()
        check_weight(LAYER, weight, weight_format, *golden.shape)
    except (ModelError, ConfigError) as error:
        return check_error(error)
    assert bool(weight.scales.float().isfinite().all())
    if isinstance(weight, IntegerWeight):
        assert (weight.offsets is not None) == weight_format.has_offsets
        assert (weight.codebook is not None) == weight_format.has_codebook
        assert bool(dequantize(weight).isfinite().all())
    return False


def test_changed_files_are_refused_or_read_whole() -> None:
    refused = [attack(seed) for seed in range(600)]
    assert 300 < sum(refused) < 600


@pytest.mark.slow
def test_ten_thousand_changed_files_of_each_kind_are_refused_or_read_whole() -> None:
    for seed in range(600, 10_600):
        attack(seed)
