"""OutputEvents of an answer -> the items of a response, and the events in which a stream tells of them.

Knows no engine and no HTTP: a whole answer and a stream are made by the same calls, so that they are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ... import events as turn
from ..bodies.schema import TokenLogprob
from ..stream import Json

_INCOMPLETE = {"length": "max_output_tokens"}  # OpenAI's word for it


class ResponseEncoder:
    """One response while it comes into being. Calls return the events that follow, in OpenAI's order."""

    def __init__(self, response: Json, namespaces: Mapping[str, tuple[str, str]] | None = None) -> None:
        """namespaces: by the name that the model knows, a tool's namespace and its name there."""
        self.response = response
        self._namespaces = namespaces or {}
        self._item: Json | None = None  # the one that is being written, as it was announced
        self._texts: list[str] = []  # of that item
        self._logprobs: list[TokenLogprob] = []  # likewise
        self._held: list[TokenLogprob] = []  # of tokens whose text has not come
        self._events: list[Json] = []  # to be returned
        self._num_events = 0

    def begin(self) -> list[Json]:
        """The request has been taken, and runs."""
        self._say("response.created", response=self.response)
        return self.start()

    def queue(self) -> list[Json]:
        """The request has been taken, and runs later: `start`."""
        self.response["status"] = "queued"
        self._say("response.created", response=self.response)
        self._say("response.queued", response=self.response)
        return self._hand_over()

    def start(self) -> list[Json]:
        """What was queued runs."""
        self.response["status"] = "in_progress"
        self._say("response.in_progress", response=self.response)
        return self._hand_over()

    def take(self, events: Iterable[turn.OutputEvent], logprobs: Sequence[TokenLogprob] = ()) -> list[Json]:
        """More of the answer. `logprobs`: of its tokens; those of thoughts and calls are not told."""
        self._held += logprobs
        for event in events:
            match event:
                case turn.TextDelta(text):
                    self._write_text(text)
                    continue
                case turn.ReasoningDelta(text):
                    self._enter("reasoning")
                    self._texts.append(text)
                    self._say("response.reasoning_text.delta", **self._place, content_index=0, delta=text)
                case turn.ToolCallStart(_, call_id, name):
                    self._close("completed")
                    namespace, name = self._namespaces.get(name, ("", name))
                    call = {
                        "type": "function_call",
                        "id": self._make_id("fc"),
                        "call_id": call_id,
                        "name": name,
                    }
                    called = {"namespace": namespace} if namespace else {}
                    self._open(call | called | {"arguments": "", "status": "in_progress"})
                case turn.ToolCallDelta(_, arguments):
                    self._texts.append(arguments)
                    self._say("response.function_call_arguments.delta", **self._place, delta=arguments)
                case turn.ToolCallEnd():
                    self._close("completed")
            self._held = []
        return self._hand_over()

    def end(self, finish_reason: str | None, usage: Json) -> list[Json]:
        """Everything has been taken."""
        is_whole = finish_reason == "stop"
        if self._item is None and not self.response["output"]:
            self._enter("message")
        self._logprobs += self._held  # of the end of sequence
        # A call that ends is closed by then: a stop string has cut this one off.
        is_cut = self._item is not None and self._item["type"] == "function_call"
        self._close("completed" if is_whole and not is_cut else "incomplete")
        response = self.response
        response["usage"] = usage
        response["status"] = "completed" if is_whole else "incomplete"
        if finish_reason == "abort":
            response["status"] = "cancelled"
        elif not is_whole:
            reason = _INCOMPLETE.get(finish_reason or "", str(finish_reason))
            response["incomplete_details"] = {"reason": reason}
        # A response that was cancelled has no event of its own in this API.
        self._say("response.completed" if is_whole else "response.incomplete", response=response)
        return self._hand_over()

    def fail(self, code: str, message: str) -> list[Json]:
        """Something went wrong after the beginning; the item under way is told no further."""
        self.response |= {"status": "failed", "error": {"code": code, "message": message}}
        self._say("response.failed", response=self.response)
        return self._hand_over()

    @property
    def _place(self) -> Json:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.response["output"])}

    def _write_text(self, text: str) -> None:
        self._enter("message")
        logprobs, self._held = self._held, []
        self._texts.append(text)
        self._logprobs += logprobs
        self._say("response.output_text.delta", **self._place, content_index=0, delta=text, logprobs=logprobs)

    def _enter(self, kind: str) -> None:
        """Be in an item of this kind, a message or thoughts."""
        if self._item is not None and self._item["type"] == kind:
            return
        self._close("completed")
        is_message = kind == "message"
        more: Json = {"role": "assistant"} if is_message else {"summary": []}
        item_id = self._make_id("msg" if is_message else "rs")
        self._open({"type": kind, "id": item_id, "status": "in_progress", **more, "content": []})
        self._say("response.content_part.added", **self._place, content_index=0, part=_make_part(kind))

    def _open(self, item: Json) -> None:
        self._item, self._texts, self._logprobs = item, [], []
        self._say("response.output_item.added", output_index=len(self.response["output"]), item=item)

    def _close(self, status: str) -> None:
        """End the item under way, if there is one."""
        if self._item is None:
            return
        item, text, kind = self._item, "".join(self._texts), self._item["type"]
        if kind == "function_call":
            if status == "completed":  # what was cut off is no call that could be run
                done = {"name": item["name"], "arguments": text}
                self._say("response.function_call_arguments.done", **self._place, **done)
            item = item | {"arguments": text, "status": status}
        else:
            part = _make_part(kind, text, self._logprobs)
            fields = {"text": text} if kind == "reasoning" else {"text": text, "logprobs": self._logprobs}
            self._say(f"response.{part['type']}.done", **self._place, content_index=0, **fields)
            self._say("response.content_part.done", **self._place, content_index=0, part=part)
            item = item | {"status": status, "content": [part]}
        self._say("response.output_item.done", output_index=len(self.response["output"]), item=item)
        self.response["output"].append(item)
        self._item = None

    def _make_id(self, prefix: str) -> str:
        return make_item_id(prefix, self.response["id"], len(self.response["output"]))

    def _say(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1

    def _hand_over(self) -> list[Json]:
        events, self._events = self._events, []
        return events


def _make_part(kind: str, text: str = "", logprobs: Sequence[TokenLogprob] = ()) -> Json:
    """Of a message, or of thoughts."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def make_item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of a response's item, from which `find_response_id` reads where it stands."""
    return f"{prefix}-{response_id.removeprefix('resp-')}-{index}"


def find_response_id(item_id: str) -> tuple[str, int] | None:
    """The response that an item belongs to, and its place there; None when the id does not say."""
    parts = item_id.split("-")
    if len(parts) != 3 or not parts[2].isdecimal() or len(parts[2]) > 4:
        return None
    return f"resp-{parts[1]}", int(parts[2])
