"""Attention over paged keys and values, rotary embeddings, and their plans."""
