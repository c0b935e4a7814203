"""Models that ranks share, against transformers: every family, natively and layer by layer in Python."""

from __future__ import annotations

import pytest
import torch
from checkpoints import RECIPES, Checkpoint, Recipe, make_checkpoint
from paged import PagedRun
from quire.kernels.shared_group import SharedGroup
from quire.worker.models import load_model
from ranks import run_ranks, with_ranks
from torch import Tensor

CPU = torch.device("cpu")
LENGTH = 45  # past the trained length of 32, not a multiple of the block size
SIZES = [2, 4]

pytestmark = pytest.mark.usefixtures("library")


# Of the heads of keys each of two ranks has one and a half.
UNEVEN = {"uneven": Recipe(num_heads=12, num_kv_heads=3, head_size=8)}


@pytest.fixture(scope="module", params=[*RECIPES, *UNEVEN])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    recipe = (RECIPES | UNEVEN)[request.param]
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), recipe)


def tokens_of(checkpoint: Checkpoint) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(checkpoint.spec.vocab_size, (LENGTH,), generator=generator).tolist()


def compute_logits(
    checkpoint: Checkpoint,
    size: int,
    chunk: int | None = None,
    is_native: bool = True,
) -> Tensor:
    """Rank 0's, of all tokens."""
    config = with_ranks(checkpoint.engine_config(), size)

    def compute(group: SharedGroup) -> Tensor:
        model = load_model(config, CPU, group)
        assert model.native is not None
        if not is_native:
            model.native = None
        run = PagedRun(model, config.for_rank())
        run.add("a", tokens_of(checkpoint))
        return run.run("a", chunk)

    return run_ranks(size, compute)[0]


@pytest.mark.parametrize("size", SIZES)
def test_logits_of_ranks_equal_transformers(checkpoint: Checkpoint, size: int) -> None:
    with torch.inference_mode():
        expected = checkpoint.reference(torch.tensor([tokens_of(checkpoint)])).logits[0]
    actual = compute_logits(checkpoint, size)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    assert torch.equal(compute_logits(checkpoint, size, chunk=7), actual)
    assert torch.equal(compute_logits(checkpoint, size, is_native=False), actual)
