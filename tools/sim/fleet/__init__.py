"""A plan for many machines: up to a thousand engines with the real core and router, on simulated time."""
