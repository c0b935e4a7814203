"""The HTTP server of a stress run: `quire serve` over a daemon, with its address and what it has said."""

from __future__ import annotations

import importlib.util
import os
import re
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence

from ...frontend.client.remote_daemon import Attachment, RemoteDaemon
from ...ipc.errors import QuireError
from ...ipc.processes.process import module_command
from .certificates import Certificates

NUM_HTTP_PROCESSES = 2
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 40.0


class Server:
    """Runs from construction to `close`. Raises QuireError when it is not ready in time.

    `api_keys` are those that it lets in, none for everybody; `command_prefix` goes before its command. With
    `certificates` it speaks TLS.
    """

    def __init__(
        self,
        daemon: Attachment,
        api_keys: Sequence[str] = (),
        command_prefix: Sequence[str] = (),
        certificates: Certificates | None = None,
    ) -> None:
        command = [*command_prefix, *module_command("quire", "serve", "--attach", str(daemon))]
        if isinstance(daemon, RemoteDaemon):
            command += ["--keys", daemon.keys]
        command += ["--port", "0", "--api-server-count", str(NUM_HTTP_PROCESSES), "--log-level", "ERROR"]
        if certificates is not None:
            command += ["--ssl-certfile", certificates.cert_path, "--ssl-keyfile", certificates.key_path]
            command += ["--enable-ssl-refresh"]
        self._has_grpc = importlib.util.find_spec("grpc") is not None
        command += ["--grpc-port", "0"] if self._has_grpc else []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - until close
        with tempfile.NamedTemporaryFile(mode="w") as key_file:  # not on the command line: others see that
            key_file.write("\n".join(api_keys))
            key_file.flush()
            command += ["--api-key-file", key_file.name] if api_keys else []
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log)
            self.pid = self._process.pid
            try:
                self.url, self.grpc_address = self._read_addresses()
            except QuireError as error:
                said = self.read_log().strip()
                self._process.kill()
                self.close()
                raise QuireError(
                    f"quire serve --attach {daemon} {error}; it said: {said or 'nothing'}"
                ) from None

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def read_log(self) -> str:
        """What it and its HTTP processes have said."""
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def _read_addresses(self) -> tuple[str, str]:
        """The addresses that it prints when it is ready, '' for gRPC without it. Raises QuireError."""
        assert self._process.stdout is not None
        stdout, deadline, box = self._process.stdout, time.monotonic() + _START_TIMEOUT_S, b""
        while True:
            http = re.search(rb"(https?://127\.0\.0\.1:\d+)/v1\s", box)
            grpc = re.search(rb"gRPC +(127\.0\.0\.1:\d+)\s", box)
            if http and (grpc or not self._has_grpc):
                return http[1].decode(), grpc[1].decode() if grpc else ""
            has_more = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
            data = os.read(stdout.fileno(), 65536) if has_more else b""
            if not data:
                raise QuireError(f"ended, or was not ready within {_START_TIMEOUT_S:g} s")
            box += data
