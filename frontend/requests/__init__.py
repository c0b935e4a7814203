"""From a prompt and its parameters to the core's request, and from its outputs to a RequestOutput."""
