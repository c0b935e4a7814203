"""Logits processors as a user names them: by module:Class or as classes, found where the user is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import own_processors
import pytest
from quire.frontend.options.engine_args import EngineArgs
from quire.frontend.options.logits_processor_names import find_module_folders, name_logits_processors
from quire.ipc.errors import ConfigError


def test_classes_and_names_become_names() -> None:
    assert name_logits_processors(None) == ()
    given = ["own_processors:Unlike", own_processors.Only]
    assert name_logits_processors(given) == ("own_processors:Unlike", "own_processors:Only")


def make_local() -> type:
    class Local:
        pass

    return Local


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("own_processors:Only", "a list of at most 32"),
        (["own_processors"], "module:Class"),
        (["own_processors:Only()"], "module:Class"),
        (["../x:Only"], "module:Class"),
        ([7], "module:Class"),
        (["own_processors:Only", own_processors.Only], "each once"),
        ([f"own_processors:C{i}" for i in range(33)], "at most 32"),
        (["__main__:Only"], "the script itself is not run again"),
        ([make_local()], "not one made in a function"),
    ],
)
def test_what_no_worker_could_import_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"logits_processors=.*{said}"):
        name_logits_processors(given)


def test_a_worker_is_told_where_the_module_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_the_current_folder.py").write_text("raise SystemExit('imported in a frontend')")
    monkeypatch.chdir(tmp_path)
    assert find_module_folders(["of_the_current_folder:A", "of_the_current_folder:B"]) == (str(tmp_path),)
    config = EngineArgs(logits_processors=[own_processors.Only]).create_engine_config()
    assert config.logits_processors == ("own_processors:Only",)
    assert config.logits_processor_folders == (str(Path(own_processors.__file__).parent),)
    with pytest.raises(ConfigError, match="there is no no_such_module"):
        find_module_folders(["no_such_module.sub:A"])
