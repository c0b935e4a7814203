"""From vectors to what is sent: cut, normalised, activated, refused when not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from quire.ipc.params.pooling_params import PoolingParams
from quire.ipc.spec.model_spec import HeadActivation, PoolingSpec
from quire.worker.pooling.head import activate, activate_array
from quire.worker.pooling.pooler import finish_vectors
from torch.nn import functional as F

EMBED = PoolingParams(task="embed")
NORMALIZED = PoolingSpec(normalize=True)
ACTIVATIONS: list[HeadActivation] = ["tanh", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "softmax"]


def make_vectors(count: int, width: int) -> NDArray[np.float32]:
    return np.random.default_rng(count + width).standard_normal((count, width)).astype(np.float32) * 3


def read(data: bytes | None) -> NDArray[np.float32]:
    assert data is not None
    return np.frombuffer(data, dtype=np.float32)


def test_embeddings_are_cut_before_they_are_normalised() -> None:
    vectors = make_vectors(3, 8)
    params = [
        EMBED,
        PoolingParams(task="embed", dimensions=4),
        PoolingParams(task="embed", use_activation=False),
    ]
    whole, cut, raw = (read(one) for one in finish_vectors(vectors, params, [1, 1, 1], NORMALIZED))
    assert whole == pytest.approx(vectors[0] / np.linalg.norm(vectors[0]), rel=1e-6)
    assert cut == pytest.approx(vectors[1, :4] / np.linalg.norm(vectors[1, :4]), rel=1e-6)
    assert (raw == vectors[2]).all()


def test_a_vector_of_zeros_stays_one() -> None:
    (answer,) = finish_vectors(np.zeros((1, 4), dtype=np.float32), [EMBED], [1], NORMALIZED)
    assert (read(answer) == 0).all()


def test_a_model_without_normalisation_gives_it_to_those_who_ask() -> None:
    vectors = make_vectors(2, 4)
    params = [EMBED, PoolingParams(task="embed", use_activation=True)]
    plain, asked = (read(one) for one in finish_vectors(vectors, params, [1, 1], PoolingSpec()))
    assert (plain == vectors[0]).all()
    assert math.hypot(*asked) == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_sent_and_harms_nobody(bad: float) -> None:
    vectors = make_vectors(5, 4)
    vectors[2, 1] = bad
    first, second, third = finish_vectors(vectors, [EMBED] * 3, [1, 2, 2], PoolingSpec())
    assert second is None
    assert (read(first) == vectors[0]).all()
    assert (read(third) == vectors[3:].ravel()).all()


def test_classes_have_the_activation_of_the_model_unless_it_is_declined() -> None:
    scores = make_vectors(2, 3)
    spec = PoolingSpec(num_labels=3, activation="softmax")
    params = [PoolingParams(task="classify"), PoolingParams(task="classify", use_activation=False)]
    probs, raw = (read(one) for one in finish_vectors(scores, params, [1, 1], spec))
    assert probs == pytest.approx(torch.softmax(torch.from_numpy(scores[0]), 0).numpy(), abs=1e-6)
    assert (raw == scores[1]).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_torchs_and_no_row_depends_on_others(activation: HeadActivation) -> None:
    x = make_vectors(37, 19)
    expected = {
        "tanh": torch.tanh,
        "relu": torch.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
        "silu": F.silu,
        "sigmoid": torch.sigmoid,
        "softmax": lambda y: torch.softmax(y, dim=-1),
    }[activation](torch.from_numpy(x))
    found = activate(torch.from_numpy(x), activation)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-7)
    for row in range(len(x)):
        assert (activate_array(x[row : row + 1].copy(), activation) == found[row].numpy()).all()


@pytest.mark.parametrize("width", [1, 3, 384, 1000])
def test_a_norm_does_not_depend_on_other_rows(width: int) -> None:
    vectors = make_vectors(29, width)
    together = finish_vectors(vectors, [EMBED] * 29, [1] * 29, NORMALIZED)
    alone = [finish_vectors(one[None], [EMBED], [1], NORMALIZED)[0] for one in vectors]
    assert together == alone
