"""A file is the noted one if nothing was done to it, or if it holds the same; everything else is named."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from quire.ipc.errors import FilesChangedError
from quire.ipc.files.file_identity import (
    CLOCK_TICK_NS,
    check_files,
    check_served,
    compute_digest,
    find_digest,
    find_digests,
    list_unknown,
    note_files,
    note_model,
    stamp_file,
)

NAME = "model.safetensors"
CONTENT = bytes(range(256)) * 4096  # 1 MiB, whose samples are 4 kB in each 16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire" / "digests"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / NAME
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    return path


def put_by_rename(file: Path, content: bytes) -> None:
    new = file.with_suffix(".new")
    new.write_bytes(content)
    new.replace(file)


def write_in_place(file: Path, content: bytes) -> None:
    with file.open("r+b") as stream:
        stream.write(content)


def write_in_place_and_set_the_time_back(file: Path, content: bytes) -> None:
    status = file.stat()
    write_in_place(file, content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def copy_with_its_times(file: Path, content: bytes) -> None:
    copy = shutil.copy2(file, file.with_suffix(".new"))
    put_by_rename(Path(copy), content)
    shutil.copystat(file, copy)
    os.replace(copy, file)


def link(file: Path, content: bytes) -> None:
    other = file.with_name("elsewhere")
    other.write_bytes(content)
    file.unlink()
    file.symlink_to(other)


WAYS: tuple[Callable[[Path, bytes], None], ...] = (
    put_by_rename,
    write_in_place,
    write_in_place_and_set_the_time_back,
    copy_with_its_times,
    link,
)


def find_known(file: Path) -> None:
    find_digests({str(file): stamp_file(file)})


@pytest.mark.parametrize("way", WAYS)
def test_the_same_content_is_the_same_file_however_it_came_there(
    file: Path, way: Callable[[Path, bytes], None]
) -> None:
    noted = note_files(str(file.parent), [NAME])
    find_known(file)
    way(file, CONTENT)
    assert stamp_file(file) != noted[NAME]
    check_files(str(file.parent), noted)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", [0, 8000, len(CONTENT) - 1])
@pytest.mark.parametrize("is_known", [True, False])
def test_one_other_bit_of_the_same_size_is_another_file(
    file: Path, way: Callable[[Path, bytes], None], place: int, is_known: bool
) -> None:
    noted = note_files(str(file.parent), [NAME])
    if is_known:
        find_known(file)
    content = bytearray(CONTENT)
    content[place] ^= 1
    way(file, bytes(content))
    words = "its content is sha256:.* was sha256:" if is_known else "what it held is not known"
    with pytest.raises(FilesChangedError, match=rf"^{NAME}='.*{NAME}': .*{words}.*quire daemon restart"):
        check_files(str(file.parent), noted)


def test_a_file_that_was_just_written_is_noted_once_later_writes_have_another_time(file: Path) -> None:
    write_in_place(file, CONTENT)
    noted = note_files(str(file.parent), [NAME])
    assert time.time_ns() - noted[NAME].ctime_ns >= CLOCK_TICK_NS


def test_attributes_and_further_names_change_nothing(file: Path) -> None:
    noted = note_files(str(file.parent), [NAME])
    find_known(file)
    file.chmod(0o400)
    os.link(file, file.with_name("backup"))
    os.utime(file)
    check_files(str(file.parent), noted)


@pytest.mark.parametrize("size", [0, 1000, 2 * len(CONTENT)])
def test_another_size_is_said_with_both(file: Path, size: int) -> None:
    noted = note_files(str(file.parent), [NAME])
    os.truncate(file, size)
    with pytest.raises(FilesChangedError, match=f"it has {size} bytes, and had {len(CONTENT)}"):
        check_files(str(file.parent), noted)


def test_a_file_that_is_gone_or_no_file_or_may_not_be_read_is_said(file: Path) -> None:
    noted = note_files(str(file.parent), [NAME])
    file.unlink()
    with pytest.raises(FilesChangedError, match="it cannot be read any more"):
        check_files(str(file.parent), noted)
    for make in (file.mkdir, lambda: os.mkfifo(file)):
        make()
        with pytest.raises(FilesChangedError, match="it is not the file"):
            check_files(str(file.parent), noted)
        file.rmdir() if file.is_dir() else file.unlink()


def test_the_hubs_cache_says_by_its_names_what_files_hold(file: Path) -> None:
    """A link to a blob that is named by its content: nothing has to be read for that."""
    digest = compute_digest(file, stamp_file(file))
    blob = file.parent / digest
    file.rename(blob)
    file.symlink_to(blob.name)
    noted = note_files(str(file.parent), [NAME])
    assert find_digest(noted[NAME]) == digest
    assert not list_unknown(str(file.parent), "", note_model(str(file.parent), "", [NAME]))
    put_by_rename(blob, CONTENT)
    check_files(str(file.parent), noted)
    other = file.with_name("0" * 64)  # what another revision's link leads to
    other.write_bytes(CONTENT[::-1])
    put_link = file.with_name("link")
    put_link.symlink_to(other.name)
    put_link.replace(file)
    with pytest.raises(FilesChangedError, match=f"was sha256:{digest[:12]}"):
        check_files(str(file.parent), noted)


def test_what_was_written_while_it_was_read_is_not_known(file: Path) -> None:
    before = stamp_file(file)
    write_in_place(file, b"changed")
    find_digests({str(file): before})
    compute_digest(file, before)
    assert find_digest(before) is None


def test_a_damaged_digest_is_none(file: Path, cache: Path) -> None:
    find_known(file)
    (entry,) = cache.iterdir()
    entry.write_bytes(b"0" * 64)
    assert find_digest(stamp_file(file)) is None


def test_without_a_cache_a_file_that_was_written_again_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "no folder").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no folder"))
    noted = note_files(str(file.parent), [NAME])
    find_known(file)
    check_files(str(file.parent), noted)
    put_by_rename(file, CONTENT)
    with pytest.raises(FilesChangedError, match="what it held is not known"):
        check_files(str(file.parent), noted)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_frontends_see_what_was_changed_added_and_removed(file: Path, name: str) -> None:
    folder = str(file.parent)
    file.with_name("config.json").write_text("{}")
    without = note_model(folder, folder, [NAME])
    file.with_name(name).write_text("{}")
    noted = note_model(folder, folder, [NAME])
    check_served(noted, folder, folder)
    check_served(None, folder, folder)
    with pytest.raises(FilesChangedError, match=f"^{name}=.*was started without this file"):
        check_served(without, folder, folder)
    file.with_name(name).write_text("{ }")
    with pytest.raises(FilesChangedError, match=f"^{name}=.*it has 3 bytes, and had 2"):
        check_served(noted, folder, folder)
    file.with_name(name).unlink()
    with pytest.raises(FilesChangedError, match=f"^{name}=.*cannot be read"):
        check_served(noted, folder, folder)
