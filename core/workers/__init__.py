"""Where a core's worker runs, and how it is spoken to there."""
