"""The bar of a load: on a terminal, and nowhere else."""

from __future__ import annotations

import io

from quire.worker.progress import show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_how_many_layers_are_loaded_and_an_empty_line_at_the_end() -> None:
    terminal = Terminal()
    assert list(show_progress(range(3), "Loading weights", terminal, delay_s=0)) == [0, 1, 2]
    assert "Loading weights" in terminal.getvalue()
    assert "3" in terminal.getvalue()
    assert terminal.getvalue().split("\r")[-1].strip() == ""


def test_a_short_load_and_what_is_no_terminal_see_nothing() -> None:
    for stream in (Terminal(), io.StringIO()):
        assert list(show_progress(range(3), "Loading weights", stream, delay_s=60)) == [0, 1, 2]
        assert not stream.getvalue().strip()
