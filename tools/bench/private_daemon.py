"""A daemon for one measurement, as `quire daemon start` makes it, where nobody else's is."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from typing import Any

from ...frontend.daemon import start_daemon, stop_daemon
from ...frontend.options.engine_args import EngineArgs


@contextlib.contextmanager
def run_private_daemon(name: str, model: str, **changes: Any) -> Generator[None]:
    """Run it while entered; `changes`: of EngineArgs. Processes that are started meanwhile find it by name,
    this one too.
    """
    names = ("XDG_RUNTIME_DIR", "XDG_STATE_HOME")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="q") as folder:
        os.environ |= dict.fromkeys(names, folder)
        try:
            fields: dict[str, Any] = {"model": model, "scheduling_policy": "fair"}
            config = EngineArgs(**fields | changes).create_engine_config()
            start_daemon(name, config)
            try:
                yield
            finally:
                stop_daemon(name)
        finally:
            for variable, value in before.items():
                os.environ.pop(variable)
                if value is not None:
                    os.environ[variable] = value
