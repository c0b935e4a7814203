"""Models at addresses: fetched whole or not at all, gone on with after a cut, and noticed when replaced."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from quire.frontend.cli.entry import run_command
from quire.frontend.models import remote_files
from quire.frontend.models.gguf.files import find_gguf_files
from quire.frontend.models.model_folder import find_model_folder, pocket_folder
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.errors import ModelError

ADDRESS = "memory://bucket/model"
WEIGHTS = bytes(range(256)) * 1000


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_files, "_RETRY_AFTER_S", (0.0, 0.0))
    return tmp_path / "cache"


@pytest.fixture
def store() -> Iterator[Any]:
    store = fsspec.filesystem("memory")
    store.pipe({f"/bucket/model/{name}": content for name, content in FILES.items()})
    yield store
    store.rm("/bucket", recursive=True)


FILES = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "1_Pooling/config.json": b"{}",
    "pytorch_model.bin": b"pickle",
    "original/model.safetensors": b"x",
    "checkpoint-5/model.safetensors": b"x",
    "consolidated.safetensors": b"x",
}
WANTED = {"config.json": b"{}", "model.safetensors": WEIGHTS, "1_Pooling/config.json": b"{}"}


def read_all(folder: Path) -> dict[str, bytes]:
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != ".quire-files.json"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


class CutFile(io.BytesIO):
    """Ends with an error after so many bytes."""

    def __init__(self, content: bytes, num_bytes: int) -> None:
        super().__init__(content)
        self.left = num_bytes

    def read(self, size: int | None = -1) -> bytes:  # noqa: ARG002
        if self.left <= 0:
            raise OSError("the line was cut\nand more")
        part = super().read(self.left)
        self.left -= len(part)
        return part


class NotedFile(io.BytesIO):
    """Has attributes that can be set."""


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Where each reading of a file began."""
    calls: list[tuple[str, int]] = []
    real_open = MemoryFileSystem.open

    def open_noted(self: Any, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode != "rb":
            return real_open(self, path, mode, **kwargs)
        file = NotedFile(real_open(self, path, mode, **kwargs).getvalue())
        calls.append((path.rpartition("/")[2], 0))
        seek = file.seek

        def seek_noted(offset: int) -> int:
            calls[-1] = (calls[-1][0], offset)
            return seek(offset)

        file.seek = seek_noted  # type: ignore[method-assign]
        return file

    monkeypatch.setattr(MemoryFileSystem, "open", open_noted)
    return calls


@pytest.mark.usefixtures("store")
def test_the_files_that_a_load_needs_are_fetched_once(starts: list[Any]) -> None:
    folder = find_model_folder(ADDRESS)
    assert read_all(folder) == WANTED
    assert find_model_folder(f"{ADDRESS}/") == find_model_folder(ADDRESS) == folder
    assert len(starts) == len(WANTED)


@pytest.mark.usefixtures("store")
def test_a_cut_download_goes_on_where_it_was(starts: list[Any], cache_home: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        real_open = MemoryFileSystem.open

        def open_cut(self: Any, path: str, *_args: Any, **_options: Any) -> io.BytesIO:
            content = real_open(self, path).getvalue()
            return CutFile(content, 1000 if path.endswith("model.safetensors") and not part_bytes() else 0)

        def part_bytes() -> int:
            return sum(file.stat().st_size for file in cache_home.rglob("model.safetensors.incomplete"))

        patch.setattr(MemoryFileSystem, "open", open_cut)
        with pytest.raises(ModelError, match=r"^model=.*\(it cannot be downloaded: the line was cut\)$"):
            fetch(ADDRESS, ["model.safetensors"])
        assert part_bytes() == 1000
    assert read_all(fetch(ADDRESS, ["model.safetensors"])) == {"model.safetensors": WEIGHTS}
    assert starts[-1] == ("model.safetensors", 1000)


def fetch(address: str, patterns: list[str]) -> Path:
    return remote_files.fetch_folder(address, "model", patterns, [])


@pytest.mark.usefixtures("store")
def test_a_cut_in_the_middle_is_gone_on_with_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = MemoryFileSystem.open
    monkeypatch.setattr(
        MemoryFileSystem,
        "open",
        lambda self, path, *_args, **_options: CutFile(real_open(self, path).getvalue(), 100_000),
    )
    assert read_all(find_model_folder(ADDRESS)) == WANTED


def test_a_replaced_file_makes_another_folder_and_the_rest_is_not_fetched_again(
    store: Any, starts: list[Any]
) -> None:
    before = find_model_folder(ADDRESS)
    starts.clear()
    store.pipe("/bucket/model/config.json", b'{"a": 1}')
    after = find_model_folder(ADDRESS)
    assert after != before
    assert read_all(after) == WANTED | {"config.json": b'{"a": 1}'}
    assert starts == [("config.json", 0)]


def test_a_version_stays_while_a_process_keeps_it_and_goes_afterwards(store: Any) -> None:
    first = remote_files.fetch_folder(ADDRESS, "model", ["*.json"], [])
    versions = [first]
    for number in range(2):
        store.pipe("/bucket/model/config.json", b"[%d]" % number)
        versions.append(remote_files.fetch_folder(ADDRESS, "model", ["*.json"], []))
    assert all(folder.is_dir() for folder in versions)  # this process keeps each
    assert read_all(first)["config.json"] == b"{}"
    for entry in os.listdir("/proc/self/fd"):
        target = os.path.realpath(f"/proc/self/fd/{entry}")
        if target == str(first):
            fcntl.flock(int(entry), fcntl.LOCK_UN)
    store.pipe("/bucket/model/config.json", b"[3]")
    remote_files.fetch_folder(ADDRESS, "model", ["*.json"], [])
    assert not first.exists()
    assert versions[1].is_dir()


@pytest.mark.usefixtures("store")
def test_a_file_that_was_damaged_here_is_fetched_again() -> None:
    folder = find_model_folder(ADDRESS)
    (folder / "model.safetensors").write_bytes(b"short")
    assert find_model_folder(ADDRESS) == folder
    assert read_all(folder) == WANTED


def test_a_file_that_is_replaced_while_it_comes_is_refused(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = MemoryFileSystem.open

    def open_and_replace(self: Any, path: str, *_args: Any, **_options: Any) -> Any:
        content = real_open(self, path).getvalue()
        store.store[path].created = datetime.now(UTC)
        return io.BytesIO(content)

    monkeypatch.setattr(MemoryFileSystem, "open", open_and_replace)
    with pytest.raises(ModelError, match="replaced meanwhile: start again"):
        find_model_folder(ADDRESS)


@pytest.mark.usefixtures("store")
def test_a_checksum_that_the_store_says_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    real_info = MemoryFileSystem.info
    wrong = {"md5Hash": "AAAAAAAAAAAAAAAAAAAAAA=="}
    monkeypatch.setattr(MemoryFileSystem, "info", lambda self, path: real_info(self, path) | wrong)
    real_ls = MemoryFileSystem.ls
    monkeypatch.setattr(
        MemoryFileSystem,
        "ls",
        lambda self, path, detail: [each | wrong for each in real_ls(self, path, detail)],
    )
    with pytest.raises(ModelError, match="its checksum is another"):
        find_model_folder(ADDRESS)


@pytest.mark.usefixtures("store")
def test_where_the_store_does_not_answer_the_last_version_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = find_model_folder(ADDRESS)

    def fail(*_args: Any, **_options: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(MemoryFileSystem, "ls", fail)
    with caplog.at_level(logging.WARNING):
        assert find_model_folder(ADDRESS) == folder
    assert "no route" in caplog.text
    with pytest.raises(ModelError, match="no route"):
        find_model_folder("memory://bucket/other")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("memory://bucket/none", "it has no such folder"),
        ("memory://bucket/model/config.json", "has no file"),
        ("xs3://bucket/model", "Protocol not known: xs3"),
        ("s3://user:secret@bucket/model", "without a password"),
        ("sftp://host/model", "paramiko"),
    ],
)
@pytest.mark.usefixtures("store")
def test_an_address_that_cannot_be_used_is_refused_by_name(address: str, said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        find_model_folder(address)
    assert str(caught.value).startswith("model=")
    assert "secret" not in str(caught.value)
    assert "s3://bucket/model" in str(caught.value)  # what is supported
    assert len(str(caught.value).splitlines()) == 1


def test_the_extra_of_a_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_address: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", fail)
    with pytest.raises(ModelError, match=r"pip install 'quire\[s3\]'"):
        find_model_folder("s3://bucket/model")


@pytest.mark.usefixtures("store")
def test_an_address_has_no_revision() -> None:
    with pytest.raises(ModelError, match=r"^revision='v1': expected None"):
        find_model_folder(ADDRESS, "v1")


@pytest.mark.usefixtures("store")
def test_a_disk_without_room_is_refused_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, starts: list[Any]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1))
    with pytest.raises(ModelError, match=r"needs 256004 bytes in .*, where 1 are free"):
        find_model_folder(ADDRESS)
    assert starts == []


def test_a_gguf_file_is_found_by_its_address_or_its_tag(store: Any) -> None:
    for name in ("m-Q4_0.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"):
        store.pipe(f"/bucket/model/{name}", name.encode())
    (whole,) = find_gguf_files(f"{ADDRESS}/m-Q4_0.gguf")
    assert whole.read_bytes() == b"m-Q4_0.gguf"
    names = [file.name for file in find_gguf_files(f"{ADDRESS}:Q8_0")]
    assert names == [file.name for file in find_gguf_files(f"{ADDRESS}/m-Q8_0-00002-of-00002.gguf")]
    assert names == ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]


