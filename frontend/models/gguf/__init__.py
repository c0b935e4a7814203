"""GGUF files: their header, and what Quire reads of config.json and tokenizer.json where there are such."""
