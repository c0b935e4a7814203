"""A model folder is found, and refused before anything is loaded when it cannot be."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.frontend.models.model_folder import (
    find_model_folder,
    inspect_model_folder,
    pocket_encoder_folder,
    pocket_folder,
)
from quire.ipc.errors import ModelError
from safetensors.torch import save_file


def write_model(folder: Path, names: tuple[str, ...] = ("model.safetensors",)) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for number, name in enumerate(names):
        save_file({f"layer{number}": torch.zeros(4, 8, dtype=torch.bfloat16)}, folder / name)
    return folder


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_whole_folder_reports_its_files_and_stored_dtype(tmp_path: Path):
    folder = inspect_model_folder(write_model(tmp_path))
    assert [file.name for file in folder.weight_files] == ["model.safetensors"]
    assert folder.stored_dtype == "bfloat16"


def test_the_pocket_model_is_the_packaged_folder():
    assert find_model_folder("pocket") == pocket_folder()


def test_the_pocket_encoder_is_the_packaged_folder_beside_it():
    assert find_model_folder("pocket-encoder") == pocket_encoder_folder()


@pytest.mark.parametrize("content", ["{", "[1]", "\xff", '{"a":' * 100_000 + "1" + "}" * 100_000, None])
def test_a_config_json_that_is_no_object_is_refused_by_name(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        inspect_model_folder(tmp_path)


def test_numbers_as_python_writes_them_are_read(tmp_path: Path):
    folder = write_model(tmp_path)
    (folder / "config.json").write_text('{"model_type": "bamba", "time_step_limit": [0.0, Infinity]}')
    assert inspect_model_folder(folder).config["time_step_limit"] == [0.0, math.inf]
    (folder / "config.json").write_text('{"time_step_limit": [0.0, Infinity}')
    with pytest.raises(ModelError, match="readable JSON"):
        inspect_model_folder(folder)


@pytest.mark.parametrize("model", ["x" * 5000, "~nobody-of-this-name/model"])
def test_a_name_that_no_file_system_takes_is_refused(model: str):
    with pytest.raises(ModelError, match=r"expected an existing folder .*hub name.* \(") as caught:
        find_model_folder(model)
    assert caught.value.value == model


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_weights_that_are_not_safetensors_are_refused(tmp_path: Path, name: str):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"pickle")
    with pytest.raises(ModelError, match="safetensors only.*" + name):
        inspect_model_folder(tmp_path)


def test_a_folder_without_weights_is_refused_unless_they_are_not_wanted(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="dummy"):
        inspect_model_folder(tmp_path)
    assert inspect_model_folder(tmp_path, load_weights=False).weight_files == ()


@pytest.mark.parametrize("cut", [1, 60, -1])
def test_a_file_of_another_size_than_it_declares_is_refused_with_both(tmp_path: Path, cut: int):
    file = write_model(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut] if cut > 0 else whole + b"x")
    with pytest.raises(ModelError, match=rf"{len(whole)} bytes.* it has {len(whole) - cut}"):
        inspect_model_folder(tmp_path)


def make_header(entry: str) -> bytes:
    header = f'{{"x": {entry}}}'.encode()
    return len(header).to_bytes(8, "little") + header


WRONG_TYPES = ["3", "[]", '{"data_offsets": 3}', '{"data_offsets": [-1, -1]}', "{}"]


@pytest.mark.parametrize(
    "content",
    [b"", b"\x01", b"\xff" * 64, (5).to_bytes(8, "little") + b"[1,2]", *map(make_header, WRONG_TYPES)],
)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes):
    write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors.*safetensors file"):
        inspect_model_folder(tmp_path)


def lie(header: dict[str, Any], kind: str) -> None:
    """Of two tensors of 64 bytes each."""
    first, second = header["a"], header["b"]
    if kind == "overlap":
        second.update(data_offsets=[0, 128], shape=[4, 8])
    elif kind == "gap":
        first["data_offsets"] = [0, 60]
    elif kind == "shape":
        first["shape"] = [4, 9]
    elif kind == "huge shape":
        first["shape"] = [2**62] * 16
    elif kind == "backwards":
        first["data_offsets"] = [64, 0]
    elif kind == "dtype":
        first["dtype"] = "F99"
    elif kind == "too many dimensions":
        first["shape"] = [1] * 10_000
    else:
        first["shape"] = [10**40]


@pytest.mark.parametrize(
    "kind",
    ["overlap", "gap", "shape", "huge shape", "backwards", "dtype", "too many dimensions", "huge size"],
)
def test_a_header_that_lies_about_its_tensors_is_refused(tmp_path: Path, kind: str):
    save_file({name: torch.zeros(4, 4) for name in "ab"}, write_model(tmp_path) / "model.safetensors")
    inspect_model_folder(tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    lie(header, kind)
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    with pytest.raises(ModelError, match=r"model\.safetensors.*expected (tensors|a safetensors file)"):
        inspect_model_folder(tmp_path)


def test_a_tensor_in_two_files_is_refused_by_name(tmp_path: Path):
    write_model(tmp_path, ("a.safetensors", "b.safetensors"))
    save_file({"layer0": torch.ones(4, 8), "layer1": torch.ones(4, 8)}, tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match=r"b\.safetensors.*'layer0' is in two"):
        inspect_model_folder(tmp_path)


def test_a_sharded_model_is_read_through_its_index(tmp_path: Path):
    write_model(tmp_path, ("a.safetensors", "b.safetensors", "unused.safetensors"))
    write_index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"})
    folder = inspect_model_folder(tmp_path)
    assert [file.name for file in folder.weight_files] == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"x": 1}}'])
def test_an_index_that_names_no_files_is_refused_by_name(tmp_path: Path, content: str):
    (write_model(tmp_path) / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        inspect_model_folder(tmp_path)


def test_only_a_second_copy_in_another_layout_is_refused(tmp_path: Path):
    write_model(tmp_path, ("consolidated.safetensors",))
    with pytest.raises(ModelError, match="another layout"):
        inspect_model_folder(tmp_path)


def test_missing_shards_are_named(tmp_path: Path):
    write_model(tmp_path, ("a.safetensors",))
    write_index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"})
    with pytest.raises(ModelError, match=r"all of 2 shards; 1 missing: b\.safetensors"):
        inspect_model_folder(tmp_path)


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "a.bin"])
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, name: str):
    write_model(tmp_path, ("a.safetensors",))
    write_index(tmp_path, {"x": name})
    with pytest.raises(ModelError, match="beside"):
        inspect_model_folder(tmp_path)


@pytest.mark.parametrize("model", ["./missing", "no/such/folder", "what is this", ""])
def test_a_name_that_is_neither_folder_nor_hub_name_is_refused(model: str, tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    if not model:
        model = "\x00"
    with pytest.raises(ModelError, match="hub name"):
        find_model_folder(model)


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match="a file"):
        find_model_folder(str(file))


@pytest.mark.parametrize("kind", ["offline", "unknown", "other"])
def test_a_hub_that_has_no_such_model_says_so(kind: str, monkeypatch: Any):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    errors = {
        "offline": (LocalEntryNotFoundError("offline"), "cannot be reached"),
        "unknown": (RepositoryNotFoundError.__new__(RepositoryNotFoundError), "not on the hub"),
        "other": (ValueError("what now"), "what now"),
    }
    error, text = errors[kind]

    def fail(*_args: Any, **_kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=text):
        find_model_folder("some-org/some-model")


@pytest.mark.parametrize("place", ["pocket", "folder", "folder/file.gguf", "folder/gguf", "folder:Q8_0"])
def test_what_is_on_this_machine_has_no_revision(tmp_path: Path, place: str):
    for file in ("file.gguf", "gguf/model-Q8_0.gguf", "config.json"):
        (tmp_path / "folder" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / file).touch()
    model = place if place == "pocket" else str(tmp_path / place)
    with pytest.raises(ModelError, match=r"^revision='v2': expected None: only the hub's models have"):
        find_model_folder(model, revision="v2")
    with pytest.raises(ModelError, match=r"^tokenizer_revision='v2': expected None"):
        find_model_folder(model, "v2", "tokenizer")


def test_a_hub_name_downloads_no_second_copy_and_no_pickles(monkeypatch: Any, tmp_path: Path):
    import fnmatch

    import huggingface_hub

    asked: dict[str, Any] = {}

    def download(model: str, **kwargs: Any) -> str:
        asked.update(kwargs, model=model)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_model_folder("some-org/some-model", revision="v2") == tmp_path
    wanted = [
        name
        for name in (
            "model.safetensors",
            "config.json",
            "tokenizer.model",
            "chat_template.jinja",
            "x.bin",
            "a.pt",
        )
        if any(fnmatch.fnmatch(name, pattern) for pattern in asked["allow_patterns"])
    ]
    assert asked["revision"] == "v2"
    assert wanted == ["model.safetensors", "config.json", "tokenizer.model", "chat_template.jinja"]


def test_a_hub_model_is_downloaded_to_the_folder_that_was_given(monkeypatch: Any, tmp_path: Path):
    import huggingface_hub

    calls: list[Any] = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda _model, **options: calls.append(options.get("cache_dir")) or str(tmp_path),
    )
    find_model_folder("some-org/some-model")
    find_model_folder("some-org/some-model", download_dir=str(tmp_path / "new" / "folder"))
    assert calls == [None, tmp_path / "new" / "folder"]
    assert calls[1].is_dir()


def test_a_download_folder_that_cannot_be_made_is_refused_before_the_hub_is_asked(tmp_path: Path):
    file = tmp_path / "file"
    file.write_bytes(b"")
    for folder in (file, file / "in", "~nobody-of-this-name/x", "a\0b"):
        with pytest.raises(ModelError, match=r"^download_dir=.*: expected a folder that can be written"):
            find_model_folder("some-org/some-model", download_dir=str(folder))


# Files that are no files: each of these blocked the reader, or was read without end.


def put_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(file))


PUTS: list[Callable[[Path], object]] = [
    os.mkfifo,
    lambda file: file.symlink_to("/dev/zero"),
    Path.mkdir,
    put_socket,
    lambda file: file.symlink_to(file.name),
    lambda file: file.symlink_to("gone"),
]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose files' names fit a socket's address."""
    with tempfile.TemporaryDirectory(prefix="q", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    "name", ["generation_config.json", "one.safetensors", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("put", PUTS)
def test_what_is_no_regular_file_is_refused_by_name(
    put: Callable[[Path], object], name: str, short_path: Path
):
    (short_path / "config.json").write_text("{}")
    put(short_path / name)
    with pytest.raises(ModelError, match=re.escape(name)):
        inspect_model_folder(short_path, load_weights="safetensors" in name)


def test_a_link_to_weights_that_are_gone_is_refused_by_name(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "one.safetensors").symlink_to("gone")
    with pytest.raises(ModelError, match=r"one\.safetensors"):
        inspect_model_folder(tmp_path)


def test_a_file_larger_than_any_of_its_kind_is_not_read(tmp_path: Path):
    write_model(tmp_path)
    os.truncate(tmp_path / "config.json", 1 << 40)
    with pytest.raises(
        ModelError, match=r"config\.json=.*: expected at most 16777216 bytes; it has 1099511627776"
    ):
        inspect_model_folder(tmp_path)


def test_a_header_larger_than_any_is_not_read(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    file.write_bytes((99_000_000).to_bytes(8, "little"))
    os.truncate(file, 1 << 30)
    with pytest.raises(ModelError, match="no header of at most"):
        inspect_model_folder(tmp_path)
