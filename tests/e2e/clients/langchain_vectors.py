"""Embeddings with langchain-openai: `python langchain_vectors.py BASE_URL API_KEY`."""

from __future__ import annotations

import asyncio
import math
import sys

from langchain_openai import OpenAIEmbeddings

TEXTS = [f"This is text number {number}." for number in range(60)]


def main() -> None:
    """Raises AssertionError when an answer is not as it should be."""
    base_url, api_key = sys.argv[1:]
    model = OpenAIEmbeddings(
        model="pocket",
        base_url=base_url,
        api_key=api_key,
        check_embedding_ctx_length=False,  # or it sends token ids of OpenAI's models
        chunk_size=25,
        max_retries=0,
        timeout=60,
    )
    documents = model.embed_documents(TEXTS)
    assert len(documents) == len(TEXTS)
    assert model.embed_query(TEXTS[31]) == documents[31]
    assert math.isclose(math.hypot(*documents[0]), 1.0, abs_tol=1e-4)
    assert asyncio.run(model.aembed_documents(TEXTS)) == documents


if __name__ == "__main__":
    main()
