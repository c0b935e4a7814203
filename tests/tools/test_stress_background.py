"""The client of background responses, before a server that keeps its word and one that does not."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from quire.tools.bench.http_stream import Endpoint
from quire.tools.stress.background import ask_in_background
from quire.tools.stress.certificates import open_certificates
from quire.tools.stress.http_client import RefusedError, make_client_context
from quire.tools.stress.record import Record

PIECES = [f"w{number} " for number in range(30)]
PEM = str(Path(__file__).parents[1] / "localhost.pem")
PATH = "/v1/responses/resp-1"


@dataclass
class Script:
    """Answers each request on a connection of its own. The response is `lost` at that many requests."""

    lost_at: int | None = None
    skipped: int | None = None  # the number of an event that is never told
    cancel_status: str = "cancelled"
    asked: list[str] = field(default_factory=list[str])
    status: str = "completed"
    late_thoughts: str = ""  # which come behind the text

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split(" ", 2)
        self.asked.append(f"{method} {target.partition('?')[0]}")
        status, body = 200, self._answer(method, target)
        if len(self.asked) == self.lost_at:
            status, body = 404, b"{}"
        writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    def _answer(self, method: str, target: str) -> bytes:
        if method == "POST" and target.endswith("/cancel"):
            self.status = self.cancel_status
        if "stream" in target or target == "/v1/responses":
            return self._tell(int(target.partition("starting_after=")[2] or -1))
        return json.dumps(self._describe()).encode()

    def _describe(self) -> dict[str, Any]:
        content = [{"text": "".join(PIECES)}]
        output = [{"type": "message", "content": content}]
        if self.late_thoughts:
            output.insert(0, {"type": "reasoning", "content": [{"text": self.late_thoughts}]})
        return {"id": "resp-1", "status": self.status, "output": output, "usage": {"output_tokens": 30}}

    def _tell(self, after: int) -> bytes:
        events: list[dict[str, Any]] = [{"type": "response.created", "response": {"id": "resp-1"}}]
        events += [{"type": "response.output_text.delta", "delta": piece} for piece in PIECES]
        events.append({"type": "response.completed", "response": self._describe()})
        lines = [
            f"data: {json.dumps(event | {'sequence_number': number})}\n\n"
            for number, event in enumerate(events)
            if number > after and number != self.skipped
        ]
        is_first = after < 0
        return "".join(lines[:5] if is_first else lines).encode()  # the first connection is cut


def ask(script: Script, leave_after: int | None = None, ca_path: str | None = None) -> Record:
    """ca_path: whom the client believes; then the server speaks TLS."""
    client, server_tls = None, None
    if ca_path is not None:
        client, server_tls = make_client_context(ca_path), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server_tls.load_cert_chain(PEM)

    async def main() -> Record:
        server = await asyncio.start_server(script.serve, "127.0.0.1", 0, ssl=server_tls)
        record = Record(number=0, ask=0, client="background", behaviour="reads", began_at=0.0)
        endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], False, "", None)
        async with server, asyncio.timeout(20):
            await ask_in_background(endpoint, {"input": "?"}, record, leave_after, 0.0, client)
        return record

    return asyncio.run(main())


def test_an_answer_is_taken_up_behind_what_came_and_deleted() -> None:
    record = ask(script := Script())
    assert (record.end, record.num_ends, record.num_tokens) == ("finished", 1, 30)
    assert record.text == "".join(PIECES)
    assert script.asked[:2] == ["POST /v1/responses", f"GET {PATH}"]
    assert script.asked[-2:] == [f"GET {PATH}", f"DELETE {PATH}"]


def test_one_that_its_process_has_taken_along_is_asked_for_again() -> None:
    record = ask(script := Script(lost_at=2))
    assert (record.end, len(record.broken_at)) == ("finished", 1)
    assert script.asked.count("POST /v1/responses") == 2
    assert record.text == "".join(PIECES)


def test_one_that_is_left_is_cancelled_and_deleted() -> None:
    record = ask(script := Script(), leave_after=3)
    assert record.end == "left"
    assert script.asked[-3:] == [f"POST {PATH}/cancel", f"GET {PATH}", f"DELETE {PATH}"]


def test_thoughts_may_grow_after_text_has_begun() -> None:
    assert ask(Script(late_thoughts="hm"), leave_after=3).end == "left"


@pytest.mark.parametrize(
    ("script", "leave_after", "why"),
    [
        (Script(skipped=9), None, "event 10 came in place of 9"),
        (Script(cancel_status="in_progress"), 3, "cancel answered in_progress"),
        (Script(status="failed"), None, "ended as failed"),
    ],
)
def test_a_server_that_does_not_keep_its_word_is_found(
    script: Script, leave_after: int | None, why: str
) -> None:
    with pytest.raises(RefusedError, match=why):
        ask(script, leave_after)


def test_an_answer_over_tls_is_taken_up_too() -> None:
    record = ask(script := Script(), ca_path=PEM)
    assert (record.end, record.num_ends, record.text) == ("finished", 1, "".join(PIECES))
    assert script.asked[-1] == f"DELETE {PATH}"


def test_a_certificate_of_another_authority_is_refused_at_once() -> None:
    with open_certificates() as others, pytest.raises(RefusedError, match="the server's certificate: "):
        ask(Script(), ca_path=others.ca_path)
