"""Finds the GGUF files that a user means: a file, a folder that has one, or a hub name with a tag.

`org/name:Q4_K_M` is the file of that repository whose name ends so, as llama.cpp and Ollama understand it; it
is taken from the hub's local cache where it is there.
"""

from __future__ import annotations

import re
from pathlib import Path

from ....ipc.errors import ModelError
from ..model_files import check_no_revision, download, is_address, strip_file_scheme

SUFFIX = ".gguf"
MAX_SPLITS = 1024
ALLOWED = "a file model.gguf, a folder with one, or a hub name or an address such as org/name:Q4_K_M"
_TAGGED = re.compile(r"(?P<name>[\w.-]+/[\w.-]+|.*):(?P<tag>[A-Za-z0-9_.-]{1,64})")
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def find_gguf_files(
    model: str, revision: str | None = None, field_name: str = "model", download_dir: str | None = None
) -> tuple[Path, ...]:
    """The file, or all parts of a split one in order; () where `model` names no GGUF model.

    Raises ModelError for a tag that several files have or none, a folder with several, and missing parts.
    """
    model = strip_file_scheme(model)
    if is_address(model) and model.lower().endswith(SUFFIX):
        address, _, file = model.rpartition("/")
        split = _SPLIT.fullmatch(file)
        pattern = file if split is None else f"{split['stem']}-*-of-{split['count']}{SUFFIX}"
        folder = download(address, revision, field_name, [pattern], ALLOWED, download_dir)
        return _complete(folder / file, field_name)
    try:
        path = Path(model).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError):  # find_model_folder says what is wrong with it
        return ()
    if is_file:
        check_no_revision(revision, field_name, model)
        return _complete(path.absolute(), field_name) if path.suffix.lower() == SUFFIX else ()
    if is_folder:
        check_no_revision(revision, field_name, model)
        has_others = any(path.glob("*.safetensors"))  # GGUF files may lie beside a config.json, too
        return () if has_others else _choose(path.absolute(), None, model, field_name)
    match = _TAGGED.fullmatch(model)
    if match is None:
        return ()
    name, tag = match["name"], match["tag"]
    folder = Path(name).expanduser()
    if folder.is_dir():
        check_no_revision(revision, field_name, model)
    else:
        if not is_address(name) and not _HUB_NAME.fullmatch(name):
            return ()
        patterns = [f"*{each}*{SUFFIX}" for each in dict.fromkeys((tag, tag.upper(), tag.lower()))]
        folder = download(name, revision, field_name, patterns, ALLOWED, download_dir)
    files = _choose(folder, tag, model, field_name)
    if not files:
        raise ModelError(field_name, model, f"{ALLOWED}; no file of it ends in {tag}{SUFFIX}")
    return files


def _choose(folder: Path, tag: str | None, model: str, field_name: str) -> tuple[Path, ...]:
    """The one model in a folder whose name ends with the tag; parts of a split one count as one."""
    files_by_stem: dict[str, Path] = {}
    for file in sorted(folder.rglob(f"*{SUFFIX}") if tag else folder.glob(f"*{SUFFIX}")):
        split = _SPLIT.fullmatch(file.name)
        stem = split["stem"] if split else file.stem
        is_meant = tag is None or re.search(rf"(^|[-._]){re.escape(tag)}$", stem, re.IGNORECASE)
        if is_meant and not stem.startswith("mmproj"):  # a vision model's other half
            files_by_stem.setdefault(stem, file)
    if len(files_by_stem) > 1:
        allowed = f"the name of one of {', '.join(files_by_stem)} ({ALLOWED})"
        raise ModelError(field_name, model, allowed)
    return tuple(each for file in files_by_stem.values() for each in _complete(file, field_name))


def _complete(file: Path, field_name: str) -> tuple[Path, ...]:
    split = _SPLIT.fullmatch(file.name)
    if split is None:
        return (file,)
    count = int(split["count"])
    if not 1 <= int(split["number"]) <= count <= MAX_SPLITS:
        raise ModelError(field_name, file.name, f"a part of 1 to {MAX_SPLITS}")
    parts = [file.with_name(f"{split['stem']}-{n:05}-of-{count:05}{SUFFIX}") for n in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(field_name, str(file), f"{count} parts; {len(missing)} are missing: {missing[0]}")
    return tuple(parts)
