"""What was typed is kept between runs, for this user alone and within bounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.frontend.cli.chat.line_editor import MAX_ENTRIES, MAX_ENTRY_BYTES, LineHistory


def test_entries_are_there_in_the_next_run_and_nobody_else_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "state" / "quire" / "history.jsonl"
    history = LineHistory(path)
    assert history.load() == []
    for entry in ("one", "two\nlines", "日本", "no text \udcff"):
        history.add(entry)
    assert LineHistory(path).load() == ["one", "two\nlines", "日本", "no text ?"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_file_that_others_could_read_is_theirs_no_longer(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.touch(0o644)
    LineHistory(path).add("one")
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_oldest_go_and_what_is_too_long_is_not_kept(tmp_path: Path) -> None:
    history = LineHistory(tmp_path / "history.jsonl")
    history.add("x" * MAX_ENTRY_BYTES)
    assert history.load() == []
    num_entries = 2 * MAX_ENTRIES + 1
    for number in range(num_entries):
        history.add(f"{number}")
    expected = [f"{number}" for number in range(num_entries - MAX_ENTRIES, num_entries)]
    assert history.load() == expected
    assert (tmp_path / "history.jsonl").read_bytes().count(b"\n") == MAX_ENTRIES
    assert history.load() == expected


def test_lines_that_are_none_of_ours_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'"one"\n\xff\n{"a": 1}\n"two"\n"cut')
    assert LineHistory(path).load() == ["one", "two"]


def test_a_chat_goes_on_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    history = LineHistory(tmp_path / "file" / "history.jsonl")
    history.add("one")
    assert history.load() == []
    (tmp_path / "link").symlink_to(tmp_path / "file")
    LineHistory(tmp_path / "link").add("one")
    assert (tmp_path / "file").read_bytes() == b""


def test_two_chats_at_a_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"

    def add_many(name: str) -> None:
        for number in range(200):
            LineHistory(path).add(f"{name} {number}")

    with ThreadPoolExecutor() as pool:
        list(pool.map(add_many, "ab"))
    expected = sorted(f"{name} {number}" for name in "ab" for number in range(200))
    assert sorted(LineHistory(path).load()) == expected
