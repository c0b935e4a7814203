"""What comes behind a good request costs it nothing: answers come whole and in order (RFC 9112 9.3.2)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from pathlib import Path
from typing import Any

import pytest
from openai_fakes import FakeLLM
from quire.frontend.http.connections.listen import listen_at_path
from quire.frontend.http.options import TlsOptions
from quire.frontend.http.server import Server
from server_fakes import OpenServer, Peer

PEM = str(Path(__file__).parents[2] / "localhost.pem")
HOST = "host: localhost\r\n"
KEY = "authorization: Bearer one\r\n"
JSON = "content-type: application/json\r\n"
LIMITS: dict[str, Any] = {
    "max_header_bytes": 4096,
    "max_body_bytes": 20_000,
    "max_header_s": 1.0,
    "max_body_s": 1.0,
}
NUM_SEQUENCES = {"tcp": 60, "unix": 20, "tls": 10}  # the first is what all have in common
TOKENIZE = b'{"prompt":"a"}'
STREAM = b'{"prompt":"a","stream":true}'
WHOLE = b'{"prompt":"a"}'


def make(line: str, headers: str = HOST + KEY, body: bytes = b"") -> bytes:
    return f"{line} HTTP/1.1\r\n{headers}\r\n".encode() + body


def post(path: str, body: bytes, headers: str = HOST + KEY + JSON, chunk_bytes: int = 0) -> bytes:
    if not chunk_bytes:
        return make(f"POST {path}", f"{headers}content-length: {len(body)}\r\n", body)
    pieces = [body[place : place + chunk_bytes] for place in range(0, len(body), chunk_bytes)]
    chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return make(f"POST {path}", f"{headers}transfer-encoding: chunked\r\n", chunks + b"0\r\nx: y\r\n\r\n")


GENERATE = "/v1/completions"
# Those that the connection goes on behind, each with its status.
GOOD: list[tuple[bytes, int]] = [
    (make("GET /live", HOST), 200),
    (make("GET /version"), 200),
    (make("GET http://localhost:80/version", "host: other\r\n" + KEY), 200),
    (make("GET /version", HOST), 401),
    (make("GET /nothing"), 404),
    (post("/tokenize", TOKENIZE), 200),
    (post("/tokenize", TOKENIZE, chunk_bytes=3), 200),
    (post("/tokenize", b"no JSON"), 400),
    (post(GENERATE, STREAM), 200),
    (post(GENERATE, STREAM, chunk_bytes=5), 200),
    (post(GENERATE, WHOLE), 200),
    (post(GENERATE, WHOLE, HOST + KEY + JSON + "connection: upgrade\r\nupgrade: h2c\r\n"), 200),
]
FRAMED = HOST + KEY + JSON
# Those that nothing is answered behind, on their connection.
LAST: list[tuple[bytes, int]] = [
    (b"junk\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    (make("GET /live", HOST + HOST), 400),
    (make("GET /live", "x: y\r\n"), 400),
    (make("GET /live", "host: a b\r\n"), 400),
    (make("GET /live", HOST + "x: " + "y" * 5000 + "\r\n"), 431),
    (make("GET /live", HOST + "x: a\r\n b\r\n"), 400),
    (make("GET /live", HOST + "x : a\r\n"), 400),
    (make("GET /live", HOST + "x: a\0\r\n"), 400),
    (make("CONNECT a:1", HOST), 405),
    (make("POST /tokenize", FRAMED + "content-length: 20001\r\n", b"x" * 30), 413),
    (make("POST /tokenize", FRAMED + "content-length: 1\r\ncontent-length: 1\r\n", b"a"), 400),
    (make("POST /tokenize", FRAMED + "transfer-encoding: chunked\r\n", b"zz\r\n"), 400),
    (make("POST /tokenize", FRAMED + "transfer-encoding: chunked\r\n", b"1\r\nab\r\n"), 400),
    (make("POST /tokenize", FRAMED + "transfer-encoding: gzip, chunked\r\n", b"0\r\n\r\n"), 400),
    (make("POST /tokenize", HOST + JSON + "content-length: 2\r\n", b"{}"), 401),
    (make("GET /version", HOST + KEY + "connection: close\r\n"), 200),
    (post(GENERATE, STREAM, HOST + KEY + JSON + "connection: close\r\n"), 200),
    (b"GET /live HTTP/1.1\r\nhost: loc", 408),
    (make("POST /tokenize", FRAMED + "content-length: 9\r\n", b"{"), 408),
]


class Sequence:
    """Good requests, then a last one and what nobody answers; `statuses` are the answers that are due."""

    def __init__(self, rng: random.Random) -> None:
        good = rng.choices(GOOD, k=rng.randrange(6))
        last = rng.choice(LAST)
        behind = b"" if last[1] == 408 else b"".join(said for said, _ in rng.choices(GOOD + LAST, k=2))
        self.said = b"".join(said for said, _ in [*good, last]) + behind
        self.statuses = [status for _, status in [*good, last]]
        num_cuts = rng.choice((0, 1, 3, 10))
        cuts = sorted(rng.randrange(1, len(self.said)) for _ in range(num_cuts))
        self.pieces = [
            self.said[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(self.said)], strict=True)
        ]


def split_answers(data: bytes) -> list[tuple[int, bytes]]:
    """Statuses and bodies. Each has to be whole, and a stream has to have its end."""
    answers: list[tuple[int, bytes]] = []
    while data:
        head, gap, data = data.partition(b"\r\n\r\n")
        assert gap, head
        fields = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:])
        body = b""
        if "content-length" in fields:
            length = int(fields["content-length"])
            body, data = data[:length], data[length:]
            assert len(body) == length, head
        else:
            size = 1
            while size:
                line, gap, data = data.partition(b"\r\n")
                assert gap, "a stream without its last chunk"
                size = int(line, 16)
                piece, end, data = data[:size], data[size : size + 2], data[size + 2 :]
                assert end == b"\r\n", head
                body += piece
            assert body.endswith(b"data: [DONE]\n\n"), body
        answers.append((int(head.split()[1]), body))
    return answers


async def encrypt(peer: Peer) -> Peer:
    await peer.writer.start_tls(ssl.create_default_context(cafile=PEM), server_hostname="localhost")
    return peer


async def converse(peer: Peer, sequence: Sequence, probe: Peer, has_said: asyncio.Semaphore) -> bytes:
    for piece in sequence.pieces:
        peer.writer.write(piece)
        if len(sequence.pieces) < 5:
            assert await probe.ask_live()  # the server has read it by then, mostly
    has_said.release()
    return await asyncio.wait_for(peer.read_all(), 20)


@pytest.mark.parametrize("are_held", [False, True])
@pytest.mark.parametrize("kind", ["tcp", "unix", "tls"])
async def test_any_sequence_cut_anywhere_is_answered_in_order(
    kind: str, are_held: bool, tmp_path: Path, open_server: OpenServer
) -> None:
    """are_held: nothing is generated before all has been said."""
    options: dict[str, Any] = {"tls": TlsOptions(certfile=PEM)} if kind == "tls" else {}
    with contextlib.ExitStack() as stack:
        listener = None
        if kind == "unix":
            path = options["uds"] = str(tmp_path / "s")
            listener = stack.enter_context(listen_at_path(path))
        running = await open_server(api_keys=("one",), listener=listener, options=options, **LIMITS)
        llm, peer = running.llm, running.peer

        async def connect() -> Peer:
            neighbour = await peer.make_neighbour()
            return await encrypt(neighbour) if kind == "tls" else neighbour

        sequences = [Sequence(random.Random(f"{kind}/{seed}")) for seed in range(NUM_SEQUENCES[kind])]
        if are_held:
            llm.gate.clear()
        has_said = asyncio.Semaphore(0)
        talks = [
            asyncio.create_task(converse(await connect(), one, await connect(), has_said))
            for one in sequences
        ]
        for _ in talks:
            await has_said.acquire()
        llm.gate.set()
        for seed, (sequence, data) in enumerate(zip(sequences, await asyncio.gather(*talks), strict=True)):
            seen = [status for status, _ in split_answers(data)]
            assert seen == sequence.statuses, (seed, sequence.pieces)
        await running.stop()


def change(**limits: Any) -> dict[str, Any]:
    return LIMITS | limits


async def read_stream(peer: Peer) -> bytes:
    """Head and body of an answer in chunks, to its end."""
    return await peer.reader.readuntil(b"\r\n0\r\n\r\n")


@pytest.mark.server(api_keys=("one",), **change(max_header_s=0.2, max_body_s=0.2))
@pytest.mark.parametrize("last", [said for said, status in LAST if status >= 400], ids=repr)
async def test_what_comes_while_a_stream_runs_leaves_it_whole_and_is_answered_after_it(
    llm: FakeLLM, peer: Peer, last: bytes
) -> None:
    llm.gate.clear()
    await peer.say(post(GENERATE, STREAM))
    head = await peer.reader.readuntil(b"\n\n")
    await peer.say(last)
    assert await (await peer.make_neighbour()).ask_live()
    llm.gate.set()
    assert b" 200 " in head
    assert b"[DONE]" in await read_stream(peer)
    assert (await peer.read_answer())[0] >= 400
    assert await peer.read_all() == b""


@pytest.mark.server(api_keys=("one",), **LIMITS)
@pytest.mark.parametrize(("version", "first"), [("1.0", b"HTTP/1.1 200"), ("1.1", b"HTTP/1.1 100")])
async def test_only_a_client_that_knows_it_is_told_to_continue(
    peer: Peer, version: str, first: bytes
) -> None:
    headers = f"{FRAMED}expect: 100-continue\r\ncontent-length: {len(TOKENIZE)}\r\n"
    await peer.say(f"POST /tokenize HTTP/{version}\r\n{headers}\r\n".encode() + TOKENIZE)
    assert (await peer.reader.readline()).startswith(first)


@pytest.mark.server(api_keys=("one",))
async def test_junk_behind_a_request_is_bounded_and_costs_its_answer_nothing(
    llm: FakeLLM, peer: Peer, server: Server
) -> None:
    llm.gate.clear()
    await peer.say(post(GENERATE, STREAM))
    await llm.wait_for_calls(1)
    connection: Any = next(iter(server.connections))
    sending = asyncio.create_task(peer.say(b"junk\r\n\r\n" * 2**22))
    while not connection.is_reading_paused:
        assert await (await peer.make_neighbour()).ask_live()
    assert connection._admission.headers.num_bytes < 2**19  # two reads, of which one is behind the bound
    llm.gate.set()
    assert b"[DONE]" in await read_stream(peer)
    assert (await peer.read_answer())[0] == 400
    sending.cancel()


@pytest.mark.server(api_keys=("one",))
@pytest.mark.parametrize("behind", [b"junk\r\n\r\n", b"GET /vers", post(GENERATE, STREAM)])
async def test_a_client_that_leaves_with_something_behind_its_request_frees_it(
    llm: FakeLLM, peer: Peer, server: Server, behind: bytes
) -> None:
    llm.gate.clear()
    leaver = await peer.make_neighbour()
    await leaver.say(post(GENERATE, STREAM))
    await llm.wait_for_calls(1)
    await leaver.say(behind)
    assert await peer.ask_live()
    leaver.writer.transport.abort()
    await llm.wait_for_calls(1, num_ended=1)
    (connection,) = server.connections
    assert connection._admission.headers.num_bytes == 0


@pytest.mark.server(api_keys=("one",))
async def test_a_slow_reader_gets_all_of_the_answers_before_a_refusal(peer: Peer, server: Server) -> None:
    slow = await peer.make_neighbour(receive_buffer=4096)
    slow.writer.transport.pause_reading()
    num_asked = 60
    await slow.say(make("GET /openapi.json") * num_asked + b"junk\r\n\r\n")
    other = await peer.make_neighbour()
    await other.say(b"junk\r\n\r\n")
    assert (await other.read_answer())[0] == 400
    connections: Any = server.connections
    while len(connections) > 2:  # the other does not leave, and is cut off a second later
        assert await peer.ask_live()
    slow.writer.transport.resume_reading()
    assert [status for status, _ in split_answers(await slow.read_all())] == [200] * num_asked + [400]


@pytest.mark.server(api_keys=("one",), **change(max_total_header_bytes=10_000))
async def test_bytes_behind_a_request_that_do_not_fit_are_refused_behind_its_answer(
    llm: FakeLLM, peer: Peer
) -> None:
    llm.gate.clear()
    await peer.say(post(GENERATE, WHOLE))
    await llm.wait_for_calls(1)
    await peer.say(post("/tokenize", b" " * 15_000 + TOKENIZE))
    assert await (await peer.make_neighbour()).ask_live()
    llm.gate.set()
    assert (await peer.read_answer())[0] == 200
    status, _, body = await peer.read_answer()
    assert (status, "max_total_header_bytes" in body) == (429, True)
    assert await peer.read_all() == b""


@pytest.mark.server(**change(max_header_s=0.1))
async def test_the_rest_of_a_head_that_is_not_read_behind_others_is_not_late(
    llm: FakeLLM, peer: Peer
) -> None:
    llm.gate.clear()
    await peer.say(post(GENERATE, WHOLE) * 2 + b"GET /version HTTP/1.1\r\n")
    await llm.wait_for_calls(1)
    silent = await peer.make_neighbour()
    await silent.say(b"GET /version HTTP/1.1\r\n")
    assert (await silent.read_answer())[0] == 408
    llm.gate.set()
    for _ in range(2):
        assert (await peer.read_answer())[0] == 200
    assert (await peer.read_answer())[0] == 408


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/version?a", "evil.test", 200),
        ("http://evil.test/version", "localhost", 403),
        ("/version", "evil.test", 403),
        ("/live", "evil.test", 200),  # as any stranger may ask
    ],
)
async def test_a_targets_host_goes_before_the_header(peer: Peer, target: str, host: str, status: int) -> None:
    await peer.say(f"GET {target} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
    assert (await peer.read_answer())[0] == status


@pytest.mark.server(max_keep_alive_s=0.3)
async def test_a_request_that_began_before_the_last_answer_is_not_cut_off_as_idle(
    llm: FakeLLM, peer: Peer
) -> None:
    live = f"GET /live HTTP/1.1\r\n{HOST}\r\n".encode()
    asked = f"POST {GENERATE} HTTP/1.1\r\n{HOST}{JSON}content-length: {len(WHOLE)}\r\n\r\n".encode() + WHOLE
    await peer.say(live + asked[:30])
    assert (await peer.read_answer())[0] == 200
    llm.gate.clear()
    await peer.say(asked[30:])
    await llm.wait_for_calls(1)
    later = await peer.make_neighbour()
    assert await later.ask_live()
    assert await later.read_all() == b""  # it was idle for longer than is waited
    llm.gate.set()
    assert (await peer.read_answer())[0] == 200
