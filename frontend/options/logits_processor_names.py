"""Names of logits processors, module:Class, of what a user gives. Their modules are not imported here."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ...ipc.errors import ConfigError

MAX_LOGITS_PROCESSORS = 32
_FIELD = "logits_processors"
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_ALLOWED = f"a list of at most {MAX_LOGITS_PROCESSORS} classes as module:Class, each once"


def name_logits_processors(given: Sequence[str | type] | None) -> tuple[str, ...]:
    """The names of classes or of names. Raises ConfigError for what a worker could not import."""
    if given is None:
        return ()
    if isinstance(given, (str, type)) or not isinstance(given, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(_FIELD, given, _ALLOWED)
    names = tuple(_name_of(one) for one in given)
    if len(names) > MAX_LOGITS_PROCESSORS or len(set(names)) < len(names):
        raise ConfigError(_FIELD, list(names), _ALLOWED)
    return names


def find_module_folders(names: Iterable[str]) -> tuple[str, ...]:
    """The folders in which the modules lie, as this process would find them, or in the current folder.

    A worker does not look where its frontend's script lies, nor in the current folder. Raises ConfigError.
    """
    return tuple(dict.fromkeys(folder for name in names for folder in _find_folders(name)))


def find_module_files(names: Iterable[str], folders: Iterable[str]) -> list[str]:
    """The files of the modules themselves, as far as they are Python's sources; not of what these import."""
    stems = {name.partition(":")[0].replace(".", "/") for name in names}
    files = [
        Path(folder, stem + end) for folder in folders for stem in stems for end in (".py", "/__init__.py")
    ]
    return sorted(str(file) for file in files if file.is_file())


def _name_of(one: str | type) -> str:
    if not isinstance(one, type):
        if not isinstance(one, str) or not _NAME.fullmatch(one):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(_FIELD, one, _ALLOWED)
        return _check_module(one, one)
    name = f"{one.__module__}:{one.__qualname__}"
    if not _NAME.fullmatch(name):
        raise ConfigError(_FIELD, one, "a class at the top of a module, not one made in a function")
    return _check_module(name, one)


def _check_module(name: str, given: object) -> str:
    if name.startswith("__main__:"):
        allowed = "a class of a module that can be imported: the script itself is not run again in a worker"
        raise ConfigError(_FIELD, given, allowed)
    return name


def _find_folders(name: str) -> list[str]:
    top = name.partition(":")[0].partition(".")[0]
    spec = _find_spec(top)
    if spec is None:
        where = f"a class of a module that is installed, in PYTHONPATH or in {os.getcwd()}"
        raise ConfigError(_FIELD, name, f"{where}: there is no {top}")
    if spec.submodule_search_locations is not None:
        return [str(Path(folder).resolve().parent) for folder in spec.submodule_search_locations]
    return [str(Path(spec.origin).resolve().parent)] if spec.has_location and spec.origin else []


def _find_spec(top: str) -> ModuleSpec | None:
    try:
        found = importlib.util.find_spec(top)
    except ValueError:  # a module that was made in memory
        found = None
    return found or PathFinder.find_spec(top, [os.getcwd()])
