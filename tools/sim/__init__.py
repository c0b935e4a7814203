"""Deterministic simulation: frontends, core and worker in one thread, with their own clock and network."""
