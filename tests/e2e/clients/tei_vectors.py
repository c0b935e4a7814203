"""What TEI's clients do, huggingface_hub and llama-index: `python tei_vectors.py URL API_KEY`."""

from __future__ import annotations

import sys

from huggingface_hub import InferenceClient
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference as TeiRerank

TEXTS = [f"This is text number {number}." for number in range(12)]


def main() -> None:
    """Raises AssertionError when an answer is not as it should be."""
    url, api_key = sys.argv[1:]
    bearer = f"Bearer {api_key}"
    embedder = TextEmbeddingsInference(
        model_name="pocket", base_url=url, auth_token=api_key, truncate_text=True, embed_batch_size=5
    )
    documents = embedder.get_text_embedding_batch(TEXTS)
    assert len(documents) == len(TEXTS)
    assert embedder.get_text_embedding(TEXTS[3]) == documents[3]
    vector = InferenceClient(model=f"{url}/embed", token=api_key).feature_extraction(TEXTS[3], truncate=True)
    assert vector.tolist() == [documents[3]]
    similar = InferenceClient(model=f"{url}/similarity", token=api_key).sentence_similarity(TEXTS[0], TEXTS)
    assert similar[0] == max(similar) > 0.999
    ranker = TeiRerank(model_name="pocket", base_url=url, auth_token=bearer, top_n=3)
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in TEXTS]
    ranked = ranker.postprocess_nodes(nodes, query_bundle=QueryBundle(TEXTS[5]))
    assert len(ranked) == 3
    assert ranked[0].node.get_content() == TEXTS[5]


if __name__ == "__main__":
    main()
