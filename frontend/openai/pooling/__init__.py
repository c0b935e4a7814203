"""Routes that answer with vectors, classes, scores and ranks."""
