"""Clients of the network at a (fake) engine: who comes in, what is cut, what is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from bare_client import BareClient
from blocking_client import BlockingClient, attach_client
from daemon_loads import PACED, Outputs, ask, collect, collect_some, finish, make_requests, read_stats
from daemons import Daemon, fake_modules, runtime_folders, wait_until
from quire.core.network import network_listener
from quire.core.network.network_listener import NetworkListener, count_received_bytes, open_copy
from quire.core.network.remote_clients import open_network
from quire.frontend.client import handshake_watch
from quire.frontend.client.remote_daemon import RemoteDaemon, RemoteEngine
from quire.ipc.errors import ConfigError, EngineDeadError, EngineStartError
from quire.ipc.network.keys import (
    CLIENTS,
    SERVER_PUBLIC,
    AuthorizedClients,
    add_client,
    make_keys,
    read_client_keys,
    read_server_keys,
)
from quire.ipc.network.tcp_address import parse_tcp_address
from quire.ipc.processes.child_args import NetworkArgs
from quire.ipc.protocol.messages import (
    PROTOCOL_VERSION,
    Hello,
    Refusal,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
    Welcome,
)
from tcp_proxy import TcpProxy

GREETING = b"\xff" + 8 * b"\0" + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + 32 * b"\0"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder)
    add_client(folder, folder.with_name("laptop"))
    return folder


@pytest.fixture(scope="module", autouse=True)
def fakes() -> Iterator[None]:
    with runtime_folders(), fake_modules():
        yield


@pytest.fixture(scope="module")
def daemon(keys: Path) -> Iterator[Daemon]:
    with Daemon("net", PACED, listen="tcp://127.0.0.1:0", keys=str(keys)) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def port(daemon: Daemon) -> int:
    return int(daemon.listen.rpartition(":")[2])


@pytest.fixture
def proxy(port: int) -> Iterator[TcpProxy]:
    with contextlib.closing(TcpProxy(("127.0.0.1", port))) as proxy:
        yield proxy


@pytest.fixture
def neighbour(daemon: Daemon, keys: Path) -> Iterator[BlockingClient]:
    """A client of the network that nothing happens to."""
    with attach(daemon.listen, keys) as client:
        yield client


@contextlib.contextmanager
def attach(address: str, keys: Path) -> Generator[BlockingClient]:
    client = attach_client(RemoteDaemon(address, str(keys)), "test", timeout_s=20.0)
    with contextlib.closing(client):
        yield client


def is_closed(raw: socket.socket) -> bool:
    """Whether the other side ends the connection within 10 s, whatever it says before."""
    raw.settimeout(10.0)
    with contextlib.suppress(ConnectionError):
        while raw.recv(4096):
            pass
    return True


# Who comes in.


def test_clients_of_both_kinds_get_the_same_tokens(daemon: Daemon, neighbour: BlockingClient) -> None:
    with contextlib.closing(attach_client(daemon.name, "test")) as local:
        for client, prefix in ((neighbour, "far"), (local, "near")):
            ask(client, prefix, max_tokens=100)
    assert neighbour.facts.model == "remote"  # no path of that machine


def test_an_unknown_key_is_told_so(daemon: Daemon, keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "strange")
    (tmp_path / "strange" / SERVER_PUBLIC).write_bytes((keys / SERVER_PUBLIC).read_bytes())
    with pytest.raises(EngineStartError, match="does not know this client"):
        attach(daemon.listen, tmp_path / "strange").__enter__()


def test_a_key_of_another_server_is_told_so(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake_watch, "_BROKEN_TIMEOUT_S", 0.1)
    make_keys(tmp_path / "other")
    with pytest.raises(EngineStartError, match=r"server\.public is not its key"):
        attach(daemon.listen, tmp_path / "other").__enter__()


def test_a_port_of_something_else_is_told_so(keys: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(EngineStartError, match="no Quire daemon's port"):
            attach(f"tcp://127.0.0.1:{port}", keys).__enter__()


def test_a_port_that_is_taken_is_told_at_once(daemon: Daemon, keys: Path) -> None:
    with pytest.raises(ConfigError, match=r"listen='tcp://127.0.0.1:\d+': expected an address .* free port"):
        Daemon("second", PACED, listen=daemon.listen, keys=str(keys))


def test_a_client_that_is_added_comes_in_and_one_that_is_removed_is_cut(
    daemon: Daemon, keys: Path, tmp_path: Path
) -> None:
    clients = keys / CLIENTS
    before = clients.read_bytes()
    add_client(keys, tmp_path / "guest")
    with attach(daemon.listen, tmp_path / "guest") as guest:
        ask(guest, "guest")
        clients.write_bytes(before)
        with pytest.raises(EngineDeadError, match="does not know this client"):
            ask(guest, "again")


def test_a_remote_client_is_no_supervisor_and_resets_nothing(daemon: Daemon, keys: Path) -> None:
    with BareClient(daemon.listen, read_client_keys(keys)) as stranger:
        refusal = stranger.ask(Hello(PROTOCOL_VERSION, "supervisor", os.getpid()))
        assert isinstance(refusal, Refusal)
        assert "may not be the supervisor" in refusal.reason
        assert isinstance(stranger.ask(Hello(PROTOCOL_VERSION, "test", os.getpid())), Welcome)
        answer = stranger.ask(UtilityCall(1, UtilityMethod.RESET_PREFIX_CACHE))
        assert isinstance(answer, UtilityResult)
        assert answer.error == "RESET_PREFIX_CACHE is only for clients on the engine's machine"


# What happens to connections and processes.


def test_a_connection_that_is_cut_loses_no_token(proxy: TcpProxy, keys: Path) -> None:
    with attach(f"tcp://127.0.0.1:{proxy.port}", keys) as client:
        requests = make_requests("cut", 4, 150)
        client.add_requests(requests)
        outputs: Outputs = {}
        for num_before in (1, 2, 3):
            proxy.cut()
            while proxy.num_accepted == num_before:
                collect_some(client, outputs=outputs)
        finish(client, requests, outputs)


def test_a_connection_that_falls_silent_is_noticed_on_both_sides(
    daemon: Daemon, port: int, proxy: TcpProxy, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it somebody who never ends his greeting, and is not waited for either."""
    monkeypatch.setattr(RemoteEngine, "is_computing", False)  # or it may take 10 s
    with (
        socket.create_connection(("127.0.0.1", port)) as slow,
        attach(f"tcp://127.0.0.1:{proxy.port}", keys) as client,
        contextlib.closing(attach_client(daemon.name, "test")) as local,
    ):
        slow.sendall(GREETING[:11])
        requests = make_requests("silent", 4, 240)
        client.add_requests(requests)
        outputs = collect_some(client)
        proxy.strand()
        finish(client, requests, outputs)
        assert wait_until(lambda: read_stats(local).num_clients == 3, 10.0), "with the supervisor"
        assert is_closed(slow)


