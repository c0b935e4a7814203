"""TLS: requests and streams over it, and clients that hold their handshake open."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
from pathlib import Path

import pytest
from quire.frontend.http.connections import tls
from quire.frontend.http.connections.tls import make_tls_context
from quire.frontend.http.options import TlsOptions
from quire.frontend.http.server import Server
from quire.ipc.errors import ConfigError
from server_fakes import OpenServer, Peer, RunningServer

PEM = str(Path(__file__).parents[3] / "localhost.pem")
TLS = {"tls": TlsOptions(certfile=PEM)}
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01"  # the beginning of a handshake


async def encrypt(peer: Peer) -> None:
    """Shake hands, as a client that trusts the certificate."""
    context = ssl.create_default_context(cafile=PEM)
    await peer.writer.start_tls(context, server_hostname="localhost")


@pytest.mark.server(options=TLS)
async def test_requests_and_streams_are_answered_over_tls(peer: Peer) -> None:
    await encrypt(peer)
    for _ in range(2):  # on one connection
        await peer.post("/v1/completions", {"prompt": "a"})
        status, _, body = await peer.read_answer()
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, "word word word ")
    await peer.post("/v1/completions", {"prompt": "a", "stream": True}, "connection: close\r\n")
    assert (await peer.read_all()).count(b"data: ") >= 4


@pytest.mark.server(options=TLS)
async def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(peer: Peer) -> None:
    arrives, leaves = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context(cafile=PEM)
    client = context.wrap_bio(arrives, leaves, server_hostname="localhost")
    while True:
        try:
            client.do_handshake()
            break
        except ssl.SSLWantReadError:
            await peer.say(leaves.read())
            arrives.write(await peer.reader.read(2**16))
    client.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await peer.say(leaves.read())  # the client's last word of the handshake and its request
    answer = b""
    while b'"live"' not in answer:
        try:
            answer += client.read(2**16)
        except ssl.SSLWantReadError:
            arrives.write(await peer.reader.read(2**16))


@pytest.mark.server(options=TLS, max_header_s=0.2)
async def test_a_handshake_that_does_not_end_is_cut_off(peer: Peer, server: Server) -> None:
    await peer.say(HELLO)
    assert await peer.read_all() == b""
    assert not server.connections


@pytest.mark.server(options=TLS, max_connections=4, max_header_s=20.0)
async def test_handshakes_that_are_held_open_have_places_as_connections_do(peer: Peer) -> None:
    held = [await peer.make_neighbour() for _ in range(6)]
    for one in held:
        await one.say(HELLO)
    late = await peer.make_neighbour()
    await encrypt(late)
    assert await late.ask_live()  # the oldest have given their places
    assert [await one.read_all() for one in held[:3]] == [b""] * 3
    assert not held[-1].reader.at_eof()


@pytest.mark.server(options=TLS)
@pytest.mark.parametrize("said", [b"\x00" * 100, b"\x16\x03\x01\xff\xff" + b"x" * 2**17])
async def test_what_is_no_tls_ends_its_own_connection_only(peer: Peer, said: bytes) -> None:
    other = await peer.make_neighbour()
    await encrypt(other)
    peer.writer.write(said)
    with contextlib.suppress(ConnectionError):
        assert b"HTTP" not in await peer.read_all()
    assert await other.ask_live()


@pytest.mark.server(options=TLS)
@pytest.mark.parametrize("more", [b"", b"x" * 2**17])
async def test_plain_http_is_told_that_it_has_to_be_encrypted(peer: Peer, more: bytes) -> None:
    await peer.say(b"POST / HTTP/1.1\r\nhost: localhost\r\n\r\n" + more)
    status, head, body = await peer.read_answer()
    assert (status, json.loads(body)["error"]["code"]) == (400, "tls_required")
    assert "connection: close" in head
    assert await peer.read_all() == b""


@pytest.mark.server(options=TLS)
async def test_a_handshake_that_fails_is_logged_once_in_a_while(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    for client in (peer, await peer.make_neighbour()):
        client.writer.write(bytes(100))
        with contextlib.suppress(ConnectionError):
            await client.read_all()
    other = await peer.make_neighbour()
    await encrypt(other)
    assert await other.ask_live()
    assert "127.0.0.1 failed: [SSL: WRONG_VERSION_NUMBER]" in caplog.text
    assert caplog.text.count("handshake") == 1


async def test_a_handshake_with_a_plain_port_is_told_that_it_is_one(peer: Peer) -> None:
    await peer.say(HELLO)
    status, _, body = await peer.read_answer()
    assert status == 400
    assert "http://" in body


@pytest.mark.server(options={"tls": TlsOptions(certfile=PEM, ca_certs=PEM, cert_reqs=ssl.CERT_REQUIRED)})
async def test_a_client_without_the_certificate_that_is_wanted_is_not_let_in(peer: Peer) -> None:
    context = ssl.create_default_context(cafile=PEM)
    try:
        await peer.writer.start_tls(context, server_hostname="localhost")
        await peer.say(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await peer.read_all() == b""
    except (ssl.SSLError, ConnectionError):
        pass
    known = await peer.make_neighbour()
    context.load_cert_chain(PEM)
    await known.writer.start_tls(context, server_hostname="localhost")
    assert await known.ask_live()


@pytest.mark.server(options=TLS, max_header_s=3600.0)
async def test_a_drain_ends_with_handshakes_held_open(running: RunningServer) -> None:
    peer = running.peer
    await peer.say(HELLO)
    other = await peer.make_neighbour()
    await encrypt(other)
    assert await other.ask_live()
    await running.stop()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"certfile": "/no/such.pem"}, "ssl_certfile='/no/such.pem': expected a file that can be read"),
        ({"certfile": __file__}, "ssl_certfile="),
        ({"certfile": PEM, "keyfile": "/no/such.pem"}, "ssl_keyfile="),
        ({"certfile": PEM, "ca_certs": __file__}, "ssl_ca_certs="),
        ({"certfile": PEM, "cert_reqs": 3}, "ssl_cert_reqs=3"),
    ],
)
def test_files_that_cannot_be_used_are_refused_by_their_option(given: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_tls_context(TlsOptions(**given))  # type: ignore[arg-type]
    assert str(caught.value).startswith(field)


def test_a_certificate_that_is_replaced_is_used_by_connections_that_begin_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "server.pem"
    file.write_text(Path(PEM).read_text())
    files = tls.TlsFiles(TlsOptions(certfile=str(file)))
    before = files.context
    files.refresh()
    assert files.context is before
    file.write_text("half of it")
    files.refresh()
    assert files.context is before
    assert "the certificate of before goes on: ssl_certfile" in caplog.text
    new = tmp_path / "new.pem"
    new.write_text(Path(PEM).read_text())
    new.replace(file)
    files.refresh()
    assert files.context is not before
    file.unlink()
    files.refresh()
    assert "a file that can be read (No such file or directory)" in caplog.text


async def test_the_files_are_looked_at_while_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_server: OpenServer
) -> None:
    file = tmp_path / "server.pem"
    file.write_text(Path(PEM).read_text())
    monkeypatch.setattr(tls, "REFRESH_S", 0.01)
    is_made_again = asyncio.Event()
    make = tls.make_tls_context
    peer = (await open_server(options={"tls": TlsOptions(certfile=str(file), refreshes=True)})).peer
    monkeypatch.setattr(tls, "make_tls_context", lambda options: is_made_again.set() or make(options))
    os.utime(file, (1, 1))
    await is_made_again.wait()
    await encrypt(await peer.make_neighbour())
