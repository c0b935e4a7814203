"""Rendering and tokenizing in processes of their own, which can be ended: an HTTP process's text lanes."""
