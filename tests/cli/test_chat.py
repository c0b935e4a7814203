"""The chat's loop and its settings, with a fake session in place of an engine."""

from __future__ import annotations

import argparse
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from chat_fakes import ChatUser, FakeSession, make_conversation
from quire.frontend.cli.chat import conversation as conversation_module
from quire.frontend.cli.chat.answer_printer import can_dim
from quire.frontend.cli.chat.conversation import AnswerRates, interrupts_noted
from quire.frontend.cli.sampling_options import add_sampling_options, read_sampling_options
from quire.frontend.events import ReasoningDelta
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.ipc.errors import SamplingParamsError
from quire.ipc.params.sampling_params import SAMPLING_FIELDS
from quire.ipc.params.structured_outputs import StructuredOutputsParams


def press_ctrl_c_at(monkeypatch: pytest.MonkeyPatch, printed: str) -> None:
    """On a terminal, when this is printed; nothing is."""

    def print_and_press(text: str = "", **_options: Any) -> None:
        if text == printed:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(conversation_module.sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.print", print_and_press)


def test_a_conversation_is_sent_whole_with_the_system_message_first(user: ChatUser) -> None:
    session = FakeSession(["Hel", "lo"])
    out = user.type(make_conversation(session, "Be kind."), "Hi", "", "More", "/bye")
    assert [message["role"] for message in session.asked[1]] == ["system", "user", "assistant", "user"]
    assert session.asked[1][2]["content"] == "Hello"
    assert out.count("Hello\n") == 2


def test_several_lines_in_quotes_are_one_message(user: ChatUser) -> None:
    session = FakeSession(["ok"])
    user.type(make_conversation(session), '"""one', "two", '  three"""', EOFError())
    assert session.asked[0][0]["content"] == "one\ntwo\n  three"


def test_ctrl_c_at_the_prompt_does_not_leave_and_ctrl_d_does(user: ChatUser) -> None:
    session = FakeSession(["ok"])
    out = user.type(make_conversation(session), KeyboardInterrupt(), "Hi", EOFError())
    assert "Ctrl-D or /bye leaves" in out
    assert len(session.asked) == 1


def test_a_setting_holds_for_later_answers_and_a_bad_one_changes_nothing(user: ChatUser) -> None:
    session = FakeSession(["ok"])
    typed = ["Hi", "/set temperature 0.5", "/set top_p 7", "/set seed x", "/set seed", "Hi", "/bye"]
    out = user.type(make_conversation(session), *typed)
    first, second = session.params
    assert (first.temperature, first.max_tokens) == (0.0, None)
    assert (second.temperature, second.top_p, second.top_k) == (0.5, 1.0, 20)
    assert "top_p=7.0: expected a number from 0 to 1" in out
    assert "seed='x': expected an integer" in out
    assert "seed='': expected /set seed VALUE" in out


def test_a_conversation_that_became_too_long_is_told_and_can_be_forgotten(user: ChatUser) -> None:
    session = FakeSession(["ok"])
    out = user.type(make_conversation(session), "a", "b", "c", "/reset", "d", "/bye")
    assert "at most 4 (/clear starts anew)" in out
    assert [len(messages) for messages in session.asked] == [1, 3, 1]


def test_ctrl_c_ends_the_answer_and_keeps_what_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession([f"{number} " for number in range(10)])
    conversation = make_conversation(session)
    press_ctrl_c_at(monkeypatch, "2 ")
    conversation.answer("Count.")
    assert session.num_sent == 3
    conversation.answer("Go on.")
    assert session.asked[1][1] == {"role": "assistant", "content": "0 1 2 "}


def test_a_second_ctrl_c_leaves_an_answer_that_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_module.sys.stdin, "isatty", lambda: True)
    before = signal.getsignal(signal.SIGINT)

    def press_twice() -> None:
        with interrupts_noted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_quoted_message_is_never_a_command(user: ChatUser) -> None:
    session = FakeSession(["ok"])
    out = user.type(make_conversation(session), '"""/bye"""', "/rest", "/etc/passwd", "/bye")
    assert [messages[-1]["content"] for messages in session.asked] == ["/bye"]
    assert "/rest: not a command, did you mean '/reset'?" in out
    assert "/etc/passwd: not a command" in out
    assert "begins a message with a slash" in out


def test_a_setting_can_be_taken_back_and_show_says_what_is_set(user: ChatUser) -> None:
    session = FakeSession(["ok"])
    typed = ["/set max_tokens 5", "/set temperature 0.5", "/set system Be very kind.", "Hi", "/show"]
    typed += ["/set max_tokens default", "/set system default", "/set top_k default", "Hi", "/bye"]
    out = user.type(make_conversation(session), *typed)
    first, second = session.params
    assert (first.max_tokens, second.max_tokens, second.top_k) == (5, None, 20)
    assert session.asked[0][0] == {"role": "system", "content": "Be very kind."}
    assert session.asked[1][0]["role"] == "user"
    assert "2 messages, " in out
    assert " of 64 tokens" in out
    shown = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.strip()}
    assert (shown["model"], shown["system"], shown["max_tokens"]) == ("fake", "Be very kind.", "5 (set)")
    assert (shown["top_k"], shown["seed"]) == ("20", "-")


