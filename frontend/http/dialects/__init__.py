"""The POST endpoints that generate or tokenize (of responses: `responses/`), and what all have in common."""
