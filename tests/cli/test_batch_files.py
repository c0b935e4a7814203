"""The files of a batch: what is done is told by the result file alone, and nothing foreign is touched."""

from __future__ import annotations

import contextlib
import gzip
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from quire.frontend.cli.batch import batch_files
from quire.frontend.cli.batch.batch_files import (
    BatchError,
    BatchResult,
    OutputError,
    Progress,
    ResultFile,
    open_input,
    read_lines,
    read_progress,
)
from quire.ipc.errors import InputError

LINES = b'{"custom_id": "a"}\n\n   \n{"custom_id": "b"}  \nno json\n{"custom_id": "a"}'


@pytest.fixture
def batch_input(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(LINES)
    return path


def make_result(result_id: str) -> BatchResult:
    return BatchResult(id=result_id, custom_id="a", error=BatchError("x", "y"))


def write_results(path: Path, ids: list[str]) -> None:
    results = ResultFile.open(str(path), overwrite=False)
    for result_id in ids:
        results.append(make_result(result_id))
    results.close()


def resume(output: Path, progress: Progress, overwrite: bool = False) -> None:
    results = ResultFile.open(str(output), overwrite)
    try:
        results.resume(progress)
    finally:
        results.close()


def list_due(batch_input: Path, progress: Progress) -> list[int]:
    return [line.number for line in read_lines(str(batch_input)) if progress.is_due(line)]


def test_empty_lines_are_no_lines_and_equal_ones_are_told_apart(batch_input: Path) -> None:
    progress = read_progress(str(batch_input))
    assert (progress.num_lines, progress.num_done) == (4, 0)
    assert list_due(batch_input, progress) == [1, 4, 5, 6]
    ids = [line.result_id for line in read_lines(str(batch_input)) if line.text]
    assert len(set(ids)) == 4
    assert ids == [line.result_id for line in read_lines(str(batch_input)) if line.text]


def test_a_torn_last_result_is_dropped_and_its_line_is_due_again(batch_input: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    ids = [line.result_id for line in read_lines(str(batch_input)) if line.text]
    write_results(output, [ids[2], ids[0]])
    whole = output.read_bytes()
    torn = msgspec.json.encode(make_result(ids[1]))
    for cut in (1, len(torn) - 1, len(torn)):
        output.write_bytes(whole + torn[:cut])
        progress = read_progress(str(batch_input))
        resume(output, progress)
        assert list_due(batch_input, progress) == [4, 6]
        assert output.read_bytes() == whole


def test_a_result_counts_once(batch_input: Path, tmp_path: Path) -> None:
    ids = [line.result_id for line in read_lines(str(batch_input)) if line.text]
    write_results(tmp_path / "out.jsonl", [ids[0], ids[0]])
    progress = read_progress(str(batch_input))
    resume(tmp_path / "out.jsonl", progress)
    assert progress.num_done == 1


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "text",
        '{"id": "batch_req_1_0123456789abcdef"}',
        '{"id": "batch_req_999999999999_0123456789abcdef"}',
    ],
)
def test_a_file_of_anything_else_is_refused_and_left_as_it_is(
    line: str, batch_input: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    first = next(read_lines(str(batch_input))).result_id
    write_results(output, [first])
    content = output.read_bytes() + line.encode() + b"\n" + b"torn"
    output.write_bytes(content)
    with pytest.raises(InputError, match=r"out\.jsonl:2'.*--overwrite starts anew"):
        resume(output, read_progress(str(batch_input)))
    assert output.read_bytes() == content
    progress = read_progress(str(batch_input))
    resume(output, progress, overwrite=True)
    assert (output.read_bytes(), progress.num_done) == (b"", 0)


def test_a_changed_line_is_another_line(batch_input: Path, tmp_path: Path) -> None:
    ids = [line.result_id for line in read_lines(str(batch_input)) if line.text]
    write_results(tmp_path / "out.jsonl", ids)
    batch_input.write_bytes(LINES.replace(b'"b"', b'"c"'))
    with pytest.raises(InputError, match="a file of results of this input"):
        resume(tmp_path / "out.jsonl", read_progress(str(batch_input)))


def test_one_run_at_a_time_writes_a_file(tmp_path: Path) -> None:
    results = ResultFile.open(str(tmp_path / "out.jsonl"), overwrite=False)
    results.append(make_result("x"))
    with pytest.raises(InputError, match="no other run is writing"):
        ResultFile.open(str(tmp_path / "out.jsonl"), overwrite=True)
    results.close()
    assert (tmp_path / "out.jsonl").stat().st_size > 0
    ResultFile.open(str(tmp_path / "out.jsonl"), overwrite=True).close()


def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(batch_files, "MAX_LINE_BYTES", 10)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"123456789\n" + b"x" * 95 + b"\n" + b"x" * 94 + b"y\nlast")
    lines = list(read_lines(str(path)))
    assert [line.is_cut for line in lines] == [False, True, True, False]
    assert [len(line.text) for line in lines] == [9, 10, 10, 4]
    assert lines[1].digest != lines[2].digest


