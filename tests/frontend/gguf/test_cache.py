"""How the cache of GGUF models' folders stays small."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.gguf import folder as gguf_folder
from quire.frontend.gguf.folder import open_gguf, remove_old

from .files import make_tiny

KEEP = (
    "import sys; from quire.ipc.processes.folder_lock import keep_folder; "
    "keep_folder(sys.argv[1]); print(flush=True); sys.stdin.read()"
)


def make_folders(folder: Path, count: int, size_bytes: int = 1) -> None:
    """m00 is the one that was used last."""
    for age_s in range(count):
        path = folder / f"m{age_s:02}"
        path.mkdir(parents=True)
        (path / "tokenizer.json").write_bytes(bytes(size_bytes))
        os.utime(path, (10_000_000 - age_s, 10_000_000 - age_s))


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
    gguf_folder._write(folder, {"config.json": {}, "tokenizer.json": {}})
    assert (folder / "tokenizer.json").stat().st_ino == first
    assert names(tmp_path / "cache") == [folder.name]
