"""The chat's loop and its settings, with a fake session in place of an engine."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from typing import Any, cast

import pytest
from quire.frontend.cli import chat
from quire.frontend.cli.chat import Conversation, Terminal, interrupts_noted
from quire.frontend.cli.session import Session
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.ipc.errors import PromptError
from quire.ipc.sampling_params import SamplingParams


class FakeSession:
    """Answers every conversation with the words it was made with, and remembers what it was asked."""

    default_sampling: dict[str, Any] = {"top_k": 20}  # noqa: RUF012

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.asked: list[list[dict[str, str]]] = []
        self.params: list[SamplingParams] = []
        self.num_sent = 0

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        if len(messages) > 4:
            raise PromptError("prompt", "5 messages", "at most 4")
        self.asked.append(messages)
        return "rendered"

    def stream(self, _prompts: list[str], params: SamplingParams) -> Generator[tuple[int, RequestOutput]]:
        self.params.append(params)
        for number, word in enumerate(self.words, start=1):
            self.num_sent = number
            is_last = number == len(self.words)
            yield 0, RequestOutput("id", None, [1], None, [CompletionOutput(0, word, [number])], is_last)


def make_conversation(session: FakeSession, system: str | None = None) -> Conversation:
    return Conversation(cast(Session, session), {}, system, is_verbose=False)


def run_terminal(
    monkeypatch: pytest.MonkeyPatch, conversation: Conversation, typed: list[str | BaseException]
) -> int:
    lines: Iterator[str | BaseException] = iter(typed)

    def read_line(_prompt: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read_line)
    return Terminal(conversation).run()


def test_a_conversation_is_sent_whole_with_the_system_message_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = FakeSession(["Hel", "lo"])
    code = run_terminal(monkeypatch, make_conversation(session, "Be kind."), ["Hi", "", "More", "/bye"])
    assert code == 0
    assert [message["role"] for message in session.asked[1]] == ["system", "user", "assistant", "user"]
    assert session.asked[1][2]["content"] == "Hello"
    assert capsys.readouterr().out.count("Hello\n") == 2


def test_several_lines_in_quotes_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession(["ok"])
    run_terminal(monkeypatch, make_conversation(session), ['"""one', "two", '  three"""', EOFError()])
    assert session.asked[0][0]["content"] == "one\ntwo\n  three"


def test_ctrl_c_at_the_prompt_does_not_leave_and_ctrl_d_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = FakeSession(["ok"])
    assert run_terminal(monkeypatch, make_conversation(session), [KeyboardInterrupt(), "Hi", EOFError()]) == 0
    assert "Ctrl-D or /bye leaves" in capsys.readouterr().out
    assert len(session.asked) == 1


def test_a_setting_holds_for_later_answers_and_a_bad_one_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = FakeSession(["ok"])
    typed = ["Hi", "/set temperature 0.5", "/set top_p 7", "/set seed x", "/set seed", "Hi", "/bye"]
    run_terminal(monkeypatch, make_conversation(session), [*typed])
    first, second = session.params
    assert (first.temperature, first.max_tokens) == (0.0, None)
    assert (second.temperature, second.top_p, second.top_k) == (0.5, 1.0, 20)
    out = capsys.readouterr().out
    assert "top_p=7.0: a number from 0 to 1" in out
    assert "seed='x': an integer" in out
    assert "seed='': /set seed VALUE" in out


def test_a_conversation_that_became_too_long_is_told_and_can_be_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = FakeSession(["ok"])
    run_terminal(monkeypatch, make_conversation(session), ["a", "b", "c", "/reset", "d", "/bye"])
    assert "at most 4 (/reset starts anew)" in capsys.readouterr().out
    assert [len(messages) for messages in session.asked] == [1, 3, 1]


def test_ctrl_c_ends_the_answer_and_keeps_what_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession([f"{number} " for number in range(10)])
    conversation = make_conversation(session)
    monkeypatch.setattr(chat.sys.stdin, "isatty", lambda: True)

    def print_and_press(text: str = "", **_options: Any) -> None:
        if text == "2 ":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("builtins.print", print_and_press)
    conversation.answer("Count.")
    assert session.num_sent == 3
    conversation.answer("Go on.")
    assert session.asked[1][1] == {"role": "assistant", "content": "0 1 2 "}


def test_a_second_ctrl_c_leaves_an_answer_that_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat.sys.stdin, "isatty", lambda: True)
    before = signal.getsignal(signal.SIGINT)

    def press_twice() -> None:
        with interrupts_noted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert signal.getsignal(signal.SIGINT) is before
