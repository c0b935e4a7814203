"""How the cores of a machine are divided between engines."""

from __future__ import annotations

from quire.ipc.engine_shares import describe_shares, find_share
from quire.ipc.rank_cores import Core

TWO_SOCKETS = [Core(node, 4 * node + number) for node in (0, 1) for number in range(4)]


def test_each_engine_has_as_many_cores_as_any_other_and_its_own() -> None:
    for size in range(1, 9):
        shares = [find_share(TWO_SOCKETS, rank, size) for rank in range(size)]
        assert {len(share) for share in shares} == {8 // size}
        assert len({core for share in shares for core in share}) == size * (8 // size)


def test_two_engines_have_a_socket_each() -> None:
    assert [{core.node for core in find_share(TWO_SOCKETS, rank, 2)} for rank in (0, 1)] == [{0}, {1}]
    assert describe_shares(TWO_SOCKETS, 2) == "2 engines with 4 threads each (cores 0-3, 4-7)"


def test_more_engines_than_cores_share_them() -> None:
    cores = [Core(0, 0), Core(0, 2)]
    assert [find_share(cores, rank, 3)[0].processor for rank in range(3)] == [0, 2, 0]
    assert describe_shares(cores, 3) == "3 engines with 1 thread each (cores 0, 2, 0)"
