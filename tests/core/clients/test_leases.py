"""Clients of a daemon that die, stop, do not read or talk nonsense: what it costs them, and nobody else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator

import msgspec
import psutil
import pytest
import zmq
from bare_client import CODEC, BareClient
from blocking_client import BlockingClient, attach_client
from daemon_loads import PACED, Outputs, Script, ask, assert_undisturbed, finish, is_idle, look, read_stats
from daemons import Daemon, fake_modules, runtime_folders, wait_until
from fakes import make_request
from quire.core.clients.clients import MAX_REPLIES
from quire.frontend.daemon import find_log
from quire.ipc.daemon.run_dir import find_named
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.codec import MAX_BODY_BYTES
from quire.ipc.protocol.messages import (
    PROTOCOL_VERSION,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    Hello,
    ProtocolNotice,
    Refusal,
    UtilityCall,
    UtilityMethod,
    Welcome,
)
from quire.ipc.protocol.token_lists import TokenLists
from zmtp import GREETING, connect, make_message, shake_hands


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with runtime_folders(), fake_modules(), Daemon("leases", PACED) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def idle_afterwards(daemon: Daemon) -> Iterator[None]:
    """Whatever happened in a test: the same core is there, and holds nothing."""
    core_pid = daemon.core_pid
    yield
    with contextlib.closing(attach_client(daemon.name, "test")) as client:
        assert client.facts.pids["core"] == core_pid == daemon.core_pid, find_log(daemon.name).read_text()
        assert wait_until(lambda: is_idle(client), 3.0), read_stats(client)
        assert client.call_utility(UtilityMethod.CHECK_INTEGRITY).error is None


@pytest.fixture
def client(daemon: Daemon) -> Iterator[BlockingClient]:
    with contextlib.closing(attach_client(daemon.name, "test")) as client:
        yield client


def meet(daemon: Daemon) -> BareClient:
    return BareClient(f"ipc://{find_named(daemon.name) / 'core.sock'}")


def read_client_pids(client: BlockingClient) -> set[int]:
    return {view.pid for view in look(client).clients}


# Dead and stopped clients.


def test_a_killed_clients_requests_are_gone(daemon: Daemon, client: BlockingClient) -> None:
    with Script(daemon.name, "victim", 8, 225) as victim, Script(daemon.name, "other", 8, 100) as other:
        victim.wait_until_busy()
        other.wait_until_busy()
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        assert wait_until(lambda: victim.pid not in read_client_pids(client), 10.0)
        other.assert_undisturbed()
    assert is_idle(client)
    ask(client, "again", 4, 20)


def test_a_stopped_client_is_let_go_and_ends_with_the_right_tokens_when_it_goes_on(
    daemon: Daemon, client: BlockingClient
) -> None:
    with Script(daemon.name, "stopped", 6, 225) as stopped, Script(daemon.name, "other", 4, 100) as other:
        stopped.wait_until_busy()
        other.wait_until_busy()
        stopped.send_signal(signal.SIGSTOP)
        other.assert_undisturbed()
        assert wait_until(lambda: is_idle(client), 3.0)
        assert wait_until(lambda: stopped.pid not in read_client_pids(client), 5.0)
        stopped.send_signal(signal.SIGCONT)
        stopped.assert_undisturbed()


def test_a_client_that_does_not_read_is_owed_little_and_loses_nothing(
    daemon: Daemon, client: BlockingClient
) -> None:
    core = psutil.Process(daemon.core_pid)
    requests = [make_request(f"slow-{i}", [5, i // 900, i % 900], max_tokens=40) for i in range(1000)]
    with contextlib.closing(attach_client(daemon.name, "slow")) as slow:
        ask(slow, "warm", 64, 40)
        before = core.memory_info().rss
        slow.add_requests(requests)
        ask(client, "fast", 8, 50)
        assert wait_until(lambda: is_idle(client), 20.0)  # all are done, and none of it has been read
        assert next(view.num_unsent for view in look(client).clients if view.kind == "slow") <= 1000
        assert core.memory_info().rss - before < 32e6
        finish(slow, requests)


def test_what_a_client_asks_and_never_reads_is_bounded(daemon: Daemon, client: BlockingClient) -> None:
    with connect_raw(daemon) as raw:
        shake_hands(raw)
        raw.sendall(make_message(*CODEC.encode(Hello(PROTOCOL_VERSION, "mute", os.getpid()))))
        with contextlib.suppress(TimeoutError):  # nothing more goes through
            for _ in range(10000):
                raw.sendall(make_message(b"\xee" + b"x" * 200))
        ask(client, "fast", 4, 25)
        seen: list[int] = []

        def has_all_it_may() -> bool:
            seen.extend(view.num_unsent for view in look(client).clients if view.kind == "mute")
            return seen[-1] == MAX_REPLIES

        assert wait_until(has_all_it_may, 10.0), seen
        assert max(seen) == MAX_REPLIES


def test_a_flood_whose_sender_leaves_does_not_end_the_core(daemon: Daemon, client: BlockingClient) -> None:
    # With a bound on its receive queue libzmq could abort the core at the next heartbeat (not in every run).
    question = CODEC.encode(UtilityCall(1, UtilityMethod.SNAPSHOT))
    with zmq.Context() as context, context.socket(zmq.DEALER) as rude:
        rude.linger = 0
        rude.connect(f"ipc://{find_named(daemon.name) / 'core.sock'}")
        rude.send_multipart(CODEC.encode(Hello(PROTOCOL_VERSION, "rude", os.getpid())))
        for _ in range(4000):
            rude.send(b"\xee" + b"x" * 64)
            rude.send_multipart(question)
        ask(client, "fast", 4, 25)
    began = time.monotonic()
    assert wait_until(lambda: time.monotonic() - began > 0.6, 2.0)


# A second Hello.


def test_a_second_hello_drops_what_was_asked_for_before_it(daemon: Daemon) -> None:
    with meet(daemon) as stranger:
        first = stranger.attach(1)
        stranger.send(make_request("before", [1], max_tokens=None))
        assert isinstance(stranger.receive(), EngineCoreOutputs)
        stranger.send(Hello(PROTOCOL_VERSION, "test", 1, 1.0, 2))
        while not isinstance(message := stranger.receive(), Welcome):
            assert isinstance(message, EngineCoreOutputs)
        assert (message.number, message.epoch) == (2, first.epoch)
        request = make_request("before", [1], output=[7, 8], max_tokens=5)  # the same id is free again
        stranger.send(request)
        outputs: Outputs = {"before": [EngineCoreOutput("before", 0, [7, 8])]}
        while outputs["before"][-1].finish_reason is None:
            message = stranger.receive()
            assert isinstance(message, EngineCoreOutputs)
            outputs["before"] += message.outputs
        assert_undisturbed([request], outputs)


def test_a_second_hello_of_a_wrong_version_is_refused(daemon: Daemon) -> None:
    with meet(daemon) as stranger:
        refusal = stranger.ask(Hello(PROTOCOL_VERSION + 1, "test", 1))
        assert isinstance(refusal, Refusal)
        assert refusal.reason == (
            f"this engine speaks protocol version {PROTOCOL_VERSION}, not {PROTOCOL_VERSION + 1}"
        )
        stranger.attach()
        assert isinstance(stranger.ask(Hello(1, "test", 1)), Refusal)


# Nonsense.


def test_junk_frames_cost_their_sender_a_notice(daemon: Daemon, client: BlockingClient) -> None:
    hello = CODEC.encode(Hello(PROTOCOL_VERSION, "test", 1))
    with meet(daemon) as stranger:
        for frames in (
            (b"",),
            (b"\x01",),
            (hello[0][:-3],),  # half a Hello
            (b"\x01\xc1",),
            (b"\x01" + msgspec.msgpack.encode([PROTOCOL_VERSION, "k" * 65, 1]),),
            (b"\x01" + msgspec.msgpack.encode([PROTOCOL_VERSION, "kind", 1, -1.0]),),
            (b"\x01" + msgspec.msgpack.encode([PROTOCOL_VERSION, "kind", 1, float("nan")]),),
            (b"\x02" + b"\x91" * 100_000,),  # nested beyond any stack
            (b"\x02" + msgspec.msgpack.encode(["x" * 257, b"", {}, 0.0]),),
            (b"\x11" + hello[0][1:],),
            (b"x" * 5000,),
            (*hello, b"second"),
            CODEC.encode(UtilityCall(1, UtilityMethod.PING)),
        ):
            assert isinstance(stranger.ask(*frames), ProtocolNotice), frames
        stranger.attach()
        assert isinstance(stranger.ask(b"\x14\x91\x90"), ProtocolNotice)
    ask(client, "fine", 4, 20)


def test_requests_that_no_frontend_would_send_end_with_an_error(
    daemon: Daemon, client: BlockingClient
) -> None:
    honest = make_request("r", [1, 2])
    replace = msgspec.structs.replace
    with meet(daemon) as stranger:
        stranger.attach()
        for request in (
            replace(honest, prompt_token_ids=b"abc"),
            replace(honest, prompt_token_ids=b""),
            replace(honest, prompt_token_ids=b"\xff" * 8),
            replace(honest, output_token_ids=b"\xff\xff\xff\x7f"),
            replace(honest, output_token_ids=b"\x00" * 4 * PACED.model.max_model_len),
            replace(honest, eos_token_ids=[-1]),
            replace(honest, token_lists=TokenLists(bad_word_lengths=bytes(4))),
            replace(honest, token_lists=TokenLists(bad_words=bytes(8), bad_word_lengths=b"\1\0\0\0")),
            replace(honest, token_lists=TokenLists(bad_words=bytes(3))),
            replace(honest, token_lists=TokenLists(allowed=b"\xff\xff\xff\x7f")),
            replace(honest, token_lists=TokenLists(bias_ids=bytes(4))),
            replace(honest, token_lists=TokenLists(bias_ids=bytes(4), bias_values=b"\0\0\xc0\x7f")),
            replace(honest, sampling_params=SamplingParams(allowed_token_ids=[1])),
            replace(honest, request_id="\x1b[2J"),
        ):
            message = stranger.ask(request)
            assert isinstance(message, EngineCoreOutputs), message
            assert message.outputs[-1].finish_reason == FinishReason.ERROR
    ask(client, "fine", 4, 20)


def test_a_live_id_of_another_client_is_refused_and_its_owner_undisturbed(daemon: Daemon) -> None:
    with Script(daemon.name, "owner", 2, 150) as owner:
        owner.wait_until_busy()
        with meet(daemon) as thief:
            thief.attach()
            message = thief.ask(make_request("owner-0", [1], max_tokens=3))
            assert isinstance(message, EngineCoreOutputs)
            assert message.outputs[-1].finish_reason == FinishReason.ERROR
        owner.assert_undisturbed()


def connect_raw(daemon: Daemon) -> socket.socket:
    return connect(str(find_named(daemon.name) / "core.sock"))


def is_closed_by_peer(raw: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while raw.recv(65536):
            pass
    return True


@pytest.mark.parametrize("size", [MAX_BODY_BYTES + 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_a_frame_over_the_limit_ends_its_connection_before_it_is_read(
    daemon: Daemon, client: BlockingClient, size: int
) -> None:
    before = psutil.Process(daemon.core_pid).memory_info().rss
    with connect_raw(daemon) as raw:
        shake_hands(raw)
        raw.sendall(b"\x02" + struct.pack(">Q", size) + b"x" * 1000)
        assert is_closed_by_peer(raw)
    assert psutil.Process(daemon.core_pid).memory_info().rss - before < 16e6
    ask(client, "fine", 2, 20)


def test_half_a_handshake_and_half_a_message_disturb_nobody(daemon: Daemon, client: BlockingClient) -> None:
    raws = [connect_raw(daemon) for _ in range(20)]
    for number, raw in enumerate(raws):
        if number % 2:
            raw.sendall(GREETING[: 7 * number % 64])
        else:
            shake_hands(raw)
            raw.sendall(b"\x00\x40" + b"\x01" + b"ab")
    ask(client, "fine", 4, 30)
    for raw in raws:
        raw.close()
    with connect_raw(daemon) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(range(256)) * 40)
        assert is_closed_by_peer(raw)
    ask(client, "also", 4, 30)


def test_a_client_whose_frame_is_not_read_goes_on(daemon: Daemon) -> None:
    with contextlib.closing(attach_client(daemon.name, "test")) as client:
        client.in_loop(client.client._links.first.socket.send, (b"\x02junk",))
        request = make_request("after", [1, 2, 3], max_tokens=5)
        client.add_request(request)
        finish(client, [request])
