"""Types a page's blocks as a person would, in a clone with Quire's commands in the path, and compares answers
with those that the page shows: the same fields and kinds of values, whatever the values are.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any, cast

from page_blocks import ENDLESS, INSTALL, Block

_MARK = "QUIRE_NEWCOMER"  # in the environment of all that is started: how it is found again
_HOLD_NETWORK = [
    "unshare",
    "--net",
    "--map-root-user",
    "sh",
    "-c",
    "ip link set lo up && echo up && exec sleep inf",
]
_ENTER_NETWORK = "nsenter --target %d --user --net --preserve-credentials"
_BLOCK_S, _ENDLESS_S, _READY_S = 900, 3, 300
_SERVE = re.compile(
    r"^((?:\S*/)?quire serve\b[^&|#\n]*?)\s*(#.*)?$", re.M
)  # in the foreground: it never ends
_PORT = re.compile(r"--port (\d+)")
_EXAMPLE_ID = "resp-1f"
_CUT = "..."  # stands for what a page leaves out, at the end of a list or a text


class Typist:
    """Runs blocks in `clone`, in a network of its own where the kernel allows it, so that ports are free.

    Everything that was started ends with `close`.
    """

    def __init__(self, clone: Path, home: Path) -> None:
        self._clone = clone
        self._network = subprocess.Popen(_HOLD_NETWORK, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._network.stdout is not None
        is_up = self._network.stdout.readline() == b"up\n"
        self._enter = _ENTER_NETWORK % self._network.pid if is_up else ""
        bin_folder = clone / ".venv" / "bin"
        kept = {name: value for name, value in os.environ.items() if name in ("LANG", "TERM", "TMPDIR")}
        self._environment = kept | {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "HOME": str(home),
            "XDG_RUNTIME_DIR": str(home),
            "XDG_CACHE_HOME": str(clone / ".newcomer-cache"),  # kernels are compiled once
            _MARK: str(home),
        }

    def run(self, block: Block) -> str | None:
        """Type a block; what is wrong, None if it did what the page says."""
        if block.language == "python":
            return self._judge(block, ["python", "-c", block.text])
        text = wait_for_servers(block.text.removeprefix(f"{INSTALL} && "))
        if _EXAMPLE_ID in text:
            text = text.replace(_EXAMPLE_ID, self._make_response(runs="/cancel" in text))
        if block.text.strip() in ENDLESS:
            text = f"timeout {_ENDLESS_S} {text.strip()} || test $? = 124"
        return self._judge(block, ["bash", "-euo", "pipefail", "-c", text])

    def type(self, text: str) -> None:
        """What a page needs beforehand. Raises CalledProcessError."""
        self._run(["bash", "-euo", "pipefail", "-c", wait_for_servers(text)]).check_returncode()

    def close(self) -> None:
        """End what still runs of it: servers, daemons, their children."""
        self._network.kill()
        self._network.communicate()
        for pid in find_marked(_MARK, self._environment[_MARK]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _judge(self, block: Block, command: list[str]) -> str | None:
        try:
            done = self._run(command)
        except subprocess.TimeoutExpired:
            return f"has not ended within {_BLOCK_S} s"
        if done.returncode != 0:
            return f"ended with code {done.returncode}: {(done.stderr or done.stdout).strip()[-600:]}"
        return compare(block.shown, done.stdout) if block.shown else find_refusal(done.stdout)

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        # Into files: what stays in the background holds a pipe open.
        out, err = self._clone / ".newcomer-out", self._clone / ".newcomer-err"
        with out.open("w") as stdout, err.open("w") as stderr:
            done = subprocess.run(
                [*self._enter.split(), *command],
                cwd=self._clone,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                timeout=_BLOCK_S,
                start_new_session=True,
            )
        return subprocess.CompletedProcess(command, done.returncode, out.read_text(), err.read_text())

    def _make_response(self, runs: bool) -> str:
        """The id of a response in the place of the page's, one that has ended or one that `runs`."""
        asked: dict[str, object] = {"input": "What is 12 plus 30?", "max_output_tokens": 16, "temperature": 0}
        if runs:
            asked |= {"background": True, "max_output_tokens": 1500, "ignore_eos": True}
        fields = f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(asked))}"
        command = f"curl -sf http://127.0.0.1:8000/v1/responses {fields}"
        return json.loads(self._run(["bash", "-c", command]).stdout)["id"]


def wait_for_servers(text: str) -> str:
    """The commands, with each server put in the background, and waited for until it is ready."""

    def put_behind(found: re.Match[str]) -> str:
        port = _PORT.search(found[1])
        url = f"http://127.0.0.1:{port[1] if port else 8000}/health"
        return (
            f"{found[1]} &\ncurl -sf -o /dev/null --retry {_READY_S} --retry-delay 1 --retry-all-errors {url}"
        )

    return _SERVE.sub(put_behind, text)


def find_refusal(came: str) -> str | None:
    """What a server has refused, where the page shows no answer."""
    try:
        answer = json.loads(came)
    except json.JSONDecodeError:
        return None
    return (
        f"the answer is {came[:300]}"
        if isinstance(answer, dict) and "error" in answer and answer["error"]
        else None
    )


def find_marked(name: str, value: str) -> list[int]:
    """Processes with this in their environment, other than this one."""
    mark = f"{name}={value}".encode()
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def compare(shown: str, came: str) -> str | None:
    """What is different, as a path and what stands there; None if nothing is."""
    try:
        answer = json.loads(came)
    except json.JSONDecodeError:
        return f"no JSON: {came[:200]!r}"
    return _compare(json.loads(shown), answer, "answer")


def _compare(shown: Any, came: Any, path: str) -> str | None:
    if shown == _CUT or None in (shown, came):  # a field that may be null is one of either kind
        return None
    if isinstance(shown, dict):
        return _compare_objects(cast(dict[str, Any], shown), came, path)
    if isinstance(shown, list):
        return _compare_lists(cast(list[Any], shown), came, path)
    if isinstance(shown, bool) or isinstance(came, bool) or not isinstance(shown, int | float):
        return None if type(shown) is type(came) else f"{path}: {came!r}, and the page shows {shown!r}"
    return None if isinstance(came, int | float) else f"{path}: {came!r}, and the page shows {shown!r}"


def _compare_objects(shown: dict[str, Any], came: Any, path: str) -> str | None:
    if not isinstance(came, dict):
        return f"{path}: {came!r}, and the page shows an object"
    known = cast(dict[str, Any], came)
    if shown.keys() != known.keys():
        return f"{path}: fields {sorted(known)}, and the page shows {sorted(shown)}"
    return next(filter(None, (_compare(shown[name], known[name], f"{path}.{name}") for name in shown)), None)


def _compare_lists(shown: list[Any], came: Any, path: str) -> str | None:
    if not isinstance(came, list):
        return f"{path}: {came!r}, and the page shows a list"
    known = cast(list[Any], came)
    if bool(shown) != bool(known):
        return f"{path}: {len(known)} items, and the page shows {len(shown)}"
    pairs = enumerate(zip(shown, known, strict=False))
    return next(filter(None, (_compare(one, other, f"{path}[{n}]") for n, (one, other) in pairs)), None)
