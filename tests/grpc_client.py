"""A gRPC client made of the shipped .proto, as somebody makes it who has nothing else of Quire."""

from __future__ import annotations

import functools
import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from grpc_tools import protoc
from quire.frontend import grpc as package

PROTO = Path(package.__file__).with_name("quire_engine.proto")


@functools.cache
def make_client() -> tuple[Any, Any]:
    """The modules of messages and of stubs."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["protoc", f"-I{PROTO.parent}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
        assert protoc.main([*command, PROTO.name]) == 0
        sys.path.insert(0, folder)
        try:
            return importlib.import_module("quire_engine_pb2"), importlib.import_module(
                "quire_engine_pb2_grpc"
            )
        finally:
            sys.path.remove(folder)


def with_key(key: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call with an API key."""
    return (("authorization", f"Bearer {key}"),)
