"""Where other people's programs are: the slow tests here install nothing, and skip what is not there.

QUIRE_CLIENTS_PYTHON names interpreters, with colons between them; the one that runs the tests is the last.
NODE_PATH names node_modules folders; programs of their .bin come before those of PATH. How to make them:
docs/compatibility.md.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYTHONS = [path for path in os.environ.get("QUIRE_CLIENTS_PYTHON", "").split(os.pathsep) if path] + [
    sys.executable
]
NODE_FOLDERS = [path for path in os.environ.get("NODE_PATH", "").split(os.pathsep) if path]
_LIST = """
import importlib.metadata, json
print(json.dumps([(found.name, found.version) for found in importlib.metadata.distributions()]))
"""


@functools.cache
def read_versions(python: str) -> dict[str, str]:
    """Version by distribution. Raises OSError or CalledProcessError where it is no interpreter."""
    done = subprocess.run([python, "-c", _LIST], capture_output=True, text=True, timeout=300, check=True)
    return {canonicalize_name(name): version for name, version in json.loads(done.stdout)}


def find_python(*names: str) -> str:
    """The first interpreter with a package by one of these names, as `openai<2`; else the test is skipped."""
    wanted = [Requirement(name) for name in names]
    for python in PYTHONS:
        if any(_is_met(one, read_versions(python)) for one in wanted):
            return python
    pytest.skip(f"{' or '.join(names)}: in no interpreter of QUIRE_CLIENTS_PYTHON (docs/compatibility.md)")


def _is_met(wanted: Requirement, versions: dict[str, str]) -> bool:
    version = versions.get(canonicalize_name(wanted.name))
    return version is not None and wanted.specifier.contains(version, prereleases=True)


def find_beside(python: str, name: str) -> str:
    """A program that a package put beside its interpreter."""
    return str(Path(python).parent / name)


def find_node_program(name: str) -> str:
    """A program of PATH or of a package for Node; skips the test where there is none."""
    folders = [str(Path(folder) / ".bin") for folder in NODE_FOLDERS]
    if (program := shutil.which(name, path=os.pathsep.join([*folders, os.environ["PATH"]]))) is None:
        pytest.skip(f"{name}: neither on PATH nor in .bin of a NODE_PATH folder (docs/compatibility.md)")
    return program


def find_node_package(name: str) -> Path:
    """The folder of a package for Node; skips the test where there is none."""
    for folder in NODE_FOLDERS:
        if (found := Path(folder) / name / "package.json").exists():
            return found.parent
    pytest.skip(f"{name}: in no folder of NODE_PATH (docs/compatibility.md)")
