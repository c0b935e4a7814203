"""Sums and gathers over the ranks of a worker."""
