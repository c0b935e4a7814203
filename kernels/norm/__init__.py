"""Norms of hidden states."""