def test_clients_outlive_a_core_that_is_killed(daemon: Daemon, keys: Path) -> None:
    num_restarts = daemon.num_restarts
    with attach(daemon.listen, keys) as client:
        requests = make_requests("core", 4)
        client.add_requests(requests)
        outputs = collect_some(client)
        os.kill(daemon.core_pid, signal.SIGKILL)
        finish(client, requests, outputs)
    assert daemon.num_restarts > num_restarts


def test_a_supervisor_that_is_killed_ends_its_clients(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake_watch, "REFUSED_TIMEOUT_S", 0.2)
    with Daemon("short", PACED, listen="tcp://127.0.0.1:0", keys=str(keys)) as daemon:
        address = daemon.listen
        with attach(address, keys) as client:
            client.add_requests(make_requests("dies", 4))
            os.kill(daemon.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="has no daemon: connection refused"):
                collect(client, {"dies-0"})
        with pytest.raises(EngineStartError, match="has no daemon"):
            attach(address, keys).__enter__()


def test_a_group_has_ports_in_a_row_and_any_of_them_leads_to_all(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake_watch, "REFUSED_TIMEOUT_S", 0.2)
    parallel = msgspec.structs.replace(PACED.parallel, data_parallel_size=2)
    config = msgspec.structs.replace(PACED, parallel=parallel)
    with Daemon("group", config, listen="tcp://127.0.0.1:0", keys=str(keys)) as daemon:
        second = str(parse_tcp_address("attach", daemon.listen).shift(1))
        with attach(second, keys) as client:
            assert wait_until(lambda: client.get_outputs(timeout_s=0.05) or len(client.engines) == 2, 5.0)
            assert sorted(client.engines) == [0, 1]
            requests = make_requests("group", 8)
            client.add_requests(requests)
            outputs = collect_some(client)
            os.kill(client.engines[1].pids["core"], signal.SIGKILL)
            finish(client, requests, outputs)


# Strangers.


@pytest.fixture
def bounded(keys: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NetworkListener]:
    """Which may have 1 MB unread."""
    monkeypatch.setattr(network_listener, "_LOOK_INTERVAL_S", 0.0)
    server = read_server_keys(keys)
    with socket.create_server(("127.0.0.1", 0)) as port:
        listener = NetworkListener(
            port.fileno(), server, AuthorizedClients(keys).find_grant, max_unread_bytes=1 << 20
        )
        yield listener
        listener.stop()


