"""How every way to end becomes an exit code and a last line, without starting anything."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from quire.frontend.cli import entry
from quire.frontend.cli.parser import ExitCode, Parser, UsageError, in_house_form, split_at_dashes
from quire.ipc.errors import ConfigError, EngineStartError


@pytest.fixture
def raising_command(monkeypatch: pytest.MonkeyPatch) -> type[ModuleType]:
    """A command 'fail' whose module raises what the class attribute `error` holds."""

    class Failing(ModuleType):
        error: BaseException = RuntimeError("unset")

        @staticmethod
        def run(_argv: list[str]) -> int:
            raise Failing.error

    monkeypatch.setitem(entry.COMMANDS, "fail", entry.Command("fails", ".failing_for_a_test"))
    monkeypatch.setitem(sys.modules, "quire.frontend.cli.commands.failing_for_a_test", Failing("failing"))
    return Failing


def chained() -> Exception:
    error = ValueError("outer")
    error.__cause__ = OSError("the disk is full")
    return error


@pytest.mark.parametrize(
    ("error", "code", "last_line"),
    [
        (ConfigError("dtype", "x", "float32"), ExitCode.USAGE, "quire: error: dtype='x': expected float32"),
        (EngineStartError("no worker"), ExitCode.FAILED, "quire: error: no worker"),
        (chained(), ExitCode.FAILED, "quire: error: OSError: the disk is full"),
    ],
)
def test_an_error_ends_with_its_root_cause_on_the_last_line(
    error: Exception,
    code: ExitCode,
    last_line: str,
    raising_command: type[ModuleType],
    capsys: pytest.CaptureFixture[str],
) -> None:
    raising_command.error = error  # type: ignore[attr-defined]
    assert entry.run_command(["fail"]) == code
    assert capsys.readouterr().err.splitlines()[-1] == last_line


def test_ctrl_c_is_exit_code_130_without_a_traceback(
    raising_command: type[ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    raising_command.error = KeyboardInterrupt()  # type: ignore[attr-defined]
    assert entry.run_command(["fail"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("argument --max-tokens: invalid int value: '1x'", "max_tokens='1x': expected an integer"),
        ("argument -t/--top-p: invalid float value: 'x'", "top_p='x': expected a number"),
        ("argument --dtype: invalid choice: 'a' (choose from 'b', 'c')", "dtype='a': expected one of b, c"),
        ("argument --dtype: invalid choice: 'a' (choose from b, c)", "dtype='a': expected one of b, c"),
        ("argument --model: expected one argument", "--model: expected one argument"),
        ("something else", "something else"),
    ],
)
def test_argparse_errors_are_put_in_the_house_form(message: str, expected: str) -> None:
    assert in_house_form(message) == expected


def test_options_may_stand_between_prompts_and_dashes_end_them() -> None:
    parser = Parser("quire x", "for a test")
    parser.add_argument("prompt", nargs="*")
    parser.add_argument("--n", type=int)
    words, literal = split_at_dashes(["a", "--n", "3", "b", "--", "--n", "-c"])
    options = parser.parse(words)
    assert (options.prompt, options.n, literal) == (["a", "b"], 3, ["--n", "-c"])


def test_options_are_not_abbreviated() -> None:
    parser = Parser("quire x", "for a test")
    parser.add_argument("--max-tokens", type=int)
    with pytest.raises(UsageError, match="--max: not an option of 'quire x', see quire x --help"):
        parser.parse(["--max", "3"])


def test_vllms_names_of_commands_are_known(
    raising_command: type[ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(entry.ALIASES, "collect-fail", "fail")
    raising_command.error = SystemExit(0)  # type: ignore[attr-defined]
    assert entry.run_command(["collect-fail"]) == 0
    assert entry.run_command(["collect-envs"]) == ExitCode.USAGE
    assert "did you mean 'collect-env'?" in capsys.readouterr().err
    assert set(entry.ALIASES.values()) <= set(entry.COMMANDS)
