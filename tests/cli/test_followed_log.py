"""A log is followed until its writer has ended."""

from __future__ import annotations

from pathlib import Path

from quire.frontend.cli.commands.daemon import follow_log


def test_all_that_is_written_is_read_also_just_before_the_end(tmp_path: Path):
    path = tmp_path / "log"
    path.write_text("old\n")
    later = iter(["one\n", "two", "\nthree\n"])
    asked = iter([True, True, True, False])

    def write() -> None:
        with path.open("a") as log:
            log.write(next(later))

    def is_running() -> bool:
        runs = next(asked)
        if not runs:
            with path.open("a") as log:
                log.write("last words")
        return runs

    with path.open() as log:
        log.readline()
        assert "".join(follow_log(log, is_running, write)) == "one\ntwo\nthree\nlast words"
