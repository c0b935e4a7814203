"""A whole tiny bfloat16 model on strict Triton kernels: right, and with the same bits in any company."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from checkpoints import Checkpoint, Recipe, make_checkpoint
from decoders import make_decoder
from kernel_checks import TRITON_DEVICE as DEVICE
from paged import PagedRun
from quire.kernels.program import native
from quire.kernels.triton import triton_runtime
from quire.worker.models import Decoder, load_model

pytest.importorskip("triton")

PROMPTS = {"a": list(range(40, 49)), "b": [7] * 5, "c": [1, 2, 3]}


@pytest.fixture(scope="module", params=["qwen3", "minicpm3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    if request.param == "minicpm3":  # of latents
        return make_decoder(folder, request.param, num_hidden_layers=1)
    return make_checkpoint(folder, Recipe(family="qwen3", num_layers=1))


@pytest.fixture
def model(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, dots_in_order: None) -> Decoder:  # noqa: ARG001
    monkeypatch.setattr(triton_runtime, "DEVICE_TYPES", {"cpu", "cuda"})
    monkeypatch.setattr(native, "load_library", lambda: None)
    config = msgspec.structs.replace(checkpoint.engine_config("bfloat16"), exact=True)
    loaded = load_model(config, DEVICE)
    assert not loaded.batch_variance_reason
    return loaded


def run(
    checkpoint: Checkpoint, model: Decoder, steps: list[dict[str, int]], seed: int
) -> dict[str, torch.Tensor]:
    """Logits of every token of the prompts that `steps` compute."""
    paged = PagedRun(model, checkpoint.engine_config("bfloat16"), seed=seed, device=DEVICE)
    parts: dict[str, list[torch.Tensor]] = {}
    for name in {name for step in steps for name in step}:
        paged.add(name, PROMPTS[name])
    for step in steps:
        for name, logits in paged.step(step).items():
            parts.setdefault(name, []).append(logits.cpu())
    return {name: torch.cat(logits) for name, logits in parts.items()}


def test_a_model_of_strict_kernels_gives_the_same_bits_in_any_company(
    checkpoint: Checkpoint, model: Decoder
) -> None:
    alone = run(checkpoint, model, [{"a": 9}], seed=0)["a"]
    chunks = run(checkpoint, model, [{"a": 5, "b": 5}, {"c": 3, "a": 3}, {"a": 1}], seed=1)
    assert torch.equal(chunks["a"], alone)
    expected = checkpoint.compute_reference(PROMPTS["a"])
    # A layer rounds its values to bfloat16 some 20 times, each an independent 2^-9 of what is there.
    bound = 4 * 20**0.5 * 2**-9 * expected.abs().max()
    assert (alone - expected).abs().max() < bound
