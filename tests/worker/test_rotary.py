"""Rotary angles against transformers' own modules, for every scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import OTHERS, ROPE_TYPES, TRAINED_LEN, Recipe, make_reference, make_spec
from quire.ipc.spec.model_spec import RopeConfig
from quire.worker.layers.rotary import RotaryEmbedding

CPU = torch.device("cpu")
LENGTH = 100
EXTRAS: dict[str, list[dict[str, Any]]] = {
    "yarn": [
        {},
        {"attention_factor": 0.7},
        {"mscale": 0.8, "mscale_all_dim": 0.5},
        {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
        {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 0.5},
    ],
    # Llama 4's two are equal.
    "llama3": [{}, {"low_freq_factor": 2.0, "high_freq_factor": 6.0}, {"high_freq_factor": 1.0}],
}
CASES = [(rope, extra) for rope in ROPE_TYPES for extra in EXTRAS.get(rope, [{}])]


def transformers_angles(recipe: Recipe, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rotary = make_reference(recipe).model.rotary_emb
    cos, sin = rotary(torch.zeros(1), positions.unsqueeze(0))
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


@pytest.mark.parametrize(("rope", "extra"), CASES)
def test_angles_equal_transformers(rope: str, extra: dict[str, Any]) -> None:
    recipe = Recipe(rope=rope, rope_extra=extra, head_size=32, num_layers=1)
    spec = make_spec(recipe)
    rotary = RotaryEmbedding(spec.rope, recipe.head_size, spec.max_position_embeddings, LENGTH, CPU)
    positions = torch.arange(LENGTH)
    lengths = torch.full((LENGTH,), LENGTH) if rope == "dynamic" else None
    actual = rotary(positions, lengths)
    expected = transformers_angles(recipe, positions)
    # An angle of up to LENGTH radians carries a few relative roundings of its frequency.
    atol = 4 * LENGTH * torch.finfo(torch.float32).eps
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=atol)
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=atol)


@pytest.mark.parametrize("length", [TRAINED_LEN, TRAINED_LEN + 1])
def test_the_longest_sequence_decides_between_longropes_two_sets(length: int) -> None:
    """Also of the part of a head that is not rotated, whose angle is 0."""
    recipe = OTHERS["phi3-longrope"]
    spec = make_spec(recipe)
    rotary = RotaryEmbedding(spec.rope, recipe.head_size, spec.max_position_embeddings, length, CPU)
    positions = torch.arange(length)
    judge = transformers_angles(recipe, positions)
    atol = 4 * length * torch.finfo(torch.float32).eps
    for actual, expected, unrotated in zip(rotary(positions, None)[:2], judge, (1, 0), strict=True):
        torch.testing.assert_close(actual[:, :6], expected, rtol=0, atol=atol)
        assert torch.equal(actual[:, 6:], torch.full((length, 2), float(unrotated)))


def test_dynamic_angles_depend_on_the_given_length_and_not_on_the_step() -> None:
    rope = RopeConfig(type="dynamic", factor=2.0)
    rotary = RotaryEmbedding(rope, 32, 32, LENGTH, CPU)
    positions, lengths = torch.tensor([5, 5, 5, 40]), torch.tensor([6, 32, 64, 64])
    together = rotary(positions, lengths)
    for row in range(4):
        alone = rotary(positions[row : row + 1], lengths[row : row + 1])
        assert torch.equal(alone[0][0], together[0][row])
        assert torch.equal(alone[1][0], together[1][row])
    assert torch.equal(together[0][0], together[0][1])  # both within the trained length
    assert not torch.equal(together[0][1], together[0][2])


def test_rows_of_the_table_follow_positions_and_size_is_counted() -> None:
    rotary = RotaryEmbedding(RopeConfig(), 8, 32, LENGTH, CPU)
    cos, sin, _ = rotary(torch.tensor([7, 0]), None)
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.equal(cos[1], torch.ones(4))
    assert torch.equal(sin[1], torch.zeros(4))
    torch.testing.assert_close(cos[0, 0], torch.tensor(7.0).cos())
    assert rotary.size_bytes == 2 * LENGTH * 4 * 4
