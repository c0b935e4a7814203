"""The encoders against transformers, on random tiny checkpoints; and a prompt's bits alone and in a crowd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from checkpoints import Checkpoint
from encoders import ENCODERS, LENGTHS, EncoderStep, compute_reference, make_encoder
from quire.ipc.spec.config import EngineConfig
from quire.worker.models import load_model

CPU = torch.device("cpu")
DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module", params=ENCODERS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_encoder(tmp_path_factory.mktemp("encoder"), request.param)


def make_config(checkpoint: Checkpoint, dtype: str) -> EngineConfig:
    return checkpoint.engine_config(dtype, max_model_len=512)


def load(config: EngineConfig, is_native: bool = True) -> EncoderStep:
    model = load_model(config, CPU)
    if not is_native:
        model.native = None
    return EncoderStep(model, config)


EVERY = list(range(len(LENGTHS)))


def test_hidden_states_equal_transformers(checkpoint: Checkpoint) -> None:
    actual = load(make_config(checkpoint, "float32")).compute(checkpoint, EVERY)
    for which in EVERY:
        torch.testing.assert_close(actual[which], compute_reference(checkpoint, which), rtol=0, atol=1e-5)


def test_bfloat16_hidden_states_point_where_transformers_do(checkpoint: Checkpoint) -> None:
    actual = load(make_config(checkpoint, "bfloat16")).compute(checkpoint, EVERY)
    for which in EVERY:
        expected = compute_reference(checkpoint, which)
        cosine = torch.cosine_similarity(actual[which].float().mean(0), expected.mean(0), dim=0)
        assert cosine >= 0.9999


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_has_the_same_bits_alone_natively_and_with_any_threads(
    checkpoint: Checkpoint, dtype: str, set_threads: Callable[[int], None]
) -> None:
    config = make_config(checkpoint, dtype)
    step = load(config)
    assert step.model.native is not None
    set_threads(1)
    expected = step.compute(checkpoint, EVERY)
    for which in EVERY:
        assert torch.equal(step.compute(checkpoint, [which])[0], expected[which])
    assert all(map(torch.equal, load(config, is_native=False).compute(checkpoint, EVERY), expected))
    set_threads(3)
    assert all(map(torch.equal, step.compute(checkpoint, EVERY), expected))