def fetch_json(folder: str, address: str, pipe: Any) -> None:
    pipe.send(str(remote_files.fetch_folder(address, "model", ["*.json"], [], Path(folder))))


def test_a_file_address_is_read_where_it_is(tmp_path: Path) -> None:
    assert find_model_folder(f"file://{tmp_path}") == tmp_path


def test_processes_that_want_the_same_address_get_the_same_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    for _ in range(3):
        ours, theirs = context.Pipe()
        child = context.Process(target=fetch_json, args=(str(tmp_path), f"local://{source}", theirs))
        child.start()
        pipes.append(ours)
        children.append(child)
    folders = {pipe.recv() for pipe in pipes if pipe.poll(60)}
    for child in children:
        child.join(60)
    (folder,) = folders
    assert read_all(Path(folder)) == {"config.json": b"{}"}


def test_an_engine_is_made_of_what_is_at_an_address(store: Any, tmp_path: Path) -> None:
    for file in pocket_folder().iterdir():
        store.pipe(f"/bucket/pocket/{file.name}", file.read_bytes())
    config = EngineArgs(
        model="memory://bucket/pocket", download_dir=str(tmp_path / "here")
    ).create_engine_config()
    assert Path(config.model.model).is_relative_to(tmp_path / "here" / "quire")
    assert config.model.served_model_name == "memory://bucket/pocket"
    assert json.loads(Path(config.model.model, "config.json").read_text())["model_type"]


@pytest.mark.usefixtures("store")
def test_pull_prints_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["pull", ADDRESS]) == 0
    captured = capsys.readouterr()
    assert read_all(Path(captured.out.strip())) == WANTED
    assert captured.err == ""  # no bar where nobody looks on
