"""What is read from a cache is what this user has written, whole; all else is as if it were not there."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from quire.ipc.files import private_cache
from quire.ipc.files.private_cache import SEAL_BYTES, CacheUnusableError, PrivateCache

NAME = "entry"
WRITE = """
import contextlib, sys
from pathlib import Path
from quire.ipc.files.private_cache import PrivateCache
cache = PrivateCache(Path(sys.argv[1]))
for turn in range(60):
    content = sys.argv[2].encode() * 1000
    cache.write("file", content)
    cache.put_folder(f"folder{turn % 3}", {"a": b"same", "b": b"same"})
    read = cache.read("file")
    assert read is None or len(set(read)) == 1, read
    cache.remove_old(8)
    with contextlib.suppress(FileNotFoundError):  # another process is about to replace it
        (cache.folder / f"folder{turn % 3}" / "a").write_bytes(b"damaged")
"""


@pytest.fixture
def cache(tmp_path: Path) -> PrivateCache:
    return PrivateCache(tmp_path / "home" / "quire" / "cache")


def list_names(cache: PrivateCache) -> list[str]:
    return sorted(path.name for path in cache.folder.iterdir())


def test_what_was_written_is_read_and_nothing_else_is_left(cache: PrivateCache) -> None:
    assert cache.read(NAME) is None
    cache.write(NAME, b"first")
    cache.write(NAME, b"second")
    assert cache.read(NAME) == b"second"
    assert list_names(cache) == [NAME]


def test_every_folder_that_is_made_is_private_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache = PrivateCache(tmp_path / "home" / "quire" / "cache")
        cache.write(NAME, b"content")
        cache.put_folder("folder", {"a": b"content"})
    finally:
        os.umask(before)
    folders = [cache.folder, *cache.folder.parents[:2], cache.folder / "folder"]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    assert (cache.folder / NAME).stat().st_mode & 0o777 == 0o600
    assert cache.read(NAME) == b"content"
    assert cache.find_folder("folder") is not None


@pytest.mark.parametrize("size", [0, 1, SEAL_BYTES - 1, SEAL_BYTES, -1])
def test_a_file_that_was_cut_is_none(cache: PrivateCache, size: int) -> None:
    cache.write(NAME, b"content")
    path = cache.folder / NAME
    path.write_bytes(path.read_bytes()[:size])
    assert cache.read(NAME) is None
    cache.write(NAME, b"again")
    assert cache.read(NAME) == b"again"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"[" * 65000, b'{"file": 1}', b"\xff"])
def test_a_folder_whose_list_is_another_is_made_again(cache: PrivateCache, content: bytes) -> None:
    folder = cache.put_folder(NAME, {"file": b"content"})
    (folder / "sealed.json").write_bytes(content)
    assert cache.find_folder(NAME) is None
    assert (cache.put_folder(NAME, {"file": b"again"}) / "file").read_bytes() == b"again"
    assert cache.find_folder(NAME) == folder


def test_every_bit_counts(cache: PrivateCache, caplog: pytest.LogCaptureFixture) -> None:
    cache.write(NAME, b"content")
    path = cache.folder / NAME
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert cache.read(NAME) is None
    assert f"{path} is not used and is made again: its checksum is another" in caplog.text


def test_a_file_that_others_may_write_a_link_a_folder_and_a_pipe_are_none(cache: PrivateCache) -> None:
    cache.write("other", b"content")
    cache.write(NAME, b"content")
    path = cache.folder / NAME
    path.chmod(0o620)
    assert cache.read(NAME) is None
    path.unlink()
    path.symlink_to("other")
    assert cache.read(NAME) is None
    path.unlink()
    path.mkdir()
    assert cache.read(NAME) is None
    path.rmdir()
    os.mkfifo(path)
    assert cache.read(NAME) is None
    cache.write(NAME, b"again")
    assert cache.read(NAME) == b"again"


def test_a_folder_that_others_may_write_or_that_is_none_is_no_cache(cache: PrivateCache) -> None:
    cache.folder.chmod(0o770)
    with pytest.raises(CacheUnusableError, match="others may write to"):
        PrivateCache(cache.folder)
    cache.folder.rmdir()
    cache.folder.touch()
    with pytest.raises(CacheUnusableError, match="is no folder"):
        PrivateCache(cache.folder)
    with pytest.raises(CacheUnusableError, match="cannot be made"):
        PrivateCache(cache.folder / "below")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_what_belongs_to_another_user_is_no_cache(cache: PrivateCache, tmp_path: Path) -> None:
    cache.write(NAME, b"content")
    os.chown(cache.folder / NAME, 12345, -1)
    assert cache.read(NAME) is None
    link = tmp_path / "link"
    link.symlink_to(cache.folder)
    assert PrivateCache(link).folder == cache.folder  # a user may have moved it
    os.chown(link, 12345, -1, follow_symlinks=False)
    for path in (link, link / "below"):
        with pytest.raises(CacheUnusableError, match="is another user's link"):
            PrivateCache(path)
    os.chown(cache.folder, 12345, -1)
    with pytest.raises(CacheUnusableError, match="belongs to another user"):
        PrivateCache(cache.folder)


def test_a_disk_that_is_full_leaves_what_was_there_and_nothing_else(
    cache: PrivateCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write(NAME, b"first")
    cache.put_folder("folder", {"a": b"first"})
    (cache.folder / "folder" / "a").write_bytes(b"damaged")

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(private_cache.os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        cache.write(NAME, b"second")
    with pytest.raises(OSError, match="No space"):
        cache.put_folder("folder", {"a": b"second"})
    assert cache.read(NAME) == b"first"
    assert cache.find_folder("folder") is None
    assert list_names(cache) == [NAME, "folder"]


def test_several_processes_at_once_read_whole_entries_and_leave_nothing(cache: PrivateCache) -> None:
    command = [sys.executable, "-c", WRITE, str(cache.folder)]
    writers = [subprocess.Popen([*command, letter]) for letter in "abc"]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert not [name for name in list_names(cache) if name.startswith(private_cache.SCRATCH_PREFIX)]
