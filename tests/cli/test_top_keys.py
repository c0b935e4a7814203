"""`quire top` at a terminal: what keys do, and that it leaves when told to."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from quire.frontend.cli.commands.top import decode_keys
from quire.frontend.cli.top.view import SORT_NAMES, Action, View
from top_fakes import make_request

DEADLINE_S = 20.0
CORNER = "\x1b[H"
SEQUENCE = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]|\r")
SCREEN = """
import sys
sys.path[:0] = {folders!r}
import top_fakes
from quire.frontend.cli import engine_choice
from quire.frontend.cli.commands import top
from quire.frontend.cli.entry import run_command
requests = [top_fakes.make_request(f"request-{{number:03}}", age_s=float(number)) for number in range(100)]
fake = top_fakes.FakeEngine(top_fakes.make_snapshot(requests))
top.attach_engine = lambda name: fake
engine_choice.list_daemons = lambda: ["only"]
code = run_command(["top", *{options!r}])
print("aborted", fake.aborted)
sys.exit(code)
"""


class TopScreen:
    """`quire top` at a pseudo-terminal, with a hundred requests."""

    def __init__(self, *options: str, width: int = 80, height: int = 24) -> None:
        self._written, self._decode = "", codecs.getincrementaldecoder("utf-8")().decode
        self._main, terminal = pty.openpty()
        self.resize(width, height)
        folders = [str(folder) for folder in Path(__file__).parents[:2]]
        script = SCREEN.format(folders=folders, options=list(options))
        environment = {**os.environ, "TERM": "xterm"}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self.child = subprocess.Popen(
            [sys.executable, "-c", script], stdin=terminal, stdout=terminal, stderr=terminal, env=environment
        )
        os.close(terminal)

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def wait_until_shown(self, *wanted: str, gone: str = "\0") -> list[str]:
        """The lines of the screen, once all of that is on it; fails at the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            # Each frame is drawn whole, from the corner on; the last one may still come.
            text = SEQUENCE.sub("", self._written.rpartition(CORNER)[2])
            if all(part in text for part in wanted) and gone not in text:
                return text.splitlines()
            ready, _, _ = select.select([self._main], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{wanted} did not come: {text}"
            try:
                self._written += self._decode(os.read(self._main, 65536))
            except OSError:
                raise AssertionError(f"{wanted} did not come: {text}") from None

    def __enter__(self) -> TopScreen:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._main)


@pytest.mark.parametrize("way", ["q", "ctrl-c"])
def test_the_screen_moves_until_it_is_told_to_leave(way: str):
    with TopScreen() as top_screen:
        top_screen.wait_until_shown("1,501", "request-000")
        if way == "q":
            top_screen.press("q")
        else:
            top_screen.child.send_signal(signal.SIGINT)
        top_screen.wait_until_shown("aborted []")
        assert top_screen.child.wait(DEADLINE_S) == 0


def test_keys_scroll_sort_explain_and_cancel_after_a_question():
    with TopScreen() as top_screen:
        top_screen.wait_until_shown("request-000", "and 90 more")
        top_screen.press("\x1b[B\x1b[B")
        top_screen.wait_until_shown("▶ request-001")
        top_screen.press("\x1b[6~")
        top_screen.wait_until_shown("▶ request-011", gone="request-000")
        top_screen.press("\x1b[6~" * 9)
        top_screen.wait_until_shown("▶ request-099", " to 100 of 100")
        top_screen.press("s" * 6)
        top_screen.wait_until_shown("age▼", "▶ request-099", "sorted by age")
        top_screen.press("h")
        top_screen.wait_until_shown("cancel the selected one", gone="request-0")
        top_screen.press("x")
        top_screen.wait_until_shown("▶ request-099")
        top_screen.press("c")
        top_screen.wait_until_shown("cancel request-099? y/n")
        top_screen.press("n")
        top_screen.wait_until_shown("not cancelled", "▶ request-099")
        top_screen.press("c")
        top_screen.wait_until_shown("cancel request-099? y/n")
        top_screen.press("y")
        top_screen.wait_until_shown("request-099: told to end", "▶ request-098")
        top_screen.press("q")
        top_screen.wait_until_shown("aborted ['request-099']")
        assert top_screen.child.wait(DEADLINE_S) == 0


def test_a_screen_that_is_resized_is_drawn_anew():
    with TopScreen("--sort", "age") as top_screen:
        top_screen.wait_until_shown("request-099", "p50/p95/p99", "age▼")
        top_screen.resize(40, 12)
        lines = top_screen.wait_until_shown("request-099", "Quire pocket", gone="p50")
        assert len(lines) <= 12
        top_screen.resize(100, 40)
        top_screen.wait_until_shown("request-080", "p50/p95/p99", "ITL -")


def test_keys_have_names():
    pressed = b"q\x1b[A\x1b[B\x1bOA\x1b[5~\x1b[6~\x1b[1;5C\x1b?\t"
    assert decode_keys(pressed) == ["q", "up", "down", "up", "pgup", "pgdn", "", "esc", "?", "\t"]


def test_the_selected_request_stays_selected_while_others_come_and_go():
    requests = [make_request(name) for name in "abcde"]
    view = View()
    assert view.press("down", requests) is None
    view.press("down", requests)
    view.press("j", requests)
    assert view.selected == "c"
    assert view.place_rows(requests[1:], 2) == 0
    assert view.selected == "c"
    assert view.place_rows([requests[0], *requests[3:]], 2) == 0  # it has ended
    assert view.selected == "d"
    assert view.place_rows([], 2) == 0
    assert view.selected is None


def test_a_question_is_about_the_request_that_was_asked_for_though_it_ends_meanwhile():
    requests = [make_request(name) for name in "ab"]
    view = View()
    view.press("c", requests)
    assert "select a request" in view.message
    view.press("down", requests)
    view.press("c", requests)
    view.place_rows(requests[1:], 5)
    assert view.press("y", requests[1:]) is Action.CANCEL
    assert (view.to_cancel, view.selected) == ("a", "b")


def test_every_order_has_each_request_once_and_numbers_fall():
    requests = [make_request(f"{n}", age_s=n, held_bytes=n, num_output_tokens=n) for n in (2.0, 9.0, 5.0)]
    for name in SORT_NAMES:
        assert sorted(one.request_id for one in View(name).order(requests)) == ["2.0", "5.0", "9.0"]
    for name in ("age", "holds", "tokens", "progress"):
        assert [one.age_s for one in View(name).order(requests)] == [9.0, 5.0, 2.0]
