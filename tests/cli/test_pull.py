"""`quire pull` downloads what a start would, and says where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from quire.frontend.cli.entry import run_command
from quire.frontend.models.model_folder import pocket_folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str | None, Any]]:
    """What the hub was asked for: it has one GGUF file of anything."""
    calls: list[tuple[str, str | None, Any]] = []
    (tmp_path / "model-Q4_K_M.gguf").touch()

    def download(name: str, revision: str | None, allow_patterns: list[str], **_others: Any) -> str:
        calls.append((name, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_a_models_files_are_downloaded_and_its_folder_is_printed(
    asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_command(["pull", "owner/name", "--revision", "v2"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    ((name, revision, patterns),) = asked
    assert (name, revision) == ("owner/name", "v2")
    assert "*.safetensors" in patterns


def test_with_a_tag_it_is_the_one_gguf_file(
    asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_command(["pull", "owner/name:q4_k_m"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'model-Q4_K_M.gguf'}\n"
    assert asked[0][0] == "owner/name"


def test_what_is_here_is_not_asked_for(asked: list[Any], capsys: pytest.CaptureFixture[str]):
    assert run_command(["pull", "pocket"]) == 0
    assert capsys.readouterr().out == f"{pocket_folder()}\n"
    assert asked == []


def test_a_name_that_cannot_be_one_is_refused(asked: list[Any], capsys: pytest.CaptureFixture[str]):
    assert run_command(["pull", "no such name"]) == 2
    assert "model='no such name'" in capsys.readouterr().err
    assert asked == []
