"""A conversation at a terminal: what is typed, how answers are printed, what is kept."""
