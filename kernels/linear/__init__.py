"""Products with weights, plain and narrow, gated activations and experts."""
