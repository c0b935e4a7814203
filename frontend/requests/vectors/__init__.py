"""Requests that answer with vectors: prompts and pairs in, embeddings, classes and scores out."""
