"""The OpenAI-compatible HTTP server: routes over one AsyncLLM. Loaded by `quire serve` only."""
