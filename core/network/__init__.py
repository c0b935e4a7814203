"""Clients and workers of other machines, over TCP with CURVE keys. Imported where a listener is opened."""
