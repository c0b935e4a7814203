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


def name_logits_processors(processors: Sequence[str | type] | None) -> tuple[str, ...]:
    """The names of classes or of names. Raises ConfigError for what a worker could not import."""
    if processors is None:
        return ()
    if isinstance(processors, (str, type)) or not isinstance(processors, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(_FIELD, processors, _ALLOWED)
    names = tuple(_name_of(processor) for processor in processors)
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


def _name_of(processor: str | type) -> str:
    if not isinstance(processor, type):
        if not isinstance(processor, str) or not _NAME.fullmatch(processor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(_FIELD, processor, _ALLOWED)
        return _check_module(processor, processor)
    name = f"{processor.__module__}:{processor.__qualname__}"
    if not _NAME.fullmatch(name):
        raise ConfigError(_FIELD, processor, "a class at the top of a module, not one made in a function")
    return _check_module(name, processor)


def _check_module(name: str, processor: object) -> str:
    if name.startswith("__main__:"):
        allowed = "a class of a module that can be imported: the script itself is not run again in a worker"
        raise ConfigError(_FIELD, processor, allowed)
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
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module that was made in memory
        spec = None
    return spec or PathFinder.find_spec(top, [os.getcwd()])
