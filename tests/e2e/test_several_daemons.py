"""Two daemons behind two HTTP processes on one address: a core, a daemon and an HTTP process are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import psutil
import pytest
from daemons import Daemon, fake_modules, wait_until
from quire import EngineArgs
from quire.frontend.daemon import DaemonStarter, stop_daemon
from quire.ipc.daemon.daemon_state import SupervisorArgs
from served import COMMAND, TIMEOUT_S, Served

NUM_STREAMS = 4  # of each model
OTHER = f"other-{os.getpid()}"  # beside the shared server, whose folder all tests share
OTHER_MODEL = "paced"  # with a fake worker that is slow enough to be killed in the middle
# `quire serve` that waits 2 s, not 10, for a daemon before it begins without it.
IMPATIENT = """
import sys
from quire.frontend.cli.entry import run_command
from quire.frontend.http.engines import attachments

attachments._FIRST_TRY_S = 2.0
sys.exit(run_command(sys.argv[1:]))
"""
ASKED: dict[str, Any] = {
    "prompt": "Once",
    "max_tokens": 200,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


def start_other() -> Daemon:
    with fake_modules():
        return Daemon(OTHER, EngineArgs(served_model_name=OTHER_MODEL).create_engine_config())


def read_stream(server: Served, model: str, begun: threading.Barrier) -> str:
    """The text of an answer; waits at the barrier when it has begun."""
    with server.client() as client:
        chunks = iter(client.completions.create(model=model, stream=True, **ASKED))
        text = next(chunks).choices[0].text
        begun.wait(TIMEOUT_S)
        return text + "".join(chunk.choices[0].text for chunk in chunks)


def find_http_pids(server: Served) -> set[int]:
    """Those that run."""
    found: set[int] = set()
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.Error):
            if child.cmdline()[-1:] == ["http"]:
                found.add(child.pid)
    return found


def test_each_of_two_daemons_is_lost_and_comes_back_without_the_other(shared_server: Served) -> None:
    with start_other() as other:
        shared = f"serve-{shared_server.port}"
        server = Served("--attach", shared, "--attach", OTHER, "--api-server-count", "2")
        try:
            check_a_killed_core(server, other)
            stop_daemon(OTHER)
            os.waitpid(other.pid, 0)
            check_without_the_other(server)
            with start_other(), server.client() as client:
                wait_until_all_are(server, "ready")
                patient = client.with_options(max_retries=6)  # the other process may see it a second later
                assert patient.completions.create(model=OTHER_MODEL, **ASKED).usage
        finally:
            assert server.stop() == 0


def test_a_daemon_that_starts_does_not_keep_the_server_from_its_requests(shared_server: Served) -> None:
    config = EngineArgs(served_model_name="unready").create_engine_config()
    with fake_modules():
        starter = DaemonStarter(SupervisorArgs(name=OTHER, config=config, ends_with_parent=True))
    server = None
    try:
        starter.wait_until_attachable()
        command = [sys.executable, "-c", IMPATIENT, *COMMAND[COMMAND.index("serve") :]]
        server = Served("--attach", f"serve-{shared_server.port}", "--attach", OTHER, command=command)
        with server.client() as client:
            cards = {card.id: card for card in client.models.list()}
            assert list(cards) == ["pocket", "unready"]
            assert cards["unready"].model_dump()["max_model_len"] is None
            assert client.completions.create(model="pocket", prompt="Once", max_tokens=2).usage
            with pytest.raises(openai.InternalServerError, match="'unready' is being loaded"):
                client.completions.create(model="unready", prompt="Once")
            with pytest.raises(openai.NotFoundError, match="'pocket', 'unready'"):
                client.completions.create(model="nobody", prompt="Once")
    finally:
        starter.stop()
        assert server is None or server.stop() == 0


def check_a_killed_core(server: Served, other: Daemon) -> None:
    """No stream of either model is lost, or differs from one that nothing happened to."""
    models = ["pocket", OTHER_MODEL]
    with server.client() as client:
        golden = {name: client.completions.create(model=name, **ASKED).choices[0].text for name in models}
    begun = threading.Barrier(1 + len(models) * NUM_STREAMS)
    with ThreadPoolExecutor(len(models) * NUM_STREAMS) as pool:
        streams = {
            name: [pool.submit(read_stream, server, name, begun) for _ in range(NUM_STREAMS)]
            for name in models
        }
        begun.wait(TIMEOUT_S)
        os.kill(other.core_pid, signal.SIGKILL)
        for name in models:
            assert [stream.result(TIMEOUT_S) for stream in streams[name]] == [golden[name]] * NUM_STREAMS
    assert other.num_restarts == 1


def check_without_the_other(server: Served) -> None:
    """Its model is answered 503; an HTTP process that starts meanwhile serves the one that is there."""
    wait_until_all_are(server, "degraded")
    with server.client() as client, pytest.raises(openai.InternalServerError, match=r"is away|has ended"):
        client.completions.create(model=OTHER_MODEL, **ASKED)
    before = find_http_pids(server)
    os.kill(min(before), signal.SIGKILL)
    assert wait_until(lambda: len(find_http_pids(server) - {min(before)}) == 2, TIMEOUT_S)
    wait_until_all_are(server, "degraded")
    for _ in range(8):  # connections, which the kernel gives to one process or the other
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=8) as client:
            assert client.completions.create(model="pocket", prompt="Once", max_tokens=2).usage


def wait_until_all_are(server: Served, status: str) -> None:
    """Until as many looks in a row find it as there cannot be by chance of one process."""

    def find() -> bool:
        try:
            return all(server.get("/ready")["status"] == status for _ in range(8))
        except OSError:  # of a process that has just been killed
            return False

    assert wait_until(find, TIMEOUT_S, every_s=0.1)
