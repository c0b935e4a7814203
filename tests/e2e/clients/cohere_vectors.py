"""Embeddings and ranks with Cohere's client: `python cohere_vectors.py URL API_KEY`."""

from __future__ import annotations

import math
import sys

import cohere

TEXTS = ["The fox sleeps.", "What is 12 plus 30?", "A cat sat on the mat and looked at the moon."]


def main() -> None:
    """Raises AssertionError when an answer is not as it should be."""
    url, api_key = sys.argv[1:]
    client = cohere.ClientV2(api_key=api_key, base_url=url, timeout=60)
    answer = client.embed(
        model="pocket", texts=TEXTS, input_type="search_document", embedding_types=["float", "base64"]
    )
    assert answer.embeddings.float_ is not None
    assert len(answer.embeddings.float_) == len(answer.embeddings.base64 or ()) == len(TEXTS)
    assert math.isclose(math.hypot(*answer.embeddings.float_[0]), 1.0, abs_tol=1e-4)
    assert answer.texts == TEXTS
    assert answer.meta is not None
    ranks = client.rerank(model="pocket", query=TEXTS[1], documents=TEXTS, top_n=2)
    assert len(ranks.results) == 2
    assert ranks.results[0].index == 1
    assert ranks.results[0].relevance_score >= ranks.results[1].relevance_score
    first = cohere.Client(api_key=api_key, base_url=url, timeout=60)
    shown = first.rerank(model="pocket", query=TEXTS[1], documents=[{"text": text} for text in TEXTS])
    assert shown.results[0].document is not None
    assert shown.results[0].document.text == TEXTS[1]


if __name__ == "__main__":
    main()
