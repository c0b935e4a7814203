"""Certificates of a stress run's server: made for the run, and replaced again and again while it goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path
from urllib.parse import urlsplit

from ...frontend.http.connections.tls import REFRESH_S
from ...ipc.errors import InputError, QuireError
from .beside import Beside
from .http_client import make_client_context
from .waiting import wait_until

_HOST = "127.0.0.1"
_STALE_TIMEOUT_S = 3 * REFRESH_S
_NUM_LOOKS = 8  # connections in a row, so that each process is likely to have taken one
_CONNECT_TIMEOUT_S = 5.0
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


class Certificates(Beside):
    """An authority of the run's own in `ca_path`, and what it has signed for the server."""

    period_s = REFRESH_S + 2.0  # so that each is used

    def __init__(self, folder: Path) -> None:
        """Raises QuireError where openssl cannot make them."""
        super().__init__()
        self._folder = folder
        self.ca_path, self.cert_path, self.key_path = (
            str(folder / name) for name in ("ca.pem", "server.pem", "server.key")
        )
        self._ca_key_path = str(folder / "ca.key")
        usage = ("-subj", "/CN=quire stress", "-addext", "keyUsage=critical,keyCertSign")
        _run_openssl("-keyout", self._ca_key_path, "-out", self.ca_path, *usage)
        self.num_made = 0
        self.act()

    def act(self) -> None:
        """Put another key and certificate in place: one file after the other, as an operator's tools do."""
        new_key, new_cert = str(self._folder / "new.key"), str(self._folder / "new.pem")
        _run_openssl(
            *("-CA", self.ca_path, "-CAkey", self._ca_key_path, "-keyout", new_key, "-out", new_cert),
            *("-subj", f"/CN={_HOST}", "-addext", f"subjectAltName=IP:{_HOST}"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-addext", "keyUsage=critical,digitalSignature"),
        )
        os.replace(new_key, self.key_path)
        os.replace(new_cert, self.cert_path)
        self.num_made += 1

    def find_stale(self, url: str) -> list[str]:
        """What is wrong when a server still shows another certificate than the newest. Waits a while."""
        self.act()
        newest = ssl.PEM_cert_to_DER_cert(Path(self.cert_path).read_text())
        context = make_client_context(self.ca_path)
        port = urlsplit(url).port or 0

        def shows_newest() -> bool:
            with contextlib.suppress(OSError):
                return all(_look_at(port, context) == newest for _ in range(_NUM_LOOKS))
            return False

        if wait_until(shows_newest, _STALE_TIMEOUT_S):
            return []
        return [f"the server shows an old certificate {_STALE_TIMEOUT_S:g} s after it was replaced"]


@contextlib.contextmanager
def open_certificates() -> Generator[Certificates]:
    """Certificates in a folder of their own, not replaced yet. Raises InputError without openssl."""
    if shutil.which("openssl") is None:
        raise InputError("ssl", True, "with the command openssl on PATH, which makes the certificates")
    with tempfile.TemporaryDirectory(prefix="q") as folder:
        yield Certificates(Path(folder))


def _look_at(port: int, context: ssl.SSLContext) -> bytes | None:
    with (
        socket.create_connection((_HOST, port), _CONNECT_TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=_HOST) as connection,
    ):
        return connection.getpeercert(binary_form=True)


def _run_openssl(*options: str) -> None:
    """openssl 3 or newer, which alone signs so."""
    done = subprocess.run(["openssl", "req", "-x509", *_NEW_KEY, *options], capture_output=True, text=True)
    if done.returncode:
        raise QuireError(f"openssl req: {done.stderr.strip()}")
