"""A model's folder: where it is, which files are read, and what its config.json says."""
