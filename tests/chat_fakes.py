"""A conversation of `quire chat` without an engine, and a user who types."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from quire.frontend.cli.chat.conversation import Conversation
from quire.frontend.cli.commands.chat import talk
from quire.frontend.cli.session import Session
from quire.frontend.events import OutputEvent, TextDelta
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.ipc.errors import PromptError, RequestFailedError
from quire.ipc.params.sampling_params import SamplingParams


class FakeSession:
    """Answers every conversation with the words it was made with, and remembers what it was asked."""

    default_sampling: dict[str, Any] = {"top_k": 20}  # noqa: RUF012

    def __init__(self, words: list[str | list[OutputEvent]], *more: list[str | list[OutputEvent]]) -> None:
        """`more`: other answers that come before, in turn; a word may be events."""
        self.words = words
        self.before = list(more)
        self.asked: list[list[dict[str, Any]]] = []
        self.thinking: list[bool | None] = []
        self.params: list[SamplingParams] = []
        self.num_sent = 0
        self.finish_reason: str | None = "stop"
        self.on_word = lambda: None
        self.facts = SimpleNamespace(served_model_name="fake", max_model_len=64)

    def render_chat(self, messages: list[dict[str, Any]], *_options: Any) -> list[int]:
        if len(messages) > 4:
            raise PromptError("prompt", "5 messages", "at most 4")
        return [1] * len(messages)

    def chat(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams,
        is_thinking: bool | None,
    ) -> Generator[tuple[RequestOutput, list[OutputEvent]]]:
        self.render_chat(messages)
        self.asked.append(messages)
        self.params.append(params)
        self.thinking.append(is_thinking)
        words = self.before.pop(0) if self.before else self.words
        for number, word in enumerate(words, start=1):
            if word == "fail":
                raise RequestFailedError("the step failed")
            if word == "hang":
                raise KeyboardInterrupt
            self.num_sent = number
            events: list[OutputEvent] = [TextDelta(word)] if isinstance(word, str) else word
            output = CompletionOutput(0, "", [number])
            if number == len(words):
                output.finish_reason = self.finish_reason
            self.on_word()
            yield RequestOutput("id", None, [1], None, [output], number == len(words)), events


def make_conversation(session: FakeSession, system: str | None = None) -> Conversation:
    return Conversation(cast(Session, session), {}, system, is_verbose=False)


class ChatUser:
    """Types at the prompt of a chat and reads what comes; made by the fixture `user`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def type(self, conversation: Conversation, *typed: str | BaseException) -> str:
        """What is printed until the chat has been left as it should be."""
        lines = iter(typed)

        def read_line(_prompt: str) -> str:
            line = next(lines)
            if isinstance(line, BaseException):
                raise line
            return line

        self._monkeypatch.setattr("builtins.input", read_line)
        assert talk(conversation) == 0
        return self._capsys.readouterr().out
