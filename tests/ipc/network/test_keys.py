"""Key files: made with care, refused when others could read or write them, read again when they change."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from quire.ipc.errors import ConfigError
from quire.ipc.network.keys import (
    CLIENT_PUBLIC,
    CLIENT_SECRET,
    CLIENTS,
    SERVER_PUBLIC,
    SERVER_SECRET,
    AuthorizedClients,
    ClientGrant,
    add_client,
    make_keys,
    read_client_keys,
    read_server_keys,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_what_is_made_fits_together(folder: Path) -> None:
    server, client = read_server_keys(folder), read_client_keys(folder)
    assert client.server == server.public == (folder / SERVER_PUBLIC).read_bytes().strip()
    assert client.public == zmq.curve_public(client.secret)
    assert AuthorizedClients(folder).find_grant(client.public) == ClientGrant("client")


def test_secrets_are_their_owners_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_keys(tmp_path / "keys")
    finally:
        os.umask(before)
    for name in (SERVER_SECRET, CLIENT_SECRET):
        assert stat.S_IMODE((tmp_path / "keys" / name).stat().st_mode) == 0o600


def test_keys_that_are_there_are_not_overwritten(folder: Path) -> None:
    before = (folder / SERVER_SECRET).read_bytes()
    with pytest.raises(ConfigError, match="not overwritten"):
        make_keys(folder)
    assert (folder / SERVER_SECRET).read_bytes() == before


def test_a_key_with_two_grants_is_refused_and_with_one_twice_is_one(folder: Path) -> None:
    """Else the last line would count, and whoever reads the first one would think it did."""
    public, clients = read_client_keys(folder).public, folder / CLIENTS
    clients.write_bytes(public + b" a weight=0.5\n" + public + b" a weight=0.5\n")
    assert AuthorizedClients(folder).find_grant(public) == ClientGrant("a", weight=0.5)
    clients.write_bytes(public + b" a weight=0.5\n" + public + b" a weight=500\n")
    with pytest.raises(ConfigError, match=r"line 2': expected no second line for the key of 'a'"):
        AuthorizedClients(folder).check()
    assert AuthorizedClients(folder).find_grant(public) is None


@pytest.mark.parametrize(
    ("name", "mode", "read", "who"),
    [
        (SERVER_SECRET, 0o640, read_server_keys, "read"),
        (CLIENT_SECRET, 0o640, read_client_keys, "read"),
        (CLIENTS, 0o620, read_server_keys, "write"),
    ],
)
def test_what_others_can_read_or_write_is_refused(
    folder: Path, name: str, mode: int, read: Callable[[Path], object], who: str
) -> None:
    (folder / name).chmod(mode)
    with pytest.raises(ConfigError, match=f"only its owner can {who}: chmod 600 .*{name}"):
        read(folder)


def test_a_line_says_what_its_client_is_granted(folder: Path, tmp_path: Path) -> None:
    add_client(folder, tmp_path / "heavy", 2.5)
    heavy = read_client_keys(tmp_path / "heavy").public
    clients = AuthorizedClients(folder)
    assert clients.find_grant(heavy) == ClientGrant("heavy", weight=2.5)
    lines = {
        "a server weight=3 priority=-2 tenants=own": ClientGrant("a server", 3.0, -2, True),
        "weight=0.5": ClientGrant("", 0.5),
        "laptop # weight=9": ClientGrant("laptop # weight=9"),
        "": ClientGrant(),
    }
    for text, grant in lines.items():
        (folder / CLIENTS).write_bytes(heavy + b" " + text.encode() + b"\n")
        assert AuthorizedClients(folder).find_grant(heavy) == grant, text


@pytest.mark.parametrize(
    "word",
    [
        *("weight=0", "weight=-1", "weight=nan", "weight=inf", "weight=1001", "weight=", "priority=1.5"),
        *("tenants=all", "wieght=2"),
    ],
)
def test_a_grant_that_makes_no_sense_is_refused_and_lets_nobody_in(folder: Path, word: str) -> None:
    key = read_client_keys(folder).public
    (folder / CLIENTS).write_bytes(key + b" name " + word.encode() + b"\n")
    with pytest.raises(ConfigError, match=f"line 1: {word}.*weight=W .above 0, up to 1000."):
        read_server_keys(folder)
    assert AuthorizedClients(folder).find_grant(key) is None


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / SERVER_PUBLIC).unlink()
    with pytest.raises(ConfigError, match=r"server\.public.*No such file.*quire keys make"):
        read_client_keys(folder)


def test_what_is_no_key_is_not_shown(folder: Path) -> None:
    (folder / CLIENT_SECRET).write_text("half-of-a-secret\n")
    with pytest.raises(ConfigError, match=r"a key of 40 characters \(Z85\) in line 1") as caught:
        read_client_keys(folder)
    assert "half-of-a-secret" not in str(caught.value)


def test_the_list_is_read_again_when_it_changes_also_after_a_line_without_an_end(
    folder: Path, tmp_path: Path
) -> None:
    clients, first = AuthorizedClients(folder, itertools.count().__next__), read_client_keys(folder).public
    assert clients.find_grant(first) == ClientGrant("client")
    (folder / CLIENTS).write_bytes((folder / CLIENTS).read_bytes().rstrip())
    add_client(folder, tmp_path / "laptop")
    added = read_client_keys(tmp_path / "laptop")
    assert added.public == (tmp_path / "laptop" / CLIENT_PUBLIC).read_bytes().strip()
    assert added.server == read_server_keys(folder).public
    assert [clients.find_grant(key) for key in (added.public, first)] == [
        ClientGrant("laptop"),
        ClientGrant("client"),
    ]
    (folder / CLIENTS).write_text("# nobody\n")
    assert clients.find_grant(added.public) is None


def test_without_its_list_nobody_is_let_in(folder: Path) -> None:
    clients, key = AuthorizedClients(folder, itertools.count().__next__), read_client_keys(folder).public
    text = (folder / CLIENTS).read_bytes()
    (folder / CLIENTS).unlink()
    assert clients.find_grant(key) is None
    (folder / CLIENTS).write_bytes(text)
    assert clients.find_grant(key) == ClientGrant("client")


def test_the_list_is_looked_at_a_hundred_times_a_second(folder: Path) -> None:
    now = [0.0]
    clients, key = AuthorizedClients(folder, lambda: now[0]), read_client_keys(folder).public
    assert clients.find_grant(key) is not None
    (folder / CLIENTS).write_text("# nobody\n")
    now[0] = 0.009
    assert clients.find_grant(key) is not None
    now[0] = 0.011
    assert clients.find_grant(key) is None


def test_what_makes_no_sense_adds_nobody(folder: Path, tmp_path: Path) -> None:
    before = (folder / CLIENTS).read_bytes()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for name, weight, words in (("none", 0.0, "weight=0"), ("full", 1.0, "a folder that is empty")):
        with pytest.raises(ConfigError, match=words):
            add_client(folder, tmp_path / name, weight)
    assert (folder / CLIENTS).read_bytes() == before
