"""Which GGUF files a name means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from quire.frontend.models.gguf.files import find_gguf_files
from quire.ipc.errors import ModelError


def make_files(folder: Path, *names: str) -> list[Path]:
    folder.mkdir(exist_ok=True, parents=True)
    for name in names:
        (folder / name).write_bytes(b"GGUF")
    return [(folder / name).resolve() for name in names]


def test_a_file_a_folder_with_one_and_a_tag_are_found(tmp_path: Path):
    (file,) = make_files(tmp_path / "one", "m-Q4_K_M.gguf")
    make_files(tmp_path / "one", "mmproj-m.gguf")
    assert find_gguf_files(str(file)) == (file,)
    assert find_gguf_files(str(tmp_path / "one")) == (file,)
    _, other = make_files(tmp_path / "two", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    assert find_gguf_files(f"{tmp_path / 'two'}:q8_0") == (other,)


def test_a_file_in_the_hub_s_cache_keeps_its_name(tmp_path: Path):
    (blob,) = make_files(tmp_path / "blobs", "a1b2")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "m-Q4_0.gguf").symlink_to(blob)
    (snapshot / "config.json").write_text("{}")
    for name in (snapshot, snapshot / "m-Q4_0.gguf", f"{snapshot}:Q4_0"):
        assert find_gguf_files(str(name)) == (snapshot / "m-Q4_0.gguf",)


def test_names_of_other_models_are_left_alone(tmp_path: Path):
    make_files(tmp_path, "m.gguf", "model.safetensors")
    for name in (str(tmp_path), "pocket", "org/name", str(tmp_path / "none"), "C:/x", "a\0b", "x" * 5000):
        assert find_gguf_files(name) == ()


def test_all_parts_of_a_split_file_are_found_by_any_of_them(tmp_path: Path):
    names = [f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    files = make_files(tmp_path, *names)
    assert find_gguf_files(str(files[1])) == tuple(files)
    assert find_gguf_files(str(tmp_path)) == tuple(files)
    files[2].unlink()
    with pytest.raises(ModelError, match=r"3 parts; 1 are missing: m-00003-of-00003\.gguf"):
        find_gguf_files(str(files[0]))


def test_a_folder_with_several_asks_for_a_name(tmp_path: Path):
    make_files(tmp_path, "a-Q4_0.gguf", "b-Q4_0.gguf")
    for name in (str(tmp_path), f"{tmp_path}:Q4_0"):
        with pytest.raises(ModelError, match="a-Q4_0, b-Q4_0"):
            find_gguf_files(name)
    with pytest.raises(ModelError, match="ends in Q2_K"):
        find_gguf_files(f"{tmp_path}:Q2_K")


def test_a_hub_name_with_a_tag_takes_that_file_only(monkeypatch: Any, tmp_path: Path):
    _, wanted = make_files(tmp_path / "snap", "m-Q8_0.gguf", "m-Q4_K_M.gguf")
    asked: dict[str, Any] = {}

    def download(model: str, **options: Any) -> str:
        asked.update(options, model=model)
        return str(tmp_path / "snap")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_gguf_files("org/name:q4_k_m") == (wanted,)
    assert asked["model"] == "org/name"
    assert asked["allow_patterns"] == ["*q4_k_m*.gguf", "*Q4_K_M*.gguf"]
