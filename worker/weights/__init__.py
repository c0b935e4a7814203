"""Weights that are narrower than the model's type: their one form, and what makes it."""
