"""A node that has another Quire or other weights is refused by name, before anything is started there."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest
from fakes import make_config
from msgspec.structs import replace
from quire.core.network.ray.node_group import NodeArgs, NodeGroup, NodeReport, compute_source_digest
from quire.ipc.files.file_samples import hash_samples
from quire.ipc.network.keys import make_key_pairs
from quire.ipc.network.tcp_address import TcpAddress


def check(folder: Path, **changes: object) -> NodeReport:
    """What a node says of a model whose one file of weights is there."""
    (folder / "weights").write_bytes(bytes(100_000))
    config = make_config()
    config = replace(config, model=replace(config.model, model=str(folder)))
    args = NodeArgs(
        address="",
        keys=make_key_pairs()[1],
        config=config,
        module="none",
        sources=compute_source_digest(),
        weights={"weights": hash_samples(folder / "weights")},
    )
    with socket.create_server(("127.0.0.1", 0)) as core:
        args = replace(args, address=str(TcpAddress("127.0.0.1", core.getsockname()[1])))
        group = NodeGroup(msgspec.msgpack.encode(replace(args, **changes)))
        return msgspec.msgpack.decode(group.check(), type=NodeReport)


def test_the_same_quire_with_the_same_weights_is_well(tmp_path: Path) -> None:
    assert check(tmp_path).error == ""


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"sources": "older"}, "QuireError", "its sources of Quire ("),
        ({"weights": {"weights": "00" * 32}}, "ModelError", "the same weights on all nodes; weights is "),
        ({"address": "tcp://127.0.0.1:1"}, "QuireError", "does not reach the engine at tcp://127.0.0.1:1: "),
        ({"weights": {"more": "0"}}, "ModelError", "a folder that all nodes have; more: No such file"),
    ],
)
def test_what_differs_is_named(tmp_path: Path, changes: dict[str, object], kind: str, text: str) -> None:
    report = check(tmp_path, **changes)
    assert report.kind == kind
    assert text in report.error


def test_the_arguments_of_another_quire_are_refused_as_its() -> None:
    report = msgspec.msgpack.decode(NodeGroup(msgspec.msgpack.encode({"port": 1})).check(), type=NodeReport)
    assert "its sources of Quire" in report.error
