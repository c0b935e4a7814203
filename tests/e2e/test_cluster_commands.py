"""The commands of docs/cluster.md as they are written, on one machine that plays all, with other ports."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from daemons import find_processes, runtime_folders, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
TIMEOUT_S = 180.0
PROMPT = "Once upon a time"


def find_block(section: str, language: str, number: int = 0) -> str:
    """The code blocks of a section, which begins with its title, by language and place."""
    text = PAGE.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)[number]


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Shell:
    """Runs lines in a folder of its own, where `quire` and `python` are those that run this test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        programs = folder / "bin"
        programs.mkdir()
        for name, arguments in (("quire", "-P -m quire"), ("python", "-P")):
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
            (programs / name).chmod(0o755)
        here = os.path.dirname(sys.executable)
        self._environment = os.environ | {"PATH": f"{programs}:{here}:{os.environ['PATH']}"}

    def run(self, line: str) -> str:
        """What it prints; it must end well."""
        done = subprocess.run(
            ["bash", "-c", line], cwd=self._folder, env=self._environment, timeout=TIMEOUT_S, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}"
        return done.stdout

    def serve(self, line: str, port: int) -> None:
        """A server's command: until it answers, and then its end by SIGTERM."""
        command = ["bash", "-c", f"exec {line}"]
        with subprocess.Popen(command, cwd=self._folder, env=self._environment) as server:
            try:
                deadline = time.monotonic() + TIMEOUT_S
                while not _answers(port):
                    assert server.poll() is None
                    assert time.monotonic() < deadline
            finally:
                server.terminate()
        assert server.returncode == 0


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        time.sleep(0.2)
        return False


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with runtime_folders():
        shell = Shell(tmp_path)
        yield shell
        subprocess.run([str(tmp_path / "bin" / "quire"), "daemon", "stop"], check=False, timeout=TIMEOUT_S)


def test_frontends_come_over_the_network(shell: Shell, tmp_path: Path) -> None:
    section, ports = "Frontends over the network", {"5757": find_free_port(), "8000": find_free_port()}

    def adapt(text: str) -> str:
        for written, ours in ports.items():
            text = text.replace(written, str(ours))
        return text

    make, start, generate, serve = find_block(section, "bash").splitlines()
    shell.run(adapt(make))
    shell.run(adapt(start))
    assert len(shell.run(adapt(generate))) > len(PROMPT)
    shell.serve(adapt(serve.partition("#")[0]), ports["8000"])
    (tmp_path / "program.py").write_text(adapt(find_block(section, "python")))
    assert len(shell.run("python program.py")) > len(PROMPT)
    shell.run(find_block(section, "bash", 1))
    shell.run(adapt(generate).replace("./keys", "./laptop"))


def test_one_machine_plays_several_nodes(shell: Shell) -> None:
    pytest.importorskip("ray")
    assert shutil.which("ray", path=os.path.dirname(sys.executable)) is not None
    port = find_free_port()
    block = find_block("Engines on the nodes of a Ray cluster", "bash", 1).replace("6379", str(port))
    *lines, last = block.splitlines()
    assert last == "ray stop", "which would stop those of others: this test ends its own"
    lines[0] += f" --port {port}"
    try:
        for line in lines:
            said = shell.run(line)
            if "generate" in line:
                assert len(said) > len(PROMPT)
        wait_until(lambda: not _find_ours(), 20.0)
        assert not _find_ours()
    finally:  # Ray's own go in their time
        for process in find_processes(os.environ["XDG_RUNTIME_DIR"]):
            process.kill()


def _find_ours() -> list[psutil.Process]:
    """Processes of Quire's that the daemon has left."""
    found: list[psutil.Process] = []
    for process in find_processes(os.environ["XDG_RUNTIME_DIR"]):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any(word.startswith("quire.") for word in process.cmdline()):
                found.append(process)
    return found
