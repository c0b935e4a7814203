"""What a stress run's Ray finds as quire."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from quire.tools.stress import ray_nodes
from quire.tools.stress.ray_nodes import link_package

_ASK = "import quire.mark; print(quire.mark.NAME)"


def test_rays_processes_find_the_checkout_that_runs_whatever_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("work", "quire"):  # this checkout, under another name, and one that is not meant
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "mark.py").write_text(f"NAME = {name!r}")
    monkeypatch.setattr(ray_nodes, "PACKAGE_DIR", str(tmp_path / "work"))
    with link_package() as folder:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK], env={"PYTHONPATH": folder}, capture_output=True, text=True
        )
        assert (done.stdout, done.stderr) == ("work\n", "")
        assert len(list(Path(folder).iterdir())) == 1
    assert not Path(folder).exists()
    assert (tmp_path / "work" / "mark.py").exists()  # what the link led to stays
