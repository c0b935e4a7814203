"""Embeddings with llama-index's client of such servers: `python llama_index_vectors.py BASE_URL API_KEY`."""

from __future__ import annotations

import asyncio
import sys

from llama_index.embeddings.openai_like import OpenAILikeEmbedding

TEXTS = [f"This is text number {number}." for number in range(30)]


def main() -> None:
    """Raises AssertionError when an answer is not as it should be."""
    base_url, api_key = sys.argv[1:]
    model = OpenAILikeEmbedding(
        model_name="pocket", api_base=base_url, api_key=api_key, embed_batch_size=10, max_retries=0
    )
    documents = model.get_text_embedding_batch(TEXTS)
    assert len(documents) == len(TEXTS)
    assert model.get_text_embedding(TEXTS[7]) == documents[7]
    assert asyncio.run(model.aget_text_embedding_batch(TEXTS)) == documents
    assert model.similarity(documents[0], documents[0]) > 0.999


if __name__ == "__main__":
    main()
