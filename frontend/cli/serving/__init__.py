"""The pieces of `quire serve`: its options, and what it prints when it is ready."""
