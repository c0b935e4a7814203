"""What begins with a slash in a chat, with a fake session in place of an engine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from chat_fakes import ChatUser, FakeSession, make_conversation

FIVE_MESSAGES, THREE_MESSAGES = (
    msgspec.json.encode([{"role": "user", "content": "x"}] * number).decode() for number in (5, 3)
)


def test_retry_asks_again_and_keeps_the_old_answer_if_that_fails(user: ChatUser) -> None:
    session = FakeSession(["third"], ["first"], ["other"], ["fail"])
    conversation = make_conversation(session)
    typed = ["/retry", "Hi", "/retry", "/retry", "/retry", "/bye"]
    out = user.type(conversation, *typed)
    assert [messages[-1]["content"] for messages in session.asked] == ["Hi"] * 4
    assert [len(messages) for messages in session.asked] == [1] * 4
    assert conversation.messages[1]["content"] == "third"
    assert "/retry='': expected after a question" in out
    assert "the step failed" in out


def test_a_message_that_failed_can_be_asked_again(user: ChatUser) -> None:
    session = FakeSession(["ok"], ["one"], ["fail"])
    conversation = make_conversation(session)
    user.type(conversation, "One", "Two", "/retry", "/bye")
    assert [messages[-1]["content"] for messages in session.asked] == ["One", "Two", "Two"]
    assert [message["content"] for message in conversation.messages] == ["One", "one", "Two", "ok"]


def test_a_conversation_is_saved_and_loaded_with_what_was_set(user: ChatUser, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    conversation = make_conversation(FakeSession(["ok"]), "Be kind.")
    typed = [f"/save {path}", "Hi", "/set min_tokens 5", f"/save {path}", f"/save {path}", "/bye"]
    out = user.type(conversation, *typed)
    assert out.count(f"{path}: 2 messages") == 2
    other = make_conversation(FakeSession(["ok"]))
    out = user.type(other, f"/load {path}", "/bye")
    assert f"{path}: 2 messages, 3 tokens" in out
    assert (other.messages, other.system) == (conversation.messages, "Be kind.")
    assert (other.params.min_tokens, other.num_messages) == (5, 2)
    user.type(other, "/retry", "/bye")
    assert other.messages == conversation.messages


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "(No such file or directory)"),
        ("{", "a conversation as /save writes it"),
        ('{"model": "x"}', "missing required field `messages`"),
        ('[{"role": "robot", "content": ""}]', "Invalid enum value 'robot' - at `$[0].role`"),
        ('[{"role": "user"}]', "missing required field `content` - at `$[0]`"),
        ('{"messages": [], "params": {"top_p": 7}}', "top_p=7: expected a number from 0 to 1"),
        ('{"messages": [], "params": {"n": 7}}', "params='n': expected one of max_tokens"),
        ('[{"role": "user", "content": "", "x": ' + "[" * 100_000, "as /save writes it"),
        (f'{{"messages": {FIVE_MESSAGES}, "params": {{"top_p": 0.5}}}}', "at most 4 (/clear starts anew)"),
        (THREE_MESSAGES, "messages='3 tokens': expected fewer than the model's 3 (/clear starts anew)"),
    ],
)
def test_a_file_that_cannot_be_loaded_changes_nothing(
    user: ChatUser, tmp_path: Path, content: str | None, error: str
) -> None:
    path = tmp_path / "talk.json"
    if content is not None:
        path.write_text(content)
    session = FakeSession(["ok"])
    session.facts.max_model_len = 3
    conversation = make_conversation(session, "Be kind.")
    out = user.type(conversation, "Hi", f"/load {path}", "/bye")
    assert error in out
    assert (conversation.num_messages, conversation.system, conversation.sampling) == (2, "Be kind.", {})


def test_a_file_of_something_else_is_not_written_over(user: ChatUser, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    conversation = make_conversation(FakeSession(["ok"]))
    typed = ["/save x", "Hi", "/save", f"/save {path}", f"/save {tmp_path}", f"/save {path}/x", "/bye"]
    out = user.type(conversation, *typed)
    for part in ("after a question", "/save='': expected /save FILE", "this is another", "(Not a directory)"):
        assert part in out
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_ollamas_forms_of_commands_are_understood(user: ChatUser) -> None:
    session = FakeSession(["ok"])
    typed = ["/system", "/system Be kind.", "/system", "/set parameter min_tokens 5", "/?", "Hi", "/clear"]
    out = user.type(make_conversation(session), *typed, '/set system """Be short."""', "Hi", "/exit")
    assert session.asked[0][0]["content"] == "Be kind."
    assert session.params[0].min_tokens == 5
    assert [message["content"] for message in session.asked[1]] == ["Be short.", "Hi"]
    assert "no system message" in out
    assert "\nBe kind.\n" in out
    assert "forget the conversation" in out


def test_a_backslash_goes_on_in_the_next_line(user: ChatUser) -> None:
    session = FakeSession(["ok"])
    user.type(make_conversation(session), "one\\", "two\\", "three", EOFError())
    assert session.asked[0][0]["content"] == "one\ntwo\nthree"
