"""Attention over the paged KV cache: variants by file, one chooser."""
