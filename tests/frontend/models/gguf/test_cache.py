"""How the cache of GGUF models' folders stays small."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.models.gguf import folder as gguf_folder
from quire.frontend.models.gguf.folder import open_gguf
from quire.ipc.files.private_cache import PrivateCache

from .files import make_tiny

KEEP = (
    "import sys; from quire.ipc.files.private_cache import keep_entry; "
    "keep_entry(sys.argv[1]); print(flush=True); sys.stdin.read()"
)


def make_folders(folder: Path, count: int, size_bytes: int = 1) -> None:
    """m00 is the one that was used last."""
    for age_s in range(count):
        path = folder / f"m{age_s:02}"
        path.mkdir(parents=True)
        (path / "tokenizer.json").write_bytes(bytes(size_bytes))
        os.utime(path, (10_000_000 - age_s, 10_000_000 - age_s))


def remove_old(folder: Path) -> None:
    PrivateCache(folder).remove_old(gguf_folder.NUM_KEPT, gguf_folder.MAX_BYTES)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_the_folders_used_last_are_kept_and_those_that_are_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(gguf_folder, "NUM_KEPT", 4)
    make_folders(tmp_path, 8)
    command = [sys.executable, "-P", "-c", KEEP, str(tmp_path / "m06")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        engine.stdout.readline()
        remove_old(tmp_path)
        assert names(tmp_path) == ["m00", "m01", "m02", "m03", "m06"]
        engine.kill()
    remove_old(tmp_path)
    assert names(tmp_path) == ["m00", "m01", "m02", "m03"]


def test_folders_have_a_bound_of_bytes_but_the_last_one_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    make_folders(tmp_path, 5, 100)
    monkeypatch.setattr(gguf_folder, "MAX_BYTES", 250)
    remove_old(tmp_path)
    assert names(tmp_path) == ["m00", "m01"]
    monkeypatch.setattr(gguf_folder, "MAX_BYTES", 50)
    remove_old(tmp_path)
    assert names(tmp_path) == ["m00"]


def test_what_killed_processes_left_is_removed_later(tmp_path: Path):
    (tmp_path / "new-abc").mkdir()
    (tmp_path / "new-old").mkdir()
    os.utime(tmp_path / "new-old", (1, 1))
    remove_old(tmp_path)
    assert names(tmp_path) == ["new-abc"]


def test_a_model_that_is_opened_again_counts_as_used(monkeypatch: Any, tmp_path: Path):
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(gguf_folder, "NUM_KEPT", 2)
    first = make_tiny().write(tmp_path / "first.gguf")
    second = make_tiny().write(tmp_path / "second.gguf")
    kept = open_gguf([first]).folder
    os.utime(kept, (1, 1))
    os.utime(open_gguf([second]).folder, (2, 2))
    assert open_gguf([first]).folder == kept
    third = open_gguf([make_tiny().write(tmp_path / "third.gguf")]).folder
    assert names(tmp_path / "cache") == sorted([kept.name, third.name])


def test_a_folder_that_another_process_has_made_meanwhile_is_not_replaced(monkeypatch: Any, tmp_path: Path):
    """That process may be reading it."""
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path / "cache")
    folder = open_gguf([make_tiny().write(tmp_path / "model.gguf")]).folder
    first = (folder / "tokenizer.json").stat().st_ino
    PrivateCache(tmp_path / "cache").put_folder(folder.name, {"config.json": b"{}", "tokenizer.json": b"{}"})
    assert (folder / "tokenizer.json").stat().st_ino == first
    assert names(tmp_path / "cache") == [folder.name]


def change_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def replace_by_a_link(file: Path) -> None:
    other = file.parent.parent.parent / "elsewhere"
    file.rename(other)
    file.symlink_to(other)


DAMAGES = {
    "a bit": change_a_bit,
    "empty": lambda file: file.write_bytes(b""),
    "missing": Path.unlink,
    "writable by others": lambda file: file.chmod(0o666),
    "a link": replace_by_a_link,
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "one more": lambda file: (file.parent / "chat_template.jinja").write_text("{{ evil }}"),
    "the folder writable": lambda file: file.parent.chmod(0o777),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "sealed.json"])
def test_what_is_not_as_it_was_written_is_made_again(
    monkeypatch: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str, name: str
):
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path / "cache")
    model = make_tiny().write(tmp_path / "model.gguf")
    folder = open_gguf([model]).folder
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    DAMAGES[damage](folder / name)
    assert open_gguf([model]).folder == folder
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert names(tmp_path / "cache") == [folder.name]
    (record,) = caplog.records
    assert f"{folder} is not used and is made again: " in record.getMessage()
    caplog.clear()
    open_gguf([model])
    assert not caplog.records


def make_unusable(cache: Path, how: str) -> None:
    match how:
        case "0777":
            cache.chmod(0o777)
        case "a file":
            cache.rename(cache.with_name("moved"))
            cache.touch()
        case _:
            monkey = cache.with_name("moved")
            cache.rename(monkey)
            monkey.chmod(0o770)
            cache.symlink_to(monkey)


@pytest.mark.parametrize("how", ["0777", "a file", "a link to one of others"])
def test_where_the_cache_cannot_be_trusted_the_folder_is_beside_the_run_directories(
    monkeypatch: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
):
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path / "cache")
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    model = make_tiny().write(tmp_path / "model.gguf")
    right = {file.name: file.read_bytes() for file in open_gguf([model]).folder.iterdir()}
    change_a_bit(open_gguf([model]).folder / "config.json")
    make_unusable(tmp_path / "cache", how)
    folder = open_gguf([model]).folder
    assert folder.parent == tmp_path / "run" / "quire" / "cache.gguf"
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == right
    assert "is not kept for long" in caplog.text
