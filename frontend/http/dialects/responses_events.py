"""OutputEvents of an answer -> the items of a response, and the events in which a stream tells of them.

Knows no engine and no HTTP: a whole answer and a stream are made by the same calls, so that they are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from ... import events as turn
from ..bodies import responses as body
from ..bodies.schema import TokenLogprob

_INCOMPLETE = {"length": "max_output_tokens"}  # OpenAI's word for it


class ResponseEncoder:
    """One response while it comes into being. Calls return the events that follow, in OpenAI's order."""

    def __init__(
        self, response: body.ResponsesResponse, namespaces: Mapping[str, tuple[str, str]] | None = None
    ) -> None:
        """namespaces: by the name that the model knows, a tool's namespace and its name there."""
        self.response = response
        self._namespaces = namespaces or {}
        self._item: body.OutputItem | None = None  # the one that is being written, as it was announced
        self._texts: list[str] = []  # of that item
        self._logprobs: list[TokenLogprob] = []  # likewise
        self._held: list[TokenLogprob] = []  # of tokens whose text has not come
        self._events: list[body.ResponseEvent] = []  # to be returned
        self._num_events = 0

    def begin(self) -> list[body.ResponseEvent]:
        """The request has been taken, and runs."""
        self._say("response.created", response=self.response)
        self._say("response.in_progress", response=self.response)
        return self._hand_over()

    def queue(self) -> list[body.ResponseEvent]:
        """The request has been taken, and runs later: `start`."""
        self.response.status = "queued"
        self._say("response.created", response=self.response)
        self._say("response.queued", response=self.response)
        return self._hand_over()

    def start(self) -> list[body.ResponseEvent]:
        """What was queued runs."""
        self.response.status = "in_progress"
        self._say("response.in_progress", response=self.response)
        return self._hand_over()

    def take(
        self, events: Iterable[turn.OutputEvent], logprobs: Sequence[TokenLogprob] = ()
    ) -> list[body.ResponseEvent]:
        """More of the answer. `logprobs`: of its tokens; those of thoughts and calls are not told."""
        self._held += logprobs
        for event in events:
            match event:
                case turn.TextDelta(text):
                    self._write_text(text)
                    continue
                case turn.ReasoningDelta(text):
                    self._enter(body.OutputReasoning)
                    self._texts.append(text)
                    self._say("response.reasoning_text.delta", **self._place, content_index=0, delta=text)
                case turn.ToolCallStart(_, call_id, name):
                    self._close("completed")
                    namespace, name = self._namespaces.get(name, (UNSET, name))
                    self._open(
                        body.OutputFunctionCall(
                            id=self._make_id("fc"), call_id=call_id, name=name, namespace=namespace
                        )
                    )
                case turn.ToolCallDelta(_, arguments):
                    self._texts.append(arguments)
                    self._say("response.function_call_arguments.delta", **self._place, delta=arguments)
                case turn.ToolCallEnd():
                    self._close("completed")
            self._held = []
        return self._hand_over()

    def end(self, finish_reason: str | None, usage: body.ResponsesUsage) -> list[body.ResponseEvent]:
        """Everything has been taken."""
        is_whole = finish_reason == "stop"
        if self._item is None and not self.response.output:
            self._open(body.OutputMessage(id=self._make_id("msg")))
        self._logprobs += self._held  # of the end of sequence
        # A call that ends is closed by then: a stop string has cut this one off.
        is_cut = isinstance(self._item, body.OutputFunctionCall)
        self._close("completed" if is_whole and not is_cut else "incomplete")
        response = self.response
        response.usage = usage
        response.status = "completed" if is_whole else "incomplete"
        if finish_reason == "abort":
            response.status = "cancelled"
        elif not is_whole:
            reason = _INCOMPLETE.get(finish_reason or "", str(finish_reason))
            response.incomplete_details = body.IncompleteDetails(reason)
        # A response that was cancelled has no event of its own in this API.
        self._say("response.completed" if is_whole else "response.incomplete", response=response)
        return self._hand_over()

    def fail(self, code: str, message: str) -> list[body.ResponseEvent]:
        """Something went wrong after the beginning; the item under way is told no further."""
        self.response.status = "failed"
        self.response.error = body.ResponseError(code, message)
        self._say("response.failed", response=self.response)
        return self._hand_over()

    @property
    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item.id, "output_index": len(self.response.output)}

    def _write_text(self, text: str) -> None:
        self._enter(body.OutputMessage)
        logprobs, self._held = self._held, []
        self._texts.append(text)
        self._logprobs += logprobs
        self._say("response.output_text.delta", **self._place, content_index=0, delta=text, logprobs=logprobs)

    def _enter(self, kind: type[body.OutputMessage | body.OutputReasoning]) -> None:
        """Be in an item of this kind."""
        if type(self._item) is not kind:
            self._close("completed")
            self._open(kind(id=self._make_id("msg" if kind is body.OutputMessage else "rs")))

    def _open(self, item: body.OutputItem) -> None:
        self._item, self._texts, self._logprobs = item, [], []
        self._say("response.output_item.added", output_index=len(self.response.output), item=item)
        if not isinstance(item, body.OutputFunctionCall):
            part = body.OutputText() if isinstance(item, body.OutputMessage) else body.ReasoningText()
            self._say("response.content_part.added", **self._place, content_index=0, part=part)

    def _close(self, status: body.Status) -> None:
        """End the item under way, if there is one."""
        item, text = self._item, "".join(self._texts)
        match item:
            case None:
                return
            case body.OutputMessage():
                part = body.OutputText(text=text, logprobs=self._logprobs)
                self._end_part("response.output_text.done", part, logprobs=self._logprobs)
                done: body.OutputItem = body.OutputMessage(id=item.id, status=status, content=[part])
            case body.OutputReasoning():
                thoughts = body.ReasoningText(text=text)
                self._end_part("response.reasoning_text.done", thoughts)
                done = body.OutputReasoning(id=item.id, status=status, content=[thoughts])
            case body.OutputFunctionCall(name=name):
                if status == "completed":  # what was cut off is no call that could be run
                    self._say(
                        "response.function_call_arguments.done", **self._place, name=name, arguments=text
                    )
                done = msgspec.structs.replace(item, arguments=text, status=status)
        self._say("response.output_item.done", output_index=len(self.response.output), item=done)
        self.response.output.append(done)
        self._item = None

    def _end_part(self, kind: str, part: body.OutputPart, **more: Any) -> None:
        self._say(kind, **self._place, content_index=0, text=part.text, **more)
        self._say("response.content_part.done", **self._place, content_index=0, part=part)

    def _make_id(self, prefix: str) -> str:
        return make_item_id(prefix, self.response.id, len(self.response.output))

    def _say(self, kind: str, **fields: Any) -> None:
        self._events.append(body.ResponseEvent(type=kind, sequence_number=self._num_events, **fields))
        self._num_events += 1

    def _hand_over(self) -> list[body.ResponseEvent]:
        events, self._events = self._events, []
        return events


def make_item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of a response's item, from which `find_response_id` reads where it stands."""
    return f"{prefix}-{response_id.removeprefix('resp-')}-{index}"


def find_response_id(item_id: str) -> tuple[str, int] | None:
    """The response that an item belongs to, and its place there; None when the id does not say."""
    parts = item_id.split("-")
    if len(parts) != 3 or not parts[2].isdecimal() or len(parts[2]) > 4:
        return None
    return f"resp-{parts[1]}", int(parts[2])
