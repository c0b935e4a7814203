"""One device: weights, KV cache, request rows, execution. The only part that loads torch."""
