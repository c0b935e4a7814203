"""Models cut into stages of a pipeline give the bits of the whole model, natively and layer by layer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import RECIPES, Checkpoint, make_checkpoint
from encoders import ENCODERS, EncoderStep, compute_reference, make_encoder
from msgspec.structs import replace
from paged import compute_alone
from quire.ipc.errors import ModelError
from quire.ipc.spec.config import EngineConfig
from quire.kernels.group.shared_group import SharedGroup
from quire.worker.models import load_model
from ranks import Pipeline, run_ranks, with_ranks
from torch import Tensor

CPU = torch.device("cpu")
LENGTH = 45  # past the trained length of 32, not a multiple of the block size
# Dense with tied tables and windows, experts, norms elsewhere, angles that a request's length decides.
NAMES = ["llama", "gemma2", "mixtral", "olmo2", "qwen2"]

pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    recipe = dataclasses.replace(RECIPES[request.param], num_layers=4)
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), recipe)


def compute_logits(checkpoint: Checkpoint, model: Any, config: EngineConfig, chunk: int | None) -> Tensor:
    return compute_alone(model, config, checkpoint.draw_tokens(LENGTH), chunk)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_logits_of_stages_have_the_bits_of_the_whole_model(
    checkpoint: Checkpoint, num_stages: int, dtype: str
) -> None:
    config = checkpoint.engine_config(dtype)
    whole, pipeline = load_model(config, CPU), Pipeline(config, num_stages)
    expected = compute_logits(checkpoint, whole, config, None)
    assert all(stage.native is not None for stage in pipeline.stages)
    assert torch.equal(compute_logits(checkpoint, pipeline, config, None), expected)
    assert torch.equal(compute_logits(checkpoint, pipeline, config, 7), expected)
    pipeline.leave_native()
    assert torch.equal(compute_logits(checkpoint, pipeline, config, 16), expected)
    if dtype == "float32":
        reference = checkpoint.compute_reference(checkpoint.draw_tokens(LENGTH))
        torch.testing.assert_close(expected, reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize("checkpoint", RECIPES, indirect=True)
def test_two_stages_of_two_ranks_equal_transformers_with_the_same_bits_always(checkpoint: Checkpoint) -> None:
    config = with_ranks(checkpoint.engine_config(), 2)

    def compute(group: SharedGroup) -> list[Tensor]:
        pipeline = Pipeline(config, 2, group)
        return [compute_logits(checkpoint, pipeline, config.for_rank(), chunk) for chunk in (None, 7, None)]

    reference = checkpoint.compute_reference(checkpoint.draw_tokens(LENGTH))
    first, *others = run_ranks(2, compute)[0] + run_ranks(2, compute)[0]
    torch.testing.assert_close(first, reference, rtol=0, atol=1e-4)
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("name", ENCODERS)
def test_two_stages_of_two_ranks_of_an_encoder_equal_transformers(tmp_path: Path, name: str) -> None:
    checkpoint = make_encoder(tmp_path, name)
    config = with_ranks(checkpoint.engine_config(max_model_len=512), 2)

    def compute(group: SharedGroup) -> list[Tensor]:
        step = EncoderStep(Pipeline(config, 2, group), config.for_rank())  # pyright: ignore[reportArgumentType]
        return step.compute(checkpoint, [0, 1, 3])

    first, *others = [run_ranks(2, compute)[0] for _ in range(2)]
    for which, found in zip((0, 1, 3), first, strict=True):
        torch.testing.assert_close(found, compute_reference(checkpoint, which), rtol=0, atol=1e-5)
    assert all(map(torch.equal, others[0], first))


@pytest.mark.parametrize("name", ["bert", "modernbert", "mpnet"])
def test_hidden_states_of_an_encoders_stages_equal_transformers(tmp_path: Path, name: str) -> None:
    checkpoint = make_encoder(tmp_path, name)
    config = checkpoint.engine_config(max_model_len=512)
    pipeline = Pipeline(config, 2)
    step = EncoderStep(pipeline, config)  # pyright: ignore[reportArgumentType]
    found = step.compute(checkpoint, [0, 1])
    for which in range(2):
        torch.testing.assert_close(found[which], compute_reference(checkpoint, which), rtol=0, atol=1e-5)
    pipeline.leave_native()
    assert all(map(torch.equal, step.compute(checkpoint, [0, 1]), found))


@pytest.mark.parametrize("checkpoint", ["llama", "gemma2"], indirect=True)
def test_a_stage_reads_its_own_weights_and_refuses_those_of_nobody(checkpoint: Checkpoint) -> None:
    config = checkpoint.engine_config()
    stages = Pipeline(config, 2).stages
    assert max(stage.weight_bytes for stage in stages) < load_model(config, CPU).weight_bytes
    layers = config.model.spec.layers
    shorter = replace(config.model.spec, layers=layers[:3])
    config = replace(config, model=replace(config.model, spec=shorter))
    with pytest.raises(ModelError, match=r"does not have, the first is 'model\.layers\.3\."):
        Pipeline(config, 2)
