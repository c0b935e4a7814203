"""Logits to tokens: edits, filters, noise, logprobs."""
