"""`quire top`: what engines do, in the terminal."""

from __future__ import annotations

import os
import re
import sys
import termios
import time
import tty
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ....ipc.errors import QuireError
from ....ipc.processes.process import wait_readable
from ...client.remote_daemon import Attachment
from ...llm_engine import LLMEngine
from ..engine_choice import add_keys_option, choose_daemons
from ..parser import ExitCode, Parser
from ..top.frame import render
from ..top.view import ENGINES_ORDER, SORT_NAMES, Action, EngineWatcher, FrameData, View

PERIOD_S = 0.5
_PIPED_SIZE = (100, 40)  # columns and lines where there is no terminal to ask
_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|[^\x00]", re.DOTALL)
_NAMES = {
    **{b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down"},
    **{b"\x1b[5~": "pgup", b"\x1b[6~": "pgdn", b"\x1b": "esc"},
}


def run(argv: Sequence[str]) -> int:
    """Run `quire top`."""
    options = _make_parser().parse(argv)
    daemons = choose_daemons([*options.name, *(options.attach or ())], options.keys)
    with ExitStack() as stack:
        engines = [stack.enter_context(attach_engine(daemon)) for daemon in daemons]
        watchers = [
            EngineWatcher(engine, isinstance(daemon, str))
            for engine, daemon in zip(engines, daemons, strict=True)
        ]
        if options.json:
            shown = [engine.snapshot() for engine in engines]
            body = msgspec.json.encode(shown if len(shown) > 1 else shown[0])
            print(msgspec.json.format(body).decode())
        elif options.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            _print_frame([watcher.look() for watcher in watchers], options.sort)
        else:
            Screen(watchers, options.sort).follow()
    return ExitCode.OK


def attach_engine(daemon: Attachment) -> LLMEngine:
    """Attach to a running daemon, only to look: no tokenizer is read."""
    return LLMEngine.attach(daemon, client_kind="top", has_tokenizer=False)


def _make_parser() -> Parser:
    text = "Watch engines: rates, requests, KV blocks, clients. On a terminal `h` lists the keys."
    parser = Parser("quire top", text, arguments=" [NAME ...]")
    text = "which daemons, as --attach (all that run); several: one below the other"
    parser.add_argument("name", nargs="*", metavar="NAME", help=text)
    parser.add_argument("--attach", action="append", metavar="NAME", help="a daemon, also of another machine")
    add_keys_option(parser)
    text = f"order of the requests ({ENGINES_ORDER}: running ones, then as they will run)"
    parser.add_argument("--sort", choices=SORT_NAMES, default=ENGINES_ORDER, help=text)
    parser.add_argument("--once", action="store_true", help="print one frame and leave, as when piped")
    text = "print one snapshot as JSON and leave, a list of them with several daemons"
    parser.add_argument("--json", action="store_true", help=text)
    return parser


def _print_frame(looks: Sequence[FrameData], sort: str) -> None:
    is_terminal = sys.stdout.isatty()
    console = Console() if is_terminal else Console(width=_PIPED_SIZE[0], height=_PIPED_SIZE[1])
    # Printing ends with a line break, and the prompt needs a line too.
    height = (console.height - 1) // len(looks)
    for look in looks:
        console.print(render(look, console.width, height, None if sort == ENGINES_ORDER else View(sort)))


class Screen:
    """Shows a frame each period and after each key, until it is told to leave."""

    def __init__(self, watchers: Sequence[EngineWatcher], sort: str) -> None:
        self._watchers = watchers
        self._views = [View(sort) for _ in watchers]
        # What each engine showed last, or why it shows nothing.
        self._frames: list[FrameData | str] = ["" for _ in watchers]
        self._focus = 0  # the engine that keys are for

    def follow(self) -> None:
        """Until q or Ctrl-C. One engine that ends is an error, of several a line."""
        console = Console()
        with unbuffered_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
            due_at = 0.0
            while True:
                if time.monotonic() >= due_at:
                    self._look()
                    due_at = time.monotonic() + PERIOD_S
                live.update(self._render(*console.size), refresh=True)
                keys = read_keys(due_at - time.monotonic())
                if keys is None or any(self._press(key) for key in keys):
                    return

    def _look(self) -> None:
        for number, watcher in enumerate(self._watchers):
            try:
                self._frames[number] = watcher.look()
            except QuireError as error:
                if len(self._watchers) == 1:
                    raise
                self._frames[number] = str(error)

    def _press(self, key: str) -> bool:
        """Whether it is a key to leave."""
        look, view = self._frames[self._focus], self._views[self._focus]
        action = view.press(key, look.snapshot.requests if isinstance(look, FrameData) else ())
        if action is Action.NEXT_ENGINE:
            self._focus = (self._focus + 1) % len(self._watchers)
            self._views[self._focus].message = "keys are for this engine" if len(self._watchers) > 1 else ""
        elif action is Action.CANCEL:
            self._watchers[self._focus].engine.abort_named([view.to_cancel])
            view.message = f"{view.to_cancel}: told to end"
        return action is Action.LEAVE

    def _render(self, width: int, height: int) -> RenderableType:
        height //= len(self._watchers)
        return Group(
            *(
                Text(look, "bold", no_wrap=True, overflow="ellipsis")
                if isinstance(look, str)
                else render(look, width, height, view)
                for look, view in zip(self._frames, self._views, strict=True)
            )
        )


@contextmanager
def unbuffered_keys() -> Generator[None]:
    """Keys arrive as they are pressed and are not shown. Ctrl-C ends the block."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def read_keys(timeout_s: float) -> list[str] | None:
    """What is pressed within `timeout_s`, [] if nothing; None when nothing more can be."""
    if not wait_readable(sys.stdin.fileno(), max(0.0, timeout_s)):
        return []
    data = os.read(sys.stdin.fileno(), 1024)
    return decode_keys(data) if data else None


def decode_keys(data: bytes) -> list[str]:
    """Sequences that have no name are left out."""
    keys = (match[0] for match in _KEY.finditer(data))
    return [_NAMES.get(key, "") if key[:1] == b"\x1b" else key.decode("latin-1") for key in keys]
