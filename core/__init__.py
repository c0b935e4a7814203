"""Decides what runs. Pure state machines; no tensors, no torch.

Sockets only in engine_process.py, executor.py, supervisor.py, clients/listener.py and network/.
"""
