"""Models that ranks share, against transformers: every family, natively and layer by layer in Python."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoints import RECIPES, Checkpoint, Recipe, make_checkpoint
from decoders import DECODERS, make_decoder
from encoders import ENCODERS, LENGTHS, EncoderStep, compute_reference, make_encoder
from gloo import make_group
from paged import compute_alone
from quire.ipc.spec.config import EngineConfig
from quire.kernels.group.shared_group import SharedGroup
from quire.kernels.program.program import Kind, Program
from quire.worker.models import builder, load_model
from ranks import run_ranks, with_ranks
from torch import Tensor

CPU = torch.device("cpu")
LENGTH = 45  # past the trained length of 32, not a multiple of the block size
# Of the heads of keys each of two ranks has one and a half.
UNEVEN = {"uneven": Recipe(num_heads=12, num_kv_heads=3, head_size=8)}
# Which sizes cut them: as many ranks as heads at most.
SIZES = {name: (2, 4) if name == "distilbert" else (2,) for name in ENCODERS}

pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture(scope="module", params=[*RECIPES, *UNEVEN])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    if request.param in DECODERS:
        return make_decoder(tmp_path_factory.mktemp("checkpoint"), request.param)
    recipe = (RECIPES | UNEVEN)[request.param]
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), recipe)


def compute_logits(checkpoint: Checkpoint, config: EngineConfig) -> list[Tensor]:
    """Rank 0's, of all tokens: at once, in chunks, and in Python."""

    def compute(group: SharedGroup) -> list[Tensor]:
        model = load_model(config, CPU, group)
        assert model.native is not None
        prompt = checkpoint.draw_tokens(LENGTH)
        logits = [compute_alone(model, config.for_rank(), prompt, chunk) for chunk in (None, 7)]
        model.native = None
        return [*logits, compute_alone(model, config.for_rank(), prompt, 16)]

    return run_ranks(config.parallel.tensor_parallel_size, compute)[0]


@pytest.mark.parametrize(("size", "is_table_cut"), [(2, True), (4, False)])
def test_logits_of_ranks_equal_transformers(
    checkpoint: Checkpoint, size: int, is_table_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_table_cut:
        monkeypatch.setattr(builder, "MAX_COPIED_TABLE_BYTES", 0)
    expected = checkpoint.compute_reference(checkpoint.draw_tokens(LENGTH))
    actual, *others = compute_logits(checkpoint, with_ranks(checkpoint.engine_config(), size))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    assert all(torch.equal(other, actual) for other in others)


@pytest.mark.parametrize(
    ("checkpoint", "quantization", "nearest"),
    [
        *((name, kind, 0.99) for name in ("gemma2", "mixtral", "olmo2") for kind in (None, "int8")),
        *((name, "int4", 0.8) for name in ("gemma2", "minicpm3", "deepseek_v3")),  # two of latents
    ],
    indirect=["checkpoint"],
)
def test_bfloat16_logits_of_ranks_are_near_transformers(
    checkpoint: Checkpoint, quantization: str | None, nearest: float
) -> None:
    config = with_ranks(checkpoint.engine_config("bfloat16", quantization=quantization), 2)
    actual, *others = compute_logits(checkpoint, config)
    assert all(torch.equal(other, actual) for other in others)
    expected = checkpoint.compute_reference(checkpoint.draw_tokens(LENGTH))
    assert torch.cosine_similarity(actual, expected, dim=-1).median() > nearest


def test_one_rank_has_no_operation_for_others(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "MAX_COPIED_TABLE_BYTES", 0)
    num_layers = checkpoint.spec.num_layers

    def count(group: SharedGroup | None) -> Counter[Kind]:
        config = checkpoint.engine_config()
        model = load_model(config if group is None else with_ranks(config, group.size), CPU, group)
        program = Program(torch.float32, checkpoint.spec.vocab_size, wants_logits=True)
        model.emit(program)
        return Counter(kind for kind, _ in program._arguments)

    alone, shared = count(None), run_ranks(2, count)
    assert alone[Kind.ALL_REDUCE] == alone[Kind.SHARED_NORM] == 0
    for one in shared:
        assert one[Kind.ALL_REDUCE] == 1 + 2 * num_layers  # the table, attention and what follows it
        assert one.total() - one[Kind.ALL_REDUCE] == alone.total()


@pytest.mark.parametrize(
    ("checkpoint", "size"), [("gemma2", 2), ("mixtral", 2), ("olmo2", 4)], indirect=["checkpoint"]
)
def test_logits_of_ranks_that_have_a_device_each_equal_transformers(
    checkpoint: Checkpoint, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "MAX_COPIED_TABLE_BYTES", 0)
    config = with_ranks(checkpoint.engine_config(), size)

    def compute(group: SharedGroup) -> list[Tensor]:
        model = load_model(config, CPU, group)
        assert model.native is None
        assert model.batch_variance_reason == ""
        prompt = checkpoint.draw_tokens(LENGTH)
        logits = [compute_alone(model, config.for_rank(), prompt, chunk) for chunk in (None, 7)]
        group.leave()
        return logits

    whole, in_chunks = run_ranks(size, compute, partial(make_group, sums_in_order=True))[0]
    expected = checkpoint.compute_reference(checkpoint.draw_tokens(LENGTH))
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-4)
    assert torch.equal(in_chunks, whole)


@pytest.mark.parametrize(("name", "size"), [(name, size) for name in ENCODERS for size in SIZES[name]])
def test_hidden_states_of_ranks_equal_transformers(tmp_path: Path, name: str, size: int) -> None:
    checkpoint = make_encoder(tmp_path, name)
    prompts = range(len(LENGTHS))
    config = with_ranks(checkpoint.engine_config(max_model_len=512), size)

    def compute(group: SharedGroup) -> list[Tensor]:
        model = load_model(config, CPU, group)
        step = EncoderStep(model, config.for_rank())
        together = step.compute(checkpoint, list(prompts))
        assert all(torch.equal(step.compute(checkpoint, [one])[0], together[one]) for one in prompts)
        model.native = None
        assert all(map(torch.equal, step.compute(checkpoint, list(prompts)), together))
        return together

    results = run_ranks(size, compute)
    for which in prompts:
        expected = compute_reference(checkpoint, which)
        torch.testing.assert_close(results[0][which], expected, rtol=0, atol=1e-5)
        assert all(torch.equal(other[which], results[0][which]) for other in results[1:])
