"""The encoders against transformers, on random tiny checkpoints; and a prompt's bits alone and in a crowd."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from checkpoints import Checkpoint
from encoders import ENCODERS, make_encoder
from quire.ipc.config import EngineConfig
from quire.worker.attention.metadata import AttentionMetadata
from quire.worker.kv_cache import allocate_kv_caches
from quire.worker.models import Decoder, load_model
from torch import Tensor

CPU = torch.device("cpu")
DTYPES = ["float32", "bfloat16"]
# Around the borders of blocks (16), of tiles (256 keys) and of ModernBERT's window; where type 1 begins.
LENGTHS = (1, 16, 45, 300, 7)
TYPE_STARTS = (1, 5, 45, 120, 0)


@pytest.fixture(scope="module", params=ENCODERS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_encoder(tmp_path_factory.mktemp("encoder"), request.param)


def make_config(checkpoint: Checkpoint, dtype: str) -> EngineConfig:
    return checkpoint.engine_config(dtype, max_model_len=512)


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 131, (length,), generator=generator) for length in LENGTHS]


def find_types(checkpoint: Checkpoint, which: int) -> Tensor:
    """Token types of a prompt; all 0 for a model that has fewer than two."""
    positions = torch.arange(LENGTHS[which])
    has_types = checkpoint.spec.embedding.num_types > 1
    return (positions >= TYPE_STARTS[which]).long() * has_types


class Step:
    """Prompts one after the other, in the scratch that a worker would have."""

    def __init__(self, model: Decoder, config: EngineConfig) -> None:
        self._model = model
        self._block_size = config.cache.block_size
        self._caches = allocate_kv_caches(config, 0, CPU)
        for cache in {id(part): part for layer in self._caches for part in layer}.values():
            cache.fill_(torch.nan)  # a read outside a prompt's own tokens would show

    def compute(self, checkpoint: Checkpoint, which: list[int]) -> list[Tensor]:
        """Hidden states [length, hidden] of each of these prompts, computed together."""
        ids = [prompts()[index] for index in which]
        lengths = [len(each) for each in ids]
        counts = [-(-length // self._block_size) for length in lengths]
        tables = torch.full((len(ids), max(counts)), 1 << 30, dtype=torch.int32)
        slots: list[Tensor] = []
        for row, (first, count) in enumerate(zip(accumulate([0, *counts]), counts, strict=False)):
            tables[row, :count] = torch.arange(first, first + count)
            slots.append(torch.arange(lengths[row]) + first * self._block_size)
        metadata = AttentionMetadata(
            query_starts=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.cat(slots),
            max_query_len=max(lengths),
            max_seq_len=max(lengths),
        )
        positions = torch.cat([torch.arange(length) for length in lengths])
        types = torch.cat([find_types(checkpoint, index) for index in which])
        with torch.inference_mode():
            hidden = self._model.forward(torch.cat(ids), positions, self._caches, metadata, None, types)
        return list(hidden.split(lengths))


def load(config: EngineConfig, is_native: bool = True) -> Step:
    model = load_model(config, CPU)
    if not is_native:
        model.native = None
    return Step(model, config)


def compute_reference(checkpoint: Checkpoint, which: int) -> Tensor:
    inputs = {"input_ids": prompts()[which].unsqueeze(0)}
    if checkpoint.spec.embedding.num_types > 1:
        inputs["token_type_ids"] = find_types(checkpoint, which).unsqueeze(0)
    with torch.inference_mode():
        return checkpoint.reference(**inputs).last_hidden_state[0]


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
    assert step._model.native is not None
    set_threads(1)
    expected = step.compute(checkpoint, EVERY)
    for which in EVERY:
        assert torch.equal(step.compute(checkpoint, [which])[0], expected[which])
    assert all(map(torch.equal, load(config, is_native=False).compute(checkpoint, EVERY), expected))
    set_threads(3)
    assert all(map(torch.equal, step.compute(checkpoint, EVERY), expected))
