"""Decides what runs. Pure state machines; sockets only in engine_process.py; no tensors, no torch."""
