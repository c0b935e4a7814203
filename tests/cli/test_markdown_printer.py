"""Markdown that is painted while it comes ends as if it had come at once, at every width."""

from __future__ import annotations

import io
import itertools
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.frontend.cli.chat import markdown_printer
from quire.frontend.cli.chat.markdown_printer import MarkdownPrinter, find_block_end
from rich.console import Console
from terminal_screen import TerminalScreen

TEXT = """\
# A **title**

Some *words* with `code`, **bold ones that go on beyond the end of a line of forty columns** and <b>more</b>.
A second line, and [a link](http://x.example/a?b=c).

- one
- two
  - 日本語の文字はとても幅が広いので折り返しが必要です。

```python
def f():

    return "日本"
```

| name | value |
|---|--:|
| a | 1 |

> quoted

![image](i.png) and ``` that never ends
"""
SHOWN = (
    "A title",
    "• one",
    'return "日本"',
    "<b>more</b>",
    "http://x.example/a?b=c",
    "▌ quoted",
    "name  value",
    "(i.png)",
)


class Terminal:
    """A printer, and the screen that it prints on; every write is painted."""

    def __init__(self, width: int = 80, height: int = 24) -> None:
        self.file = io.StringIO()
        self.screen = TerminalScreen(width, height)
        theme = markdown_printer._THEME
        console = Console(file=self.file, force_terminal=True, width=width, height=height, theme=theme)
        self.console = console
        self.printer = MarkdownPrinter(self.file, True, console, clock=lambda: 0.0)

    def write(self, text: str) -> None:
        self.printer.write(text)
        self.show()

    def end(self) -> str:
        self.printer.end()
        self.show()
        return self.screen.text

    def show(self) -> None:
        self.screen.feed(self.file.getvalue())
        self.file.seek(0)
        self.file.truncate()


def print_in_pieces(text: str, width: int = 80, height: int = 24, seed: int | None = None) -> str:
    terminal = Terminal(width, height)
    chance = random.Random(seed)
    place = 0
    while place < len(text):
        length = len(text) if seed is None else chance.randint(1, 7)
        terminal.write(text[place : place + length])
        place += length
    return terminal.end()


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("seed", [1, 2])
def test_pieces_end_as_the_whole_does(width: int, seed: int) -> None:
    whole = print_in_pieces(TEXT, width, height=100)
    assert print_in_pieces(TEXT, width, height=100, seed=seed) == whole
    assert max(map(len, whole.splitlines())) <= width
    if width >= 40:
        assert all(part in whole for part in SHOWN)
    assert "**" not in whole
    assert "# A" not in whole


def test_what_is_longer_than_the_screen_scrolls_and_nothing_of_it_is_lost() -> None:
    code = "```\n" + "".join(f"line {number}\n" for number in range(100)) + "```\n\nThe end."
    shown = print_in_pieces(code, height=10, seed=3)
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    assert lines == [*(f"line {number}" for number in range(100)), "The end."]


def test_a_line_is_shown_as_soon_as_it_has_come() -> None:
    terminal = Terminal()
    terminal.write("One")
    assert terminal.screen.lines == ["One"]
    terminal.write(" two.\n\n**Th")
    assert terminal.screen.lines == ["One two.", "", "**Th"]
    terminal.write("ree**")
    assert terminal.screen.lines == ["One two.", "", "Three"]


def test_lines_have_no_blanks_at_their_ends() -> None:
    terminal = Terminal()
    terminal.printer.write("# One\n\n- two\n\n`three`")
    terminal.printer.end()
    printed = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.file.getvalue())
    assert [line for line in re.split(r"[\r\n]+", printed) if line != line.rstrip()] == []


def test_a_narrower_window_keeps_what_was_printed_before() -> None:
    terminal = Terminal(60, 30)
    terminal.write("First.\n\nWords " * 3 + "that are wrapped again as the window is")
    terminal.console.width = terminal.screen.width = 30
    terminal.write(" made narrower.")
    text = terminal.end()
    assert text.count("First.") == 3
    assert " ".join(text.split()).endswith("that are wrapped again as the window is made narrower.")


def test_a_long_block_is_not_painted_all_the_time() -> None:
    clock = itertools.count(0.0, 1.0)  # a paint takes a second
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True)
    printer = MarkdownPrinter(file, False, console, clock=lambda: next(clock))
    printer.write("a")
    before = file.getvalue()
    for _ in range(4):
        printer.write("b")
    assert file.getvalue() == before
    printer.write("c")
    assert "abbbbc" in file.getvalue()


def test_a_fault_of_the_renderer_does_not_cost_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_markup: str) -> None:
        raise IndexError("pop from an empty list")

    monkeypatch.setattr(markdown_printer, "_Answer", fail)
    assert print_in_pieces("**bold**", seed=1).strip() == "**bold**"


def test_a_quote_is_shown_where_there_is_no_room_for_its_bar() -> None:
    assert print_in_pieces(">a", width=4).strip() == ">a"


def test_blocks_end_at_empty_lines_outside_of_fences_and_items() -> None:
    for text, length in [
        ("a\n\nb\n\nc", 3),
        ("a\n\n", 0),
        ("- a\n\n  b", 0),
        ("```\na\n\nb\n", 0),
        ("```\na\n\nb\n```\n\nc", 14),
        ("~~~~\n\nx\n~~~\n\ny", 0),
        ("`a`\n\nb", 5),
    ]:
        assert find_block_end(text) == length, text


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab *_`#>-|1.\n~[](<!日\t", max_size=80), st.integers(4, 40))
def test_any_text_is_shown_without_a_fault(text: str, width: int) -> None:
    shown = print_in_pieces(text, width, height=200, seed=1)
    for sign in "ab日":
        assert shown.count(sign) >= text.count(sign) or "|" in text or "[" in text
