"""A real `quire serve` over the pocket model, for tests that look at it from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai
import psutil

_OPTIONS = ["serve", "--port", "0", "--log-level", "WARNING"]
COMMAND = [sys.executable, "-m", "quire", *_OPTIONS]
FAKE_COMMAND = [sys.executable, "-m", "fake_quire", *_OPTIONS]  # with a fake worker
FAKE_ENV = {"PYTHONPATH": str(Path(__file__).parent)}  # where it is found
TIMEOUT_S = 60.0
START_S = 300.0  # a machine with other work took 100; a server that ends instead is not waited for
STOP_S = 30.0


class Answer(NamedTuple):
    """json: the body, as text if it is not JSON."""

    status: int
    json: Any
    headers: dict[str, str]


Ask = Callable[..., Answer]


class Served:
    """A `quire serve` process, ready, with what it printed. `api_key`: what its clients and `get` send."""

    def __init__(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        api_key: str = "none",
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, text=True, env=os.environ | (env or {})
        )
        self.api_key = api_key
        self.box = ""
        reader = threading.Thread(target=self._read_box)
        reader.start()
        reader.join(START_S)
        found = re.search(r"https?://127\.0\.0\.1:(\d+)", self.box)
        assert found, self.box
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def _read_box(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.box += line
            if line.strip().startswith("curl "):
                return

    @property
    def grpc_address(self) -> str:
        """Of a server with --grpc-port."""
        found = re.search(r"gRPC +(\S+)", self.box)
        assert found, self.box
        return found[1]

    def client(self, api_key: str | None = None) -> openai.OpenAI:
        key = api_key or self.api_key
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S)

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers={"authorization": f"Bearer {self.api_key}"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)

    def ask(self, path: str, body: Any = None, **headers: str) -> Answer:
        """A POST with exactly this body, or a GET without one; errors are answers too."""
        data = None if body is None else json.dumps(body).encode()
        sent = {"authorization": f"Bearer {self.api_key}", "content-type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            request = urllib.request.Request(self.url + path, data, sent)
            answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            text = answer.read()
        told = {name.lower(): value for name, value in answer.headers.items()}
        is_json = told.get("content-type", "").startswith("application/json")
        return Answer(answer.status, json.loads(text) if is_json else text.decode(), told)

    def wait_until_idle(self) -> Any:
        """The engine's stats once nothing runs and every block is free again, within 5 s."""
        deadline = time.monotonic() + 5
        while True:
            stats = self.get("/stats")["stats"]
            if stats["num_running"] + stats["num_waiting"] + stats["kv_blocks_used"] == 0:
                return stats
            assert time.monotonic() < deadline, stats

    def processes(self) -> dict[str, psutil.Process]:
        """The HTTP process and its engine's, by role: http, supervisor, core, worker."""
        found = {"http": psutil.Process(self.process.pid)}
        for child in found["http"].children(recursive=True):
            role = child.cmdline()[-1]
            found["core" if role == "engine-core" else role] = child
        return found

    def stop(self) -> int:
        """End with SIGTERM; the exit code."""
        assert self.process.stdout is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_S)
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive, "a process outlived the server"
        self.process.stdout.close()
        return code
