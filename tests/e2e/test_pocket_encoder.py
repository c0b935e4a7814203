"""The shipped encoder in the engine: what transformers computes, and the text that a question is about."""

from __future__ import annotations

import torch
from quire import LLM
from quire.tools.pocket.encoder import ENCODER_DIR


def test_the_engine_embeds_and_finds_with_the_shipped_encoder_as_transformers_does() -> None:
    from quire.tools.pocket.encoder.evaluate import Encoder, draw_held_out_episodes

    pairs = draw_held_out_episodes()
    texts = [pair.query for pair in pairs] + [pair.answer.text for pair in pairs]
    with LLM("pocket-encoder") as llm:
        vectors = torch.tensor([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])
    assert (vectors - Encoder(ENCODER_DIR).embed(texts)).abs().max() < 1e-5
    scores = vectors[: len(pairs)] @ vectors[len(pairs) :].T
    ranks = (scores > scores.diagonal()[:, None]).sum(1)
    assert (ranks < 5).sum() >= 0.9 * len(pairs)