def test_a_failed_answer_is_told_and_not_remembered(user: ChatUser) -> None:
    session = FakeSession(["some ", "fail"])
    conversation = make_conversation(session)
    out = user.type(conversation, "Hi", "/bye")
    assert "the step failed" in out
    assert conversation.num_messages == 0


def test_a_second_ctrl_c_stops_an_answer_that_does_not_move_and_not_the_chat(user: ChatUser) -> None:
    session = FakeSession(["hang"])
    out = user.type(make_conversation(session), "Hi", "/help", "/bye")
    assert "stopped; Ctrl-D or /bye leaves" in out
    assert "/clear, /reset        forget the conversation" in out


def test_thinking_can_be_set_and_taken_back(user: ChatUser) -> None:
    session = FakeSession(["ok"])
    typed = ["/set think no", "Hi", "/show", "/set think maybe", "/set think default", "Hi", "/bye"]
    out = user.type(make_conversation(session), *typed)
    assert session.thinking == [False, None]
    assert re.search(r"^think +no$", out, re.MULTILINE)
    assert "think='maybe': expected yes or no" in out


def test_what_is_beside_the_answer_is_dimmed_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conversation_module.sys.stderr, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    make_conversation(FakeSession([[ReasoningDelta("Hm.")], "Yes."])).answer("Is it?")
    assert capsys.readouterr() == ("Yes.\n", "\x1b[2mHm.\x1b[0m\n")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not can_dim(conversation_module.sys.stderr)


def test_an_answer_that_was_cut_says_so_and_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    session = FakeSession(["a", "b"])
    session.finish_reason = "length"
    conversation = make_conversation(session)
    conversation.set_field("max_tokens", 2)
    conversation.answer("Hi")
    assert capsys.readouterr() == ("ab\n", "(cut: max_tokens=2)\n")
    conversation.set_field("max_tokens", None)
    conversation.answer("Hi")
    assert capsys.readouterr().err == "(cut: the model's 64 tokens are used up)\n"
    session.finish_reason = "abort"
    conversation.reset()
    conversation.answer("Hi")
    assert capsys.readouterr().err == "(cut: somebody has cancelled it)\n"


def test_a_stopped_answer_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = FakeSession(["a", "b"])
    conversation = make_conversation(session)
    monkeypatch.setattr(conversation_module.sys.stdin, "isatty", lambda: True)
    session.on_word = lambda: signal.raise_signal(signal.SIGINT)
    conversation.answer("Hi")
    assert capsys.readouterr() == ("a\n", "(stopped)\n")


def test_a_terminal_gets_no_control_characters_and_a_file_what_was_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\x1b]52;c;eA==\x07b\r\n\tc\x9bd\x7f"
    make_conversation(FakeSession([text])).answer("Hi")
    assert capsys.readouterr().out == text + "\n"
    monkeypatch.setattr(conversation_module.sys.stdout, "isatty", lambda: True)
    make_conversation(FakeSession([text])).answer("Hi")
    assert capsys.readouterr().out == "a␛]52;c;eA==␇b\n\tc\ufffdd␡\n"


def test_rates_leave_out_cached_tokens_and_the_wait_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 11.5])
    monkeypatch.setattr(conversation_module.time, "perf_counter", lambda: next(clock))
    rates = AnswerRates()
    for tokens in ([1], [2, 3, 4]):
        output = RequestOutput("id", None, [1] * 30, None, [CompletionOutput(0, "x", tokens)], False)
        output.num_cached_tokens = 10
        rates.take(output)
    assert rates.describe() == (
        "[30 tokens in, 10 cached, 40 tokens/s; first token after 0.500 s; 4 out, 3 tokens/s]"
    )


def test_the_output_can_be_a_schema_a_regular_expression_or_a_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_sampling_options(parser)

    def read(*words: str) -> StructuredOutputsParams:
        return read_sampling_options(parser.parse_args(words))["structured_outputs"]

    (tmp_path / "schema.json").write_text('{"type": "object"}')
    assert read("--json-schema", str(tmp_path / "schema.json")).json == '{"type": "object"}'
    assert read("--json-schema", ' {"type": "array"}').json == ' {"type": "array"}'
    assert read("--regex", "a+").regex == "a+"
    assert read("--choice", "yes", "--choice", "no").choice == ["yes", "no"]
    with pytest.raises(
        SamplingParamsError, match="--json-schema='nowhere': expected a JSON schema, or a file"
    ):
        read("--json-schema", "nowhere")
    with pytest.raises(SystemExit):
        read("--regex", "a", "--choice", "b")
    assert "--choice: not allowed with argument --regex" in capsys.readouterr().err


def test_every_number_of_one_sequence_is_an_option_and_can_be_set() -> None:
    parser = argparse.ArgumentParser()
    add_sampling_options(parser)
    numbers = [field for field in SAMPLING_FIELDS.values() if field.kind in (int, float)]
    names = {field.name for field in numbers} - {"n", "best_of", "logprobs", "prompt_logprobs"}
    words = [word for name in names for word in (f"--{name.replace('_', '-')}", "1")]
    assert read_sampling_options(parser.parse_args(words)) == dict.fromkeys(names, 1)
    conversation = make_conversation(FakeSession([]))
    for name in names:
        conversation.set_field(name, 1)
    assert conversation.sampling.keys() == names
