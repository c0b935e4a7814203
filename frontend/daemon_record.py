"""How a daemon was started, kept beside its log: what `quire daemon restart` starts when files have changed.

A supervisor starts cores of its own sources, for the model's files of then. For others it takes another
supervisor, and a config that is made anew. The requests of before end: other tokens must not follow theirs.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec

from ..ipc.daemon.private_folder import find_state_folder
from ..ipc.daemon.run_dir import find_named
from ..ipc.decoding import decode_json
from ..ipc.errors import DaemonError, FilesChangedError
from ..ipc.files.file_identity import NotedFiles, check_loaded, check_served
from ..ipc.processes.own_sources import find_other_version, find_versions, note_own_sources
from ..ipc.spec.config import EngineConfig


class DaemonRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one daemon was started with. `args` None: a program has started it, with a config of its own."""

    args: dict[str, Any] | None
    folder: str  # in which it was started, for paths in `args`
    listen: str | None
    keys: str | None
    model: str
    tokenizer: str
    noted: NotedFiles | None
    sources: str
    versions: dict[str, str]

    def find_change(self) -> str:
        """What is not as it was at the start, '' if all is."""
        try:
            check_loaded(self.noted, self.model, self.tokenizer)
            check_served(self.noted, self.model, self.tokenizer)
        except FilesChangedError as error:
            return str(error)
        if self.sources != note_own_sources().digest:
            return "Quire's own files have changed"
        change = find_other_version(self.versions)
        return "" if change is None else "{} is {} and {}".format(*change)

    def make_config(self, name: str) -> EngineConfig:
        """For the files that are there now. Raises DaemonError without `args`, or as create_engine_config."""
        if self.args is None:
            what = f"the daemon {name!r} was started by a program, which has to stop and start it"
            raise DaemonError(f"{what}: {self.find_change()}")
        from .options.engine_args import (
            EngineArgs,  # with all that a start needs, and a look at a daemon does not
        )

        with contextlib.chdir(self.folder):
            return EngineArgs(**self.args).create_engine_config()


def write_record(
    name: str, config: EngineConfig, args: dict[str, Any] | None, listen: str | None, keys: str | None
) -> None:
    """Have `read_record` find it. A daemon is no worse without it."""
    model = config.model
    record = DaemonRecord(
        args=args,
        folder=os.getcwd(),
        listen=listen,
        keys=keys,
        model=model.model,
        tokenizer=model.tokenizer,
        noted=model.noted,
        sources=note_own_sources().digest,
        versions=find_versions(),
    )
    path = _find_path(name)
    with contextlib.suppress(OSError, TypeError):  # a full disk; a class among the arguments
        new = path.with_name(f".{path.name}")
        new.write_bytes(msgspec.json.encode(record))
        new.replace(path)


def read_record(name: str) -> DaemonRecord | None:
    """Of the daemon that was started last under this name; None if there is none that can be read."""
    try:
        return decode_json(_find_path(name).read_bytes(), DaemonRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def forget_record(name: str) -> None:
    """The daemon was stopped: nobody wants it to be started anew."""
    with contextlib.suppress(OSError):
        _find_path(name).unlink()


def _find_path(name: str) -> Path:
    return find_state_folder() / f"{find_named(name).name}.start.json"
