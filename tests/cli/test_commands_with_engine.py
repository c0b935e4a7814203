"""`quire generate` and `quire chat` for real: processes, the pocket model, pipes, a terminal and Ctrl-C.

What is about neither processes nor a terminal is called in this one, over the same daemon.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from daemons import Daemon, runtime_folders
from quire.frontend.cli.entry import run_command
from quire.frontend.models.model_folder import pocket_folder
from quire.frontend.options.engine_args import EngineArgs

NAME = "shared"
COMMAND = [sys.executable, "-m", "quire"]
TIMEOUT_S = 60.0


# The same with fake workers, which generate for as long as they are let, slowly.
ENDLESS_COMMAND = [sys.executable, "-m", "fake_quire"]
ENDLESS = ("--served-model-name", "slow")
ANSWERED = 20  # characters, more than a terminal shows of anything but an answer


class Done(NamedTuple):
    """How a command has ended."""

    returncode: int
    stdout: str
    stderr: str


RunQuire = Callable[..., Done]


@pytest.fixture
def run_quire(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunQuire:
    """Calls a command in this process; `stdin` is what is piped into it."""

    def run(*arguments: str, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = run_command(arguments)
        out, errors = capsys.readouterr()
        return Done(code, out, errors)

    return run


@pytest.fixture(scope="module")
def attach() -> Iterator[tuple[str, str]]:
    """The option that spares a command its own engine, where it is about something else."""
    with runtime_folders(), Daemon(NAME, EngineArgs(max_model_len=512).create_engine_config()):
        yield "--attach", NAME


def test_a_story_is_printed_with_its_beginning_and_ends_by_itself(
    run_quire: RunQuire, attach: tuple[str, str]
) -> None:
    done = run_quire("generate", *attach, "Once upon a time", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("Once upon a time")
    assert done.stdout.endswith("\n")
    assert len(done.stdout.split()) > 20


def test_json_lines_of_several_prompts_are_in_order_and_a_seed_repeats_them(
    run_quire: RunQuire, attach: tuple[str, str]
) -> None:
    options = ("--json", "--seed", "7", "--max-tokens", "12")
    arguments = ["generate", *attach, *options, "Once upon a time", "One day"]
    first, second = run_quire(*arguments), run_quire(*arguments)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    lines = [json.loads(line) for line in first.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["Once upon a time", "One day"]
    assert all(line["completion_tokens"] <= 12 and line["text"] for line in lines)
    assert {line["finish_reason"] for line in lines} <= {"length", "stop"}


@pytest.mark.parametrize("command", ["generate", "chat", "top --once", "ps"])
def test_a_text_for_which_there_is_no_room_ends_with_the_cause(command: str, attach: tuple[str, str]) -> None:
    options = () if command == "ps" else attach
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *command.split(), *options],
            input="hello",
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert (done.returncode, done.stderr) == (1, "quire: error: No space left on device\n")


def test_a_pipe_is_one_prompt_and_a_stop_text_is_cut_off(
    run_quire: RunQuire, attach: tuple[str, str]
) -> None:
    done = run_quire(
        "generate", *attach, "--temperature", "0", "--no-echo", "--stop", ".", stdin="Once upon a time\n"
    )
    assert done.returncode == 0, done.stderr
    assert "." not in done.stdout
    assert done.stdout.strip()


def test_a_sum_that_is_piped_into_chat_is_answered(run_quire: RunQuire, attach: tuple[str, str]) -> None:
    done = run_quire("chat", *attach, "--verbose", stdin="What is 12 plus 30?\n")
    assert done.returncode == 0, done.stderr
    assert "42" in done.stdout
    assert "tokens in" in done.stderr


def test_a_message_can_be_an_option_as_vllm_has_it(run_quire: RunQuire, attach: tuple[str, str]) -> None:
    done = run_quire("chat", *attach, "--system-prompt", "Be kind.", "-q", "What is 12 plus 30?")
    assert (done.returncode, done.stderr) == (0, "")
    assert "42" in done.stdout
    done = run_quire("complete", *attach, "--temperature", "0", "--max-tokens", "4", "--quick", "Once upon")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Once upon")
    done = run_quire("chat", "model-a", "--model", "model-b", "-q", "Hi")
    assert (done.returncode, "model='model-a, model-b'" in done.stderr) == (2, True)


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(
    run_quire: RunQuire, attach: tuple[str, str]
) -> None:
    done = run_quire("generate", *attach, stdin="Once upon a time there was a cat. " * 100)
    assert done.returncode == 2
    assert re.search(r"'\d{3,4} tokens': expected at most 511", done.stderr)
    assert "512" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def fake_modules_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children find fake_process.py."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pocket model without an end-of-sequence token: a fake worker goes on until somebody stops it."""
    folder = tmp_path_factory.mktemp("models") / "endless"
    shutil.copytree(pocket_folder(), folder)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    return folder


