"""Sources count as another version when what they hold has changed, and packages when their version has."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from quire.ipc.errors import FilesChangedError
from quire.ipc.processes.own_sources import OwnSources, find_versions


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in ("__init__.py", "core/engine.py", "kernels/sum.cpp", "kernels/sum.h", "tests/test_it.py"):
        (tmp_path / "quire" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "quire" / name).write_text(f"# {name}\n")
    return tmp_path / "quire"


def test_equal_sources_have_one_digest_wherever_they_lie_and_whatever_is_no_source(package: Path) -> None:
    sources = OwnSources(str(package))
    (package / "core" / "__pycache__").mkdir()
    (package / "core" / "__pycache__" / "engine.py").touch()
    (package / "tests" / "test_it.py").write_text("# changed")
    (package / "docs.md").touch()
    for name in ("__init__.py", "core/engine.py"):
        os.utime(package / name, (1, 1))
        content = (package / name).read_bytes()
        (package / name).unlink()
        (package / name).write_bytes(content)
    sources.check()
    moved = package.rename(package.with_name("elsewhere"))
    assert OwnSources(str(moved)).digest == sources.digest
    with pytest.raises(FilesChangedError, match="was removed"):
        sources.check()


CHANGES: dict[str, Callable[[Path], object]] = {
    "__init__.py.* has changed": lambda package: (package / "__init__.py").write_text("# __init__.PY\n"),
    "sum.h.* has changed": lambda package: (package / "kernels" / "sum.h").write_text("# kernels/sum.H\n"),
    "sum.cpp.* was removed": lambda package: (package / "kernels" / "sum.cpp").unlink(),
    "rows.json.* was added": lambda package: (package / "core" / "rows.json").touch(),
    "new.py.* was added": lambda package: (package / "core" / "new.py").touch(),
}


@pytest.mark.parametrize("words", CHANGES)
def test_what_was_changed_added_or_removed_is_named_each_time(package: Path, words: str) -> None:
    sources = OwnSources(str(package))
    sources.check()
    CHANGES[words](package)
    for _ in range(2):
        with pytest.raises(FilesChangedError, match=f"^{words}.*quire daemon restart"):
            sources.check()
    assert OwnSources(str(package)).digest != sources.digest


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("torch-2.9.0+cpu.dist-info", "torch-2.9.1+cpu.dist-info", r"torch='2\.9\.1\+cpu': was 2\.9\.0\+cpu"),
        ("llguidance-1.0.dist-info", None, "llguidance='not installed': was 1.0"),
        (None, "flashinfer_python-0.6.dist-info", "flashinfer_python='0.6': was not installed"),
        ("unknown-1.0.dist-info", "unknown-2.0.dist-info", None),
    ],
)
def test_packages_that_decide_bits_count_by_their_version(
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str | None,
    after: str | None,
    words: str | None,
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site), str(tmp_path / "missing")])
    if before is not None:
        (site / before).mkdir()
    sources = OwnSources(str(package))
    sources.check()
    if before is not None:
        (site / before).rmdir()
    if after is not None:
        (site / after).mkdir()
    if words is None:
        sources.check()
        return
    with pytest.raises(FilesChangedError, match=f"^{words} when this process started"):
        sources.check()


def test_the_packages_of_this_process_are_found() -> None:
    assert {"torch", "tokenizers", "safetensors"} <= find_versions().keys()
