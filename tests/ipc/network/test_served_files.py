"""A copy of a model's files is the engine's, or it is said which file is not."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from quire.ipc.errors import ModelError
from quire.ipc.network.served_files import check_copy, hash_served_files

FILES = {
    "config.json": "{}",
    "tokenizer.json": '{"a": 1}',
    "chat_template.jinja": "{{ x }}",
    "1_Pooling/config.json": "{}",
}


def make_folder(path: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return str(path)


@pytest.fixture
def engine(tmp_path: Path) -> str:
    return make_folder(tmp_path / "engine", {**FILES, "model.safetensors": "weights"})


def test_a_copy_without_weights_will_do(engine: str, tmp_path: Path) -> None:
    copy = make_folder(tmp_path / "copy", {**FILES, "notes.txt": "mine"})
    check_copy(hash_served_files(engine, engine), copy, copy)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_differs_is_named_with_both_hashes(engine: str, tmp_path: Path, name: str) -> None:
    copy = make_folder(tmp_path / "copy", {**FILES, name: '{"b": 2}'})
    ours, theirs = (hashlib.sha256(text.encode()).hexdigest()[:12] for text in ('{"b": 2}', FILES[name]))
    text = f"{name} is sha256:{ours} here and sha256:{theirs} there"
    with pytest.raises(ModelError, match=text):
        check_copy(hash_served_files(engine, engine), copy, copy)


def test_a_file_that_is_missing_on_either_side_is_named(engine: str, tmp_path: Path) -> None:
    less = make_folder(tmp_path / "less", {"config.json": "{}"})
    files = hash_served_files(engine, engine)
    with pytest.raises(ModelError, match=r"1_Pooling/config.json is missing here"):
        check_copy(files, less, less)
    more = make_folder(tmp_path / "more", {**FILES, "generation_config.json": "{}"})
    with pytest.raises(ModelError, match=r"generation_config.json is sha256:\w+ here and missing there"):
        check_copy(files, more, more)


def test_an_engine_without_a_tokenizer_asks_for_none(engine: str, tmp_path: Path) -> None:
    copy = make_folder(tmp_path / "copy", {"config.json": "{}", "1_Pooling/config.json": "{}"})
    check_copy(hash_served_files(engine, ""), copy, copy)
