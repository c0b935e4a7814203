"""Golden transcripts of the dialects: what is asked, what a scripted model says, and all that comes of it.

tests/golden/dialects/README.md has the form of the files. Ids are numbered, times are 0, what is long is cut.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from openai_fakes import Answer, Call, OpenApp, PoolingCall, make_app
from quire.frontend.http.limits import Limits
from quire.frontend.http.options import ServerOptions
from quire.frontend.requests.vectors.encoder import EncodedText, TextPair
from quire.ipc.errors import RequestFailedError
from quire.ipc.params.sampling_params import SamplingParams
from tool_template import PLAIN_TEMPLATE, TEMPLATE

FOLDER = Path(__file__).parents[2] / "golden" / "dialects"
TEMPLATES = {"tools": TEMPLATE, "plain": PLAIN_TEMPLATE}
STREAMED_UNASKED = ("/api/chat", "/api/generate")  # where a body that does not say `stream` is for a stream
STREAMED = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations"),
    *STREAMED_UNASKED,
)
MADE = ("engine", "status", "answer", "stream")  # keys of a turn that a run fills in
_ID = re.compile(r"\b([a-z]+[-_])([0-9a-f]{24,34})(?![0-9a-f])")
_NUMBERED_ID = re.compile(r"<(\d+)>")
_TIMES = ("created", "created_at", "modified_at", "total_duration")
_MAX_TEXT, _MAX_ITEMS = 1200, 100
# Of parameters, what says nothing of the request.
_UNTOLD = {"output_kind", "names", "tenant"}

Json = dict[str, Any]


@functools.cache
def read_cases(name: str) -> list[Json]:
    return json.loads((FOLDER / f"{name}.json").read_bytes())


def write_cases(name: str, cases: list[Json]) -> None:
    """One line for each thing that is asked or answered, and for each event."""
    text = ",\n".join(_render(case, 0) for case in cases)
    (FOLDER / f"{name}.json").write_text(f"[\n{text}\n]\n")


def _render(value: Any, depth: int, key: str = "") -> str:
    if not (isinstance(value, list) and key in ("turns", "stream")) and (key or depth > 2):
        return json.dumps(value, ensure_ascii=False)
    indent = f",\n{' ' * (depth + 1)}"
    if isinstance(value, list):
        return f"[\n{' ' * (depth + 1)}{indent.join(_render(one, depth + 1) for one in value)}]"
    return f"{{{indent.join(f'{json.dumps(k)}: {_render(v, depth + 1, k)}' for k, v in value.items())}}}"


@dataclass
class Transcript:
    """A case that is run. `app`: as the case describes it."""

    app: OpenApp
    _grammars: list[str] = field(default_factory=list[str])
    _ids: list[str] = field(default_factory=list[str])  # in the order of their appearance

    async def run_turn(self, turn: Json) -> Json:
        """The turn with what comes of it now."""
        llm = self.app.llm
        llm.pieces = tuple(turn.get("says", llm.pieces))
        llm.ending = tuple(turn.get("ends", ("stop", None)))
        llm.error = None
        if "fails" in turn:
            message, code, llm.error_after = turn["fails"]
            llm.error = RequestFailedError(message, code)
        made = {name: value for name, value in turn.items() if name not in MADE}
        known = self._count_calls()
        body: Any = turn.get("body")
        can_stream = turn["ask"] in STREAMED and isinstance(body, dict) and "stream" not in body
        is_whole = can_stream and turn["ask"] in STREAMED_UNASKED
        answer = await self._ask(turn | {"body": body | {"stream": False}} if is_whole else turn)
        if engine := self._describe_calls(known):
            made["engine"] = engine
        if answer.status != 200:
            made["status"] = answer.status
        made |= self._describe(answer)
        if can_stream and (answer.status == 200 or "fails" in turn):
            known = self._count_calls()
            streamed = await self._ask(turn | {"body": body | {"stream": True}})
            made["stream"] = self._describe(streamed).get("stream") or self._tell(streamed.json)
            if streamed.status == 200:  # what it asks is what the whole answer does
                asked = [call for call in self._describe_calls(known) if "counts" not in call]
                assert asked == [call for call in engine if "counts" not in call]
        return made

    async def _ask(self, turn: Json) -> Answer:
        method, _, path = self._fill(turn["ask"]).rpartition(" ")
        headers: dict[str, str] = turn.get("headers", {})
        if "raw" in turn:
            return await self.app.client.post(path, turn["raw"].encode("latin-1"))
        if "body" not in turn:
            return await self.app.client.call(method or "GET", path, b"", headers)
        return await self.app.client.post(path, self._fill(turn["body"]), **headers)

    def _fill(self, value: Any) -> Any:
        """A body with the ids that its numbers stand for, and with its long texts."""
        match value:
            case {"repeat": [one, times]}:
                return self._fill(one) * times
            case dict():
                return {name: self._fill(one) for name, one in value.items()}
            case list():
                return [self._fill(one) for one in value]
            case str():
                return _NUMBERED_ID.sub(lambda found: self._ids[int(found[1]) - 1], value)
            case _:
                return value

    def _describe(self, answer: Answer) -> Json:
        if answer.headers.get("content-type") == "application/x-ndjson":
            return {"stream": [self._tell(json.loads(line)) for line in answer.body.splitlines()]}
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            return {"answer": self._tell(answer.json) if answer.body else None}
        names = [line[7:] for line in answer.body.decode().split("\n") if line.startswith("event: ")]
        assert not names or names == [event["type"] for event in answer.events]
        return {"stream": [self._tell(event) for event in answer.events]}

    def _tell(self, value: Any) -> Any:
        """As it is noted: without what differs in every run, or is long."""
        match value:
            case dict():
                told = {name: self._tell(one) for name, one in value.items()}
                return told | {name: 0 for name in _TIMES if name in told}
            case list():
                told_ = [self._tell(one) for one in value[:_MAX_ITEMS]]
                return told_ if len(value) <= _MAX_ITEMS else [*told_, f"... {len(value)} in all"]
            case str():
                text = _ID.sub(self._number, value)
                return text if len(text) <= _MAX_TEXT else f"{text[:200]}... {len(text)} in all"
            case _:
                return value

    def _number(self, found: re.Match[str]) -> str:
        if found[2] not in self._ids:
            self._ids.append(found[2])
        return f"{found[1]}<{self._ids.index(found[2]) + 1}>"

    def _count_calls(self) -> tuple[int, int, int, int]:
        llm = self.app.llm
        return len(llm.calls), len(llm.pooled), len(llm.searches), len(llm.counts)

    def _describe_calls(self, known: tuple[int, int, int, int]) -> list[Json]:
        """What the engine was asked since then, and told."""
        llm = self.app.llm
        calls = [self._describe_call(call) for call in llm.calls[known[0] :]]
        calls += [self._describe_pooling(call) for call in llm.pooled[known[1] :]]
        calls += [{"search": msgspec.to_builtins(search)} for search in llm.searches[known[2] :]]
        return calls + [{"counts": msgspec.to_builtins(counts)} for counts in llm.counts[known[3] :]]

    def _describe_call(self, call: Call) -> Json:
        told: Json = {"prompt": call.prompt}
        if not isinstance(call.prompt, str):
            text = self.app.llm.tokenizer.decode(call.prompt, skip_special_tokens=False)
            told = {"prompt": text, "num_tokens": len(call.prompt)}
        told |= _describe_fields(call.params) | _describe_fields(call.options)
        if call.grammar:  # which of the case's grammars it is
            if call.grammar not in self._grammars:
                self._grammars.append(call.grammar)
            told["grammar"] = self._grammars.index(call.grammar) + 1
        return self._tell(told)

    def _describe_pooling(self, call: PoolingCall) -> Json:
        told: Json = {"prompts": [self._describe_prompt(one) for one in call.prompts]}
        if call.prompt:
            told["before"] = call.prompt
        return self._tell(told | _describe_fields(call.params) | _describe_fields(call.options))

    def _describe_prompt(self, prompt: Any) -> Any:
        match prompt:
            case EncodedText(token_ids=ids):
                return self.app.llm.tokenizer.decode(list(ids), skip_special_tokens=False)
            case TextPair():
                return list(prompt)
            case _:
                return prompt


def _describe_fields(params: msgspec.Struct) -> Json:
    """Those that are not as nobody has said anything of them."""
    fields = type(params).__struct_fields__
    plain = type(params)()
    named = {name: getattr(params, name) for name in fields if name not in _UNTOLD}
    return {
        name: msgspec.to_builtins(value, str_keys=True)
        for name, value in named.items()
        if value != getattr(plain, name)
    }


def open_transcript(case: Json, folder: Path) -> Transcript:
    """A case's app; `folder` is empty, for its model's."""
    how: Json = dict(case.get("app", {}))
    template = how.pop("template", None)
    limits, options = Limits(**how.pop("limits", {})), how.pop("options", {})
    defaults, num_classes = how.pop("defaults", {}), how.pop("num_classes", 1)
    if files := how.pop("folder", None):
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        how["model"] = str(folder)
    facts = {name: tuple(one) if isinstance(one, list) else one for name, one in how.items()}
    app = make_app(ServerOptions(limits=limits, **options), TEMPLATES.get(template, template), **facts)
    app.llm.defaults, app.llm.num_classes = SamplingParams(**defaults), num_classes
    app.serving.open()  # with these defaults
    return Transcript(app)
