"""The command's frame, without an engine: what is printed where, and exit codes.

In real processes but for the many kinds of bad input, which take a tenth of the time in this one.
"""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from quire.frontend.cli import streams
from quire.frontend.cli.commands import daemon, doctor
from quire.frontend.cli.entry import COMMANDS, run_command
from quire.tools.bench import cli as bench
from refusals import Refusal, refusals, run_refused

HELPED = [
    *([name] for name in COMMANDS),
    *(["daemon", name] for name in daemon._COMMANDS),
    *(["bench", name] for name in bench._KINDS),
]


@refusals("command_lines")
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    refusal.check(lambda arguments: run_refused(arguments, capsys))


def test_a_folder_without_config_json_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["generate", "--model", str(tmp_path), "x"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"quire: error: model='{tmp_path}': ")
    assert "config.json" in errors


@pytest.mark.parametrize("flag", ["--version", "-V", "version"])
def test_the_version_is_printed_alone(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    import quire

    assert run_command([flag]) == 0
    assert capsys.readouterr().out == f"quire {quire.__version__}\n"


def test_help_lists_every_command_and_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help"]) == 0
    out = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"{name:<10} {command.summary}" in out


@pytest.mark.parametrize("words", HELPED, ids=" ".join)
def test_every_command_has_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = run_command([*words, "--help"])
    except SystemExit as end:  # how argparse leaves after its help
        code = end.code
    assert code == 0
    assert capsys.readouterr().out.startswith(f"usage: quire {' '.join(words)} ")


def test_without_a_command_help_is_printed_and_the_exit_code_is_2() -> None:
    command = [sys.executable, "-m", "quire"]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout.startswith("usage: quire COMMAND")


def test_a_reader_that_leaves_is_not_an_error_to_complain_about() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "quire", "--help"],
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_closed_standard_output_is_answered_as_a_reader_that_left() -> None:
    command = [sys.executable, "-m", "quire", "generate", "x"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (141, b"", b"")


def test_a_closed_standard_input_is_answered_as_an_empty_pipe() -> None:
    command = [sys.executable, "-m", "quire", "chat"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *command], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "quire: error: message='': expected a text piped in, or a terminal to chat at\n"


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-"])
def test_a_closed_standard_error_prevents_nothing(closed: str, tmp_path: Path) -> None:
    script = tmp_path / "quire"  # with what a command needs of standard error: its progress, a child, a log
    script.write_text(
        "import sys\nfrom quire.frontend.cli.entry import run_command\n"
        "from quire.frontend.cli.streams import PhaseLine\nimport quire.frontend.cli.commands.ps as ps\n"
        "def run(argv):\n    PhaseLine('x').show('y'); print(open(0).read(), 'done'); return 0\n"
        "ps.run = run\nsys.exit(run_command(['ps']))\n"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, str(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, " done\n")


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_bytes_that_are_no_text_are_refused(locale: str) -> None:
    command = [sys.executable, "-m", "quire", "chat"]
    environment = os.environ | {"LC_ALL": locale, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, input=b"a\xffb", capture_output=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"quire: error: message=b'\\xffb': expected a text in UTF-8\n"


def test_the_script_of_pyproject_is_the_commands_main() -> None:
    script = Path(sys.executable).with_name("quire")
    if not script.exists():
        pytest.skip("quire is not installed in this environment")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("quire ")


def test_what_is_piped_in_without_end_is_refused_with_the_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(streams, "MAX_PIPED_LENGTH", 1000)
    for command in ("generate", "chat"):
        with open("/dev/zero") as endless:
            monkeypatch.setattr("sys.stdin", endless)
            assert run_command([command]) == 2
        assert "at most 1000 characters piped in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "is_buffered"),
    [
        (["doctor"], True),
        *itertools.product([["--help"], ["ps"], *([*words, "--help"] for words in HELPED)], [True, False]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_output_for_which_there_is_no_room_is_one_line_of_error(
    words: list[str], is_buffered: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PARTS", {"pocket models": doctor.check_pocket_models})  # the cheapest
    with open_full(is_buffered) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run_command(words) == 1
    assert capsys.readouterr().err == "quire: error: No space left on device\n"


def open_full(is_buffered: bool) -> io.TextIOWrapper:
    return io.TextIOWrapper(open("/dev/full", "wb", buffering=-1 if is_buffered else 0), write_through=True)


def test_full_streams_end_a_command_with_its_code_and_not_with_the_interpreters() -> None:
    command = [sys.executable, "-m", "quire", "xyz"]
    with open("/dev/full", "w") as full:
        for stdout in (subprocess.DEVNULL, full):
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=full, timeout=60)
            assert done.returncode == 2
        done = subprocess.run([*command[:-1], "--help"], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"quire: error: No space left on device\n")


def test_a_server_goes_on_when_nobody_can_read_what_it_says() -> None:
    script = (
        "import sys; from quire.frontend.cli import entry; from quire.frontend.cli.commands import serve\n"
        "line = serve.PhaseLine('', True)\n"
        "def run(argv): line.show('x'); serve._announce('ready'); line.end(); return 0\n"
        "serve.run = run; sys.exit(entry.run_command(['serve']))"
    )
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as unread, open("/dev/full", "w") as full:
        for stream in (unread, full):
            done = subprocess.run([sys.executable, "-c", script], stdout=stream, stderr=stream, timeout=60)
            assert done.returncode == 0
