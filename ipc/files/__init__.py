"""Files that are read again: known by their identity, and caches on disk that nobody else can change."""
