"""Every attack by its name: importing this module collects them from those that declare them."""

from __future__ import annotations

from . import bodies, files, floods, grammars, grpc_calls, machine, others, streams
from .attack import ATTACKS

__all__ = ["ATTACKS", "bodies", "files", "floods", "grammars", "grpc_calls", "machine", "others", "streams"]
