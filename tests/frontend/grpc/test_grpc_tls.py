"""The gRPC port of a server with a certificate: TLS alone, client certificates, files that are replaced."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_client import make_client
from quire.frontend.http.options import TlsOptions
from quire.frontend.http.server import Server
from server_fakes import OpenServer

pb, stubs = make_client()
PEM = str(Path(__file__).parents[2] / "localhost.pem")
REQUEST = pb.GenerateRequest(text="a")


def find_port(server: Server) -> int:
    assert server._grpc is not None
    return server._grpc.port


async def generate(channel: grpc.aio.Channel) -> str:
    """What a call says, or the name of its error."""
    async with channel:
        try:
            answer = await stubs.QuireEngineStub(channel).Generate(REQUEST, timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return answer.outputs[0].text


def connect(server: Server, ca: str = PEM, client: str | None = None) -> grpc.aio.Channel:
    """Believes `ca`; `client`: shows this certificate."""
    own = Path(client).read_bytes() if client is not None else None
    credentials = grpc.ssl_channel_credentials(Path(ca).read_bytes(), own, own)
    return grpc.aio.secure_channel(f"localhost:{find_port(server)}", credentials)


def with_tls(**options: Any) -> dict[str, Any]:
    """Options of a server."""
    return {"grpc_address": "127.0.0.1:0", "tls": TlsOptions(**{"certfile": PEM} | options)}


@pytest.mark.server(options=with_tls())
async def test_beside_a_certificate_grpc_answers_over_tls_only(server: Server) -> None:
    assert await generate(connect(server)) == "word word word "
    plain = grpc.aio.insecure_channel(f"127.0.0.1:{find_port(server)}")
    assert await generate(plain) == "UNAVAILABLE"


@pytest.mark.server(options=with_tls(ca_certs=PEM, cert_reqs=ssl.CERT_REQUIRED))
async def test_clients_need_a_certificate_of_the_authority_where_http_needs_one(server: Server) -> None:
    assert await generate(connect(server)) == "UNAVAILABLE"
    assert await generate(connect(server, client=PEM)) == "word word word "


@pytest.mark.parametrize("refreshes", [True, False])
async def test_a_certificate_that_is_replaced_is_shown_to_connections_that_begin_then(
    tmp_path: Path, refreshes: bool, open_server: OpenServer
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    used, new, half = tmp_path / "used.pem", tmp_path / "new.pem", tmp_path / "half.pem"
    used.write_text(Path(PEM).read_text())
    make_certificate(new)
    half.write_text(new.read_text()[:300])
    server = (await open_server(options=with_tls(certfile=str(used), refreshes=refreshes))).server
    before = shown(server)
    half.replace(used)
    assert shown(server) == before  # of half a file the old one goes on
    used.unlink()
    assert shown(server) == before
    shutil.copy(new, used)
    assert (shown(server) == before) is not refreshes
    assert await generate(connect(server, str(new) if refreshes else PEM)) == "word word word "


def shown(server: Server) -> str:
    """The certificate that a new connection sees."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", find_port(server)), 20) as plain,
        context.wrap_socket(plain) as connection,
    ):
        shown_der = connection.getpeercert(binary_form=True)
    assert shown_der
    return ssl.DER_cert_to_PEM_cert(shown_der)


def make_certificate(path: Path) -> None:
    """Key and certificate of localhost in one file."""
    made = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    name = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    files = ("-keyout", str(path) + ".key", "-out", str(path))
    subprocess.run(["openssl", "req", "-x509", *made, *name, *files], check=True, capture_output=True)
    path.write_text(Path(f"{path}.key").read_text() + path.read_text())