def test_a_pipe_can_be_read_as_often_as_a_file(batch_input: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_bytes, args=(LINES,))
    writer.start()
    with open_input(str(fifo)) as path:
        progress = read_progress(path)
        assert list(read_lines(path)) == list(read_lines(str(batch_input)))
        assert list_due(Path(path), progress) == [1, 4, 5, 6]
    writer.join()


def test_standard_input_is_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(batch_files.os, "dup", lambda _fd: reader)
    monkeypatch.setattr(batch_files, "_STDIN_PATH", f"/proc/self/fd/{reader}")
    os.write(writer, LINES)
    os.close(writer)
    with open_input("-") as path:
        assert read_progress(path).num_lines == 4


@pytest.mark.parametrize("path", ["/dev/zero", "/dev", "/dev/null"])
def test_an_input_without_an_end_is_refused(path: str) -> None:
    with pytest.raises(InputError, match=f"input='{path}': expected a "), open_input(path):
        pass


def test_a_pipe_without_an_end_does_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_files.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**24))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    endless = subprocess.Popen(["sh", "-c", f"yes '{{}}' > {fifo}"])
    with pytest.raises(InputError, match=f"at most {2**23} bytes from a pipe"), open_input(str(fifo)):
        pass
    endless.wait(20)  # its reader has gone


def test_more_lines_than_can_be_remembered_are_refused(
    batch_input: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_files, "MAX_LINES", 5)
    with pytest.raises(InputError, match="at most 5 lines"):
        read_progress(str(batch_input))


def test_a_mark_of_utf8_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + LINES)
    assert next(read_lines(str(path))).text == b'{"custom_id": "a"}'


@pytest.mark.parametrize(
    "data",
    [gzip.compress(LINES), LINES.decode().encode("utf-16"), bytes(100)],
    ids=["gzip", "utf-16", "zeros"],
)
def test_a_file_that_is_no_text_is_refused_before_anything_starts(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    with pytest.raises(InputError, match="JSON lines as UTF-8 text"):
        read_progress(str(path))


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null", "/dev", "fifo"])
def test_an_output_that_keeps_nothing_is_refused(path: str, tmp_path: Path) -> None:
    if path == "fifo":
        path = str(tmp_path / path)
        os.mkfifo(path)
    with pytest.raises(InputError, match=f"output='{path}': expected a "):
        ResultFile.open(path, overwrite=False)


@pytest.mark.parametrize("start", [b"", b"another's", b'{"id":"'])
def test_a_file_without_newlines_is_neither_held_in_memory_nor_emptied(
    start: bytes, batch_input: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    output.write_bytes(start)
    os.truncate(output, 4 << 30)  # a hole
    with limited(resource.RLIMIT_AS, 2 << 30), pytest.raises(InputError, match=r"out:1'.*a file of results"):
        resume(output, read_progress(str(batch_input)))
    assert output.stat().st_size == 4 << 30


@contextlib.contextmanager
def limited(what: int, size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


def test_a_result_that_finds_no_room_leaves_none_of_itself_and_the_next_run_goes_on(
    batch_input: Path, tmp_path: Path
) -> None:
    ids = [line.result_id for line in read_lines(str(batch_input)) if line.text]
    output = tmp_path / "out.jsonl"
    write_results(output, ids[:1])
    size = output.stat().st_size
    results = ResultFile.open(str(output), overwrite=False)
    with (
        limited(resource.RLIMIT_FSIZE, size + 10),
        pytest.raises(OutputError, match=r"out\.jsonl': cannot be written .* the same command goes on"),
    ):
        results.append(make_result(ids[1]))
    assert output.stat().st_size == size
    results.append(make_result(ids[1]))
    results.close()
    progress = read_progress(str(batch_input))
    resume(output, progress)
    assert progress.num_done == 2
