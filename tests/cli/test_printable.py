"""No name that a person is shown steers the terminal: of models, requests, clients, files."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from quire.frontend.cli.entry import run_command
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.errors import ConfigError
from quire.ipc.processes.log_lines import TextLines

ESCAPE = "\x1b]0;title\x07"
# `quire` over a core with a fake worker.
FAKE = """
import sys
from quire.frontend.cli.entry import run_command
from quire.frontend.client import engines
engines.CORE_MODULE = "fake_core"
sys.exit(run_command())
"""


def test_a_served_name_is_printable() -> None:
    with pytest.raises(ConfigError, match=r"served_model_name=.* printable"):
        EngineArgs(served_model_name=["fine", f"a{ESCAPE}"]).create_engine_config()


def test_an_error_shows_a_files_name_without_what_steers_a_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_command(["generate", "--model", str(tmp_path / f"m{ESCAPE}"), "Hi"]) != 0
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "m?]0;title?" in said or "m\\x1b]0;title" in said


def test_a_line_of_the_log_shows_none_either() -> None:
    record = logging.makeLogRecord({"msg": "loaded %s\nfrom here", "args": (f"m{ESCAPE}",)})
    assert TextLines("quire: %(message)s").format(record) == "quire: loaded m?]0;title?\nfrom here"


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
)
def test_what_the_terminal_cannot_write_is_written_as_its_escape(environment: dict[str, str]) -> None:
    options = ["--max-tokens", "1", "--num-gpu-blocks-override", "64", "--max-model-len", "256"]
    command = [sys.executable, "-c", FAKE, "generate", "Za\u017c\u00f3\u0142\u0107 \u6f22", *options]
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    done = subprocess.run(command, capture_output=True, timeout=100, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"Za\\u017c\\xf3\\u0142\\u0107 \\u6f22")