def test_who_sends_more_than_is_read_is_cut_off_alone(bounded: NetworkListener, keys: Path) -> None:
    address = f"tcp://127.0.0.1:{bounded.port}"
    with BareClient(address, read_client_keys(keys)) as honest:
        honest.socket.send(b"good")
        assert bounded.router.poll(10_000)
        assert [frames for _, frames in bounded.receive()] == [[b"good"]]
        with BareClient(address, read_client_keys(keys.with_name("laptop"))) as flood:
            monitor = flood.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            while not monitor.poll(0):
                with contextlib.suppress(zmq.Again):
                    flood.socket.send(bytes(100_000), zmq.NOBLOCK)
                next(bounded.receive(), None)
            flood.socket.disable_monitor()
        honest.socket.send(b"last")
        heard: list[list[bytes]] = []
        while [b"last"] not in heard:
            assert bounded.router.poll(10_000)
            heard += [frames for _, frames in bounded.receive()]


def test_what_is_left_unread_waits_three_times_as_long_as_was_read(
    bounded: NetworkListener, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, poller = [100.0], zmq.Poller()
    monkeypatch.setattr(network_listener, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert bounded.register(poller) is None
    with BareClient(f"tcp://127.0.0.1:{bounded.port}", read_client_keys(keys)) as client:
        for message, lasts_s, rest_s in ((b"first", 0.02, 0.06), (b"second", 9.0, 0.1)):
            client.socket.send(message)
            assert poller.poll(10_000)
            reading = bounded.receive()
            assert next(reading)[1] == [message]
            now[0] += lasts_s
            reading.close()  # the reader has had enough: it does not know what is left
            assert bounded.register(poller) == pytest.approx(now[0] + rest_s)
            assert bounded.router not in poller
            now[0] += rest_s + 0.001
            assert bounded.register(poller) is None
        client.socket.send(b"third")
        assert poller.poll(10_000)
        assert [frames for _, frames in bounded.receive()] == [[b"third"]]
        assert bounded.register(poller) is None


def test_small_messages_that_wait_take_little_more_than_they_have(
    bounded: NetworkListener, keys: Path
) -> None:
    def read_rss() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with BareClient(f"tcp://127.0.0.1:{bounded.port}", read_client_keys(keys.with_name("laptop"))) as client:
        client.socket.send(b"first")
        assert bounded.router.poll(10_000)
        assert [frames for _, frames in bounded.receive()] == [[b"first"]]
        before, num_unread = read_rss(), 4_000
        (copy,) = bounded._copies.values()
        num_bytes = count_received_bytes(copy)
        for number in range(num_unread):
            client.socket.send(bytes(100))
            least = num_bytes + 135 * (number + 1)
            # They come one by one, as over a network.
            assert wait_until(lambda least=least: count_received_bytes(copy) >= least, 20.0, 0.0)
        assert read_rss() - before < num_unread * 2500
        num_read = 0
        while num_read < num_unread:
            assert bounded.router.poll(10_000)
            num_read += len(list(bounded.receive()))


def test_a_number_that_is_something_elses_by_now_is_no_connection(keys: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        args = NetworkArgs(listening_fd=listener.fileno(), keys=str(keys), server=read_server_keys(keys))
        network, _ = open_network(args, "", 1 << 20)
        ours, other = socket.socketpair()
        end, begin = os.pipe()
        fds = len(os.listdir("/proc/self/fd"))
        try:
            for fd in (ours.fileno(), end, 1 << 20):
                assert open_copy(fd) is None
                network._cut(fd)
            assert len(os.listdir("/proc/self/fd")) == fds
            ours.sendall(b"x")
            assert other.recv(1) == b"x"
        finally:
            for one in (ours, other):
                one.close()
            os.close(end)
            os.close(begin)
            network.stop()


def test_junk_harms_nobody(daemon: Daemon, port: int, neighbour: BlockingClient) -> None:
    core_pid = daemon.core_pid
    with contextlib.ExitStack() as stack:
        hello = b"\x04\xc6\x05HELLO\x01\x00" + 192 * b"\x01"
        huge = b"\x06" + (1 << 40).to_bytes(8, "big")
        for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), GREETING + hello, GREETING + huge):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            raw.sendall(junk)
            assert is_closed(raw)
        ask(neighbour, "junk")
    assert daemon.core_pid == core_pid


def test_a_crowd_of_silent_connections_cuts_itself(
    daemon: Daemon, port: int, keys: Path, neighbour: BlockingClient
) -> None:
    core_pid = daemon.core_pid
    requests = make_requests("crowd", 4)
    neighbour.add_requests(requests)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(500)]
        with attach(daemon.listen, keys) as newcomer:  # also while they are there
            ask(newcomer, "new")
        assert is_closed(crowd[0])
        finish(neighbour, requests)
    assert daemon.core_pid == core_pid
