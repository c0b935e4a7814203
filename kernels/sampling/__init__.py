"""From logits to tokens and logprobs, and pooling of hidden states."""
