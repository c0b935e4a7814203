"""The small POST endpoints, and what all endpoints have in common."""
