"""Shells complete what the commands' parsers take."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from quire.frontend.cli.commands import daemon
from quire.frontend.cli.entry import COMMANDS, run_command
from quire.tools.bench import cli as bench


def write(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run_command(["completion", shell]) == 0
    return capsys.readouterr().out


def complete(script: str, *words: str) -> list[str]:
    """What bash offers for the last of the words after `quire`."""
    ask = f'COMP_WORDS=(quire "$@"); COMP_CWORD={len(words)}; _quire; echo "${{COMPREPLY[@]}}"'
    line = f"{script}\n{ask}"
    done = subprocess.run(["bash", "-c", line, "-", *words], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_options_and_values(capsys: pytest.CaptureFixture[str]):
    script = write("bash", capsys)
    assert complete(script, "") == list(COMMANDS)
    assert complete(script, "se") == ["serve"]
    assert complete(script, "daemon", "") == list(daemon._COMMANDS)
    assert complete(script, "bench", "off") == ["offline"]
    assert complete(script, "serve", "--max-model") == ["--max-model-len"]
    assert complete(script, "daemon", "start", "--scheduling") == ["--scheduling-policy"]
    assert complete(script, "serve", "--dtype", "bf") == ["bfloat16"]
    assert complete(script, "ps", "--") == ["--help", "--json"]
    assert complete(script, "generate", "--fault") == []


def test_every_command_is_in_every_script(capsys: pytest.CaptureFixture[str]):
    for shell in ("bash", "zsh", "fish"):
        script = write(shell, capsys)
        for name in (*COMMANDS, *daemon._COMMANDS, *bench._KINDS):
            assert name in script
        assert "enable-prefix-caching" in script


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(shell: str, capsys: pytest.CaptureFixture[str]):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run(
        [shell, "-n"], input=write(shell, capsys), text=True, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_another_shell_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]):
    assert run_command(["completion", "tcsh"]) == 2
    assert "bash, zsh, fish" in capsys.readouterr().err
