"""Shells complete what the commands' parsers take."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from quire.frontend.cli.commands import daemon
from quire.frontend.cli.entry import COMMANDS, run_command

pytest.importorskip("argcomplete")


def write(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run_command(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("quire ", list(COMMANDS)),
        ("quire se", ["serve"]),
        ("quire daemon ", list(daemon._COMMANDS)),
        ("quire bench off", ["offline"]),
        ("quire serve --max-model", ["--max-model-len"]),
        ("quire daemon start --scheduling", ["--scheduling-policy"]),
        ("quire serve --dtype bf", ["bfloat16"]),
        ("quire ps --", ["--help", "--json"]),
        ("quire generate --fault", []),
        ("quire nonsense --", ["--help"]),
    ],
)
def test_bash_completes_commands_options_and_values(line: str, words: list[str], tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    question = {
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
    }
    done = subprocess.run([sys.executable, "-m", "quire"], env=os.environ | question, timeout=60)
    assert done.returncode == 0
    assert sorted(answer.read_text().split()) == sorted(words)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_read_their_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = write(shell, capsys)
    done = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_shell_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["completion", "tcsh"]) == 2
    assert "bash, zsh, fish" in capsys.readouterr().err
