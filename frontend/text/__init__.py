"""Prompts as users write them, text to token ids and back."""
