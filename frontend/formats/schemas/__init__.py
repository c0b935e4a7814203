"""StructuredOutputsParams -> one grammar text that llguidance takes, or a refusal that names the place."""