@pytest.mark.usefixtures("fake_modules_path")
def test_ctrl_c_ends_generation_quickly_and_leaves_no_process(endless_model: Path) -> None:
    prompts, limits = [f"Story {number}:" for number in range(64)], ("--max-tokens", "100000")
    process = subprocess.Popen(
        [
            *ENDLESS_COMMAND,
            "generate",
            "--model",
            str(endless_model),
            *ENDLESS,
            "--stream",
            *limits,
            *prompts,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    process.stdout.read(1)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2, "a core and a worker"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    _, alive = psutil.wait_procs(children, timeout=3.0)
    assert not alive


class TerminalChat:
    """`quire chat` at a pseudo-terminal."""

    def __init__(self, *arguments: str, term: str = "dumb", command: Sequence[str] = COMMAND) -> None:
        self.process_id, self._fd = pty.fork()
        if self.process_id == 0:
            os.environ["TERM"] = term
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a run under nohup begins with it ignored
            os.execv(sys.executable, [*command, "chat", *arguments])
        self.output = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode(errors="surrogateescape"))

    def read_until(self, wanted: str, since: int) -> str:
        """All output after position `since`, as soon as `wanted` is in it."""
        deadline = time.monotonic() + TIMEOUT_S
        while wanted not in self.output[since:]:
            ready, _, _ = select.select([self._fd], [], [], deadline - time.monotonic())
            assert ready, f"{wanted!r} did not come: {self.output!r}"
            try:
                self.output += os.read(self._fd, 65536).decode(errors="replace")
            except OSError:
                break
        return self.output[since:]

    def wait_for_output(self, since: int) -> None:
        """Until there is some after position `since`."""
        while len(self.output) <= since:
            ready, _, _ = select.select([self._fd], [], [], TIMEOUT_S)
            assert ready, f"nothing came: {self.output!r}"
            self.output += os.read(self._fd, 65536).decode(errors="replace")

    def press_ctrl_c_until(self, wanted: str) -> None:
        """At a prompt. Python forgets a signal that comes between its prompt and its wait for a key."""
        since, deadline = len(self.output), time.monotonic() + TIMEOUT_S
        while wanted not in self.output[since:]:
            assert time.monotonic() < deadline, self.output
            self.type("\x03")
            while select.select([self._fd], [], [], 0.2)[0]:
                self.output += os.read(self._fd, 65536).decode(errors="replace")

    def hang_up(self) -> int:
        """Close its window, which sends SIGHUP; its status."""
        os.close(self._fd)
        deadline = time.monotonic() + TIMEOUT_S
        while not (ended := os.waitpid(self.process_id, os.WNOHANG))[0]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return os.waitstatus_to_exitcode(ended[1])

    def wait(self) -> int:
        self.read_until("\0 never printed", len(self.output))
        _, status = os.waitpid(self.process_id, 0)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")  # the child execs
def test_a_conversation_at_a_terminal(attach: tuple[str, str]) -> None:
    chat = TerminalChat(*attach, "--temperature", "0")
    chat.read_until(">>> ", 0)
    for typed, wanted in [
        ("/set tempera 1\n", "did you mean 'temperature'?"),
        ("/set temperature 9\n", "temperature=9.0: expected a number from 0 to 2"),
        ("/nothing\n", "/nothing: not a command"),
        ("\udcff no text\n", "\n"),
        ("/reset\n", "forgotten"),
        ('"""What is\n12 plus 30?"""\n', "42"),
        ("/show\n", "2 messages"),
        ("\x10\n", "2 messages"),  # Ctrl-P is the line before, where there is a history
        ("/reset\n", "forgotten"),
    ]:
        since = len(chat.output)
        chat.type(typed)
        chat.read_until(wanted, since)
        chat.read_until(">>> ", since + len(typed))
    chat.press_ctrl_c_until("Ctrl-D or /bye leaves")
    chat.type("\x04")
    assert chat.wait() == 0


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_what_is_typed_is_completed_pasted_whole_and_there_in_the_next_chat(attach: tuple[str, str]) -> None:
    pasted = "\n".join(f"line {number} of a text that is pasted, 日本" for number in range(2500))
    chat = TerminalChat(*attach, "--temperature", "0", term="xterm")
    chat.read_until(">>> ", 0)
    for typed, wanted in [
        ("/set tempe\t0.5\r", ">>> "),
        (f"\x1b[200~{pasted}\x1b[201~\r", "at most 511"),  # a hundred kilobytes, refused as one message
        ("/set max_tokens 3\r", ">>> "),
        ("What is \\\r", "... "),
        ("12 plus 30?\r", "(cut: max_tokens=3)"),
        ("/show\r", "2 messages"),
    ]:
        since = len(chat.output)
        chat.type(typed)
        chat.read_until(wanted, since)
        chat.read_until(">>> " if wanted != "... " else wanted, since + len(wanted))
    assert chat.hang_up() == -signal.SIGHUP
    chat = TerminalChat(*attach, term="xterm")
    chat.read_until(">>> ", 0)
    for wanted in ("/show", "12 plus 30?", "What is", "max_tokens 3", "temperature 0.5"):  # nothing pasted
        since = len(chat.output)
        chat.type("\x10")
        chat.read_until(wanted, since)
    chat.type("\x15\x04")
    assert chat.wait() == 0


@pytest.mark.usefixtures("fake_modules_path")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_ctrl_c_stops_an_answer_and_not_the_chat_however_often_it_is_pressed(endless_model: Path) -> None:
    chat = TerminalChat("--model", str(endless_model), *ENDLESS, "--verbose", command=ENDLESS_COMMAND)
    chat.read_until(">>> ", 0)
    since = len(chat.output)
    typed = "Tell me a story.\r\n"
    chat.type(typed.replace("\r", ""))
    chat.wait_for_output(since + len(typed) + ANSWERED)
    chat.type("\x03")
    after = chat.read_until(">>> ", since)
    num_tokens = int(re.search(r"(\d+) out", after)[1])  # type: ignore[index]
    assert 0 < num_tokens < 2000, "it ended by itself, so nothing was stopped"
    since = len(chat.output)
    chat.type(typed.replace("\r", ""))
    chat.wait_for_output(since + len(typed) + ANSWERED)
    chat.type("\x03\x03\x03")
    chat.read_until(">>> ", since)
    chat.press_ctrl_c_until("Ctrl-D or /bye leaves")
    chat.type("/bye\n")
    assert chat.wait() == 0
