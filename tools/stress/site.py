"""What a stress run is run against: a daemon that nobody else sees, and a server over it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ...frontend.client.handshake_watch import REFUSED_TIMEOUT_S
from ...frontend.client.remote_daemon import Attachment, RemoteDaemon, choose_attachment
from ...frontend.daemon import find_log, inspect_daemon, start_daemon, stop_daemon
from ...frontend.llm import LLM
from ...frontend.options.engine_args import EngineArgs
from ...ipc.daemon.daemon_state import read_state
from ...ipc.daemon.run_dir import find_base, find_daemon, find_named
from ...ipc.errors import QuireError
from ...ipc.network.keys import make_keys
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.protocol.messages import EngineFacts
from ...ipc.spec.config import EngineConfig, RecoveryConfig
from .answers import answer_all
from .asks import Abilities, Arrival, Ask, ClientKind, ClientPlan
from .certificates import Certificates
from .chats import list_chats
from .http_client import make_client_context
from .kills import RAY_ROLES, SITE_ROLES, Role
from .open_files import OpenFiles, OwnShm, count_open_files
from .ray_nodes import RayNodes
from .record import Golden
from .server import NUM_HTTP_PROCESSES, Server
from .waiting import wait_until

OWN_NAME = "stress"
NO_REPEAT = "quire.tools.stress.no_repeat:NoRepeat"  # the logits processor of an engine of one's own
_SETTLE_TIMEOUT_S = 20.0
_LEFTOVER_TIMEOUT_S = 3.0
_MAX_TEXTS = 2  # text processes of an HTTP process
_NUM_LAST_WORDS = 12  # lines of a log


class Site:
    """The daemon OWN_NAME and its server. `config`: of another daemon in its place, if there is to be one.

    remote: the same daemon, as clients and the server are to come to it over the network. ray: where its
    workers are. own_shm: gets to know its processes. `api_keys` and `command_prefix` are the server's, and
    certificates, with which it speaks TLS. has_keyless: a second server, without keys.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        api_keys: Sequence[str] = (),
        command_prefix: Sequence[str] = (),
        remote: RemoteDaemon | None = None,
        ray: RayNodes | None = None,
        own_shm: OwnShm | None = None,
        certificates: Certificates | None = None,
        has_keyless: bool = False,
    ) -> None:
        self.daemon = OWN_NAME
        self._own_shm = OwnShm() if own_shm is None else own_shm
        self._ray = ray
        self.attachment: Attachment = OWN_NAME if remote is None else remote
        self.config = config
        self.supervisor = psutil.Process(find_daemon(OWN_NAME))
        with LLM(attach=OWN_NAME) as llm:
            facts = llm.llm_engine.facts
            self.model, self.recovery = facts.served_model_name, facts.recovery
            known, tokenizer = llm.llm_engine.input_processor.output_format, llm.get_tokenizer()
        has_thoughts = known is not None and bool(known.thinking)
        self.abilities = Abilities(
            has_processor=NO_REPEAT in facts.logits_processors,
            dimensions=_list_dimensions(facts),
            chats=[] if known is None else list_chats(bool(known.calls), has_thoughts),
            can_chat=tokenizer is not None and tokenizer.has_chat_template,
            has_thoughts=has_thoughts,
        )
        self._server = Server(self.attachment, api_keys, command_prefix, certificates)
        self.ca_path = None if certificates is None else certificates.ca_path
        self.tls = None if self.ca_path is None else make_client_context(self.ca_path)
        self.grpc_address = self._server.grpc_address
        self.url, self.server = self._server.url, psutil.Process(self._server.pid)
        self._keyless = Server(OWN_NAME, (), command_prefix) if has_keyless else None
        self.keyless_url = self._keyless.url if self._keyless is not None else ""

    def plan_client(
        self, kind: ClientKind, pool: list[Ask], arrivals: list[Arrival], timeout_s: float
    ) -> ClientPlan:
        """The plan of a client of this site."""
        return ClientPlan(
            kind=kind,
            daemon=self.attachment,
            url=self.url,
            ca_path=self.ca_path,
            grpc_address=self.grpc_address,
            model=self.model,
            pool=pool,
            arrivals=arrivals,
            timeout_s=timeout_s,
        )

    def find_pids(self, role: Role) -> list[int]:
        """The processes of this role that run now; may be none for a moment."""
        if self._ray is not None and role in ("worker", *RAY_ROLES):
            return self._ray.find_pids(role)
        with contextlib.suppress(psutil.NoSuchProcess):
            if role == "http":
                return _find_children(self.server.pid, "http")
            core_pids = _find_children(self.supervisor.pid, "engine-core")
            if role == "core" or not core_pids:
                return core_pids
            workers = [pid for core_pid in core_pids for pid in _find_workers(core_pid)]
            return workers or self._find_adopted_workers()
        return []

    def note_killed(self, role: Role, pid: int) -> None:
        """A process of this role was killed."""
        self._own_shm.note(pid)
        if self._ray is not None and role == "node":
            self._ray.replace(pid)

    @property
    def num_engines(self) -> int:
        """That there are now, in whatever state."""
        state = read_state(find_named(self.daemon))
        return 1 if state is None else len(state.engines)

    def _find_adopted_workers(self) -> list[int]:
        """Those that were a spare, which may be children of a core that is gone: only their core knows."""
        info = inspect_daemon(self.daemon) if self.recovery.warm_spare else None
        processes = [] if info is None else info.processes
        return [one.pid for one in processes if one.role == "worker" and is_running(one.pid)]

    def start_daemon_again(self) -> None:
        """Another of one's own, in the place of one that has ended."""
        assert self.config is not None, "a daemon of one's own"
        if isinstance(self.attachment, RemoteDaemon):
            listen, keys = self.attachment.address, self.attachment.keys
            start_daemon(OWN_NAME, self.config, listen=listen, keys=keys)
        else:
            start_daemon(OWN_NAME, self.config)

    @property
    def notice_s(self) -> float:
        """How much later clients may know that the daemon has ended than they do on its machine."""
        return REFUSED_TIMEOUT_S if isinstance(self.attachment, RemoteDaemon) else 0.0

    @property
    def is_ready(self) -> bool:
        """Whether all engines are, as the supervisor sees it."""
        state = read_state(find_named(self.daemon))
        return state is not None and all(engine.state == "ready" for engine in state.engines)

    @property
    def has_ended(self) -> bool:
        """The supervisor or the server."""
        return not (_lives(self.supervisor) and _lives(self.server))

    def list_processes(self) -> list[tuple[str, int]]:
        """Role and pid of all that run now, with what the HTTP processes have started.

        That is text processes, also one that is just being started and still has its parent's command line.
        """
        lasting = [("supervisor", self.supervisor.pid), ("server", self.server.pid)]
        own = [(role, pid) for role in SITE_ROLES for pid in self.find_pids(role)]
        texts = [("text", one) for role, pid in own if role == "http" for _, one in _list_children(pid)]
        found = lasting + own + texts
        for _, pid in found:
            self._own_shm.note(pid)
        return found

    def count_open_files(self) -> dict[tuple[str, int], OpenFiles]:
        """Of every process, by role and pid; of an HTTP process without what it has of its text processes.

        Of those it starts the second one when it first needs it, and keeps it.
        """
        counts: dict[tuple[str, int], OpenFiles] = {}
        for role, pid in self.list_processes():
            with contextlib.suppress(OSError):
                num_texts = len(_list_children(pid)) if role == "http" else 0
                counts[role, pid] = count_open_files(pid).without_children(min(num_texts, _MAX_TEXTS))
        return counts

    def read_log(self) -> str:
        """What the daemon has said, which is gone with a site of its own."""
        with contextlib.suppress(OSError):
            return find_log(self.daemon).read_text(errors="replace")
        return ""

    def read_server_log(self) -> str:
        """What the server and its HTTP processes have said."""
        return self._server.read_log()

    def read_last_words(self) -> str:
        """The end of the daemon's log."""
        return " | ".join(self.read_log().splitlines()[-_NUM_LAST_WORDS:]) or "none"

    def compute_golden(self, pool: list[Ask]) -> list[Golden]:
        """What the same engine answers when nothing happens."""
        with LLM(attach=self.attachment) as llm:
            answers = answer_all(llm, pool)
        for ask, answer in zip(pool, answers, strict=True):
            if isinstance(answer, str):
                raise QuireError(f"{ask} failed though nothing happened: {answer}")
        return [answer for answer in answers if isinstance(answer, Golden)]

    def fill_cache(self) -> None:
        """Have each block of the KV cache written once: until then its worker has no memory for it."""
        with LLM(attach=self.daemon) as llm:
            engine = llm.llm_engine
            num_tokens = engine.facts.max_model_len - 1
            num_prompts = 1 + engine.stats().kv_blocks_total * engine.facts.block_size // num_tokens
            prompts = [[number, *[0] * (num_tokens - 1)] for number in range(num_prompts)]
            llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)

    def start_grammar_processes(self) -> None:
        """Have each HTTP process start the one that it keeps from its first grammar on."""
        body = {"model": self.model, "prompt": "1", "max_tokens": 1, "structured_outputs": {"choice": ["a"]}}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)

        def have_started() -> bool:
            with urllib.request.urlopen(request, timeout=_SETTLE_TIMEOUT_S, context=self.tls) as answer:
                answer.read()
            return all(len(_list_children(pid)) > 1 for pid in self.find_pids("http"))

        wait_until(have_started, _SETTLE_TIMEOUT_S)

    def check_settled(self, open_before: dict[tuple[str, int], OpenFiles]) -> list[str]:
        """What is not as it was: requests, blocks, processes, what those have open. Waits a while for it."""
        broken = self.check_idle()
        if not wait_until(lambda: not self._find_responses(), _SETTLE_TIMEOUT_S):
            broken.append(f"the server has responses left: {', '.join(self._find_responses())}")
        wait_until(lambda: not self._find_left_open(open_before), _LEFTOVER_TIMEOUT_S)
        return broken + self._find_left_open(open_before)

    def check_idle(self) -> list[str]:
        """Requests and blocks that are left, processes that are not there. Waits a while for it."""

        def is_ready() -> bool:
            info = inspect_daemon(self.daemon)
            if info is None or info.state != "ready":
                return False
            return all(engine.num_running is not None for engine in info.engines)

        if not wait_until(is_ready, _SETTLE_TIMEOUT_S):
            return [f"the engine was not ready within {_SETTLE_TIMEOUT_S:g} s after the last request"]
        with LLM(attach=self.daemon) as llm:
            engine = llm.llm_engine

            def is_idle() -> bool:
                stats = engine.stats()
                return stats.num_running + stats.num_waiting + stats.kv_blocks_used == 0

            wait_until(is_idle, _SETTLE_TIMEOUT_S)
            stats, integrity_error = engine.stats(), engine.check_integrity()
        broken: list[str] = []
        if stats.num_running + stats.num_waiting + stats.kv_blocks_used:
            broken.append(
                f"after the last request {stats.num_running} run, {stats.num_waiting} wait, "
                f"{stats.kv_blocks_used} blocks are in use"
            )
        if integrity_error is not None:
            broken.append(f"blocks: {integrity_error}")
        if not wait_until(lambda: len(self.find_pids("http")) == NUM_HTTP_PROCESSES, _SETTLE_TIMEOUT_S):
            broken.append(f"{len(self.find_pids('http'))} HTTP processes, not {NUM_HTTP_PROCESSES}")
        return broken

    def _find_responses(self) -> list[str]:
        """What /metrics tells of responses that are kept or run, though all have been deleted."""
        try:
            with urllib.request.urlopen(
                f"{self.url}/metrics", timeout=_LEFTOVER_TIMEOUT_S, context=self.tls
            ) as answer:
                text = answer.read().decode()
        except OSError as error:
            return [str(error)]
        found = re.findall(r"^\S+:(?:stored|background)_response\w*(?<!_total) [\d.e+]+$", text, re.MULTILINE)
        return [line for line in found if float(line.split()[1])] or ([] if found else ["no series of them"])

    def _find_left_open(self, before: dict[tuple[str, int], OpenFiles]) -> list[str]:
        """Of the processes that have lived on."""
        return [
            f"the {process[0]} (pid {process[1]}) has open: {now}, before the load: {before[process]}"
            for process, now in self.count_open_files().items()
            if process in before and now != before[process]
        ]

    def close(self) -> None:
        """End the servers."""
        if self._keyless is not None:
            self._keyless.close()
        self._server.close()


@contextlib.contextmanager
def open_site(
    broken: list[str],
    recovery: RecoveryConfig | None = None,
    engine: Mapping[str, Any] | None = None,
    *,
    has_network: bool = False,
    ray: RayNodes | None = None,
    certificates: Certificates | None = None,
) -> Generator[Site]:
    """A site with a daemon of its own; what that leaves behind is added to `broken`.

    `recovery` and `engine`, arguments by EngineArgs' names, are the daemon's; None takes the defaults.
    has_network: its clients come over TCP. ray: its workers are there. certificates: of its server.
    """
    own_shm = OwnShm()

    def start(folder: Path) -> dict[str, Any]:
        args = EngineArgs(
            max_model_len=512,
            num_gpu_blocks_override=1024,
            scheduling_policy="fair",
            logits_processors=[NO_REPEAT],
            runner="generate",
            convert="embed",
            hf_overrides={"is_matryoshka": True},
            distributed_executor_backend=None if ray is None else "ray",
            **engine or {},
        )
        config = msgspec.structs.replace(args.create_engine_config(), recovery=recovery or RecoveryConfig())
        remote = start_own_daemon(config, folder if has_network else None)
        return {
            "config": config,
            "remote": remote,
            "ray": ray,
            "own_shm": own_shm,
            "certificates": certificates,
        }

    with open_started_site(broken, start) as site:
        yield site
    if ray is not None:
        wait_until(lambda: not ray.find_left(), _LEFTOVER_TIMEOUT_S)
        broken += ray.find_left()
    broken += [f"shared memory is left: {name}" for name in own_shm.find_abandoned()]


@contextlib.contextmanager
def open_started_site(broken: list[str], start: Callable[[Path], dict[str, Any]]) -> Generator[Site]:
    """`start` starts the daemon, given its folder, and returns Site's arguments."""
    with own_folders() as folder:
        arguments = start(folder)
        try:
            with contextlib.closing(Site(**arguments)) as site:
                yield site
        finally:
            with contextlib.suppress(QuireError):  # it has ended already, which the checks have seen
                stop_daemon(OWN_NAME)
        broken += find_leftovers(folder)


def start_own_daemon(config: EngineConfig, folder: Path | None) -> RemoteDaemon | None:
    """A daemon of a run's own; with a folder, for keys, one that listens, and how clients come to it."""
    if folder is None:
        start_daemon(OWN_NAME, config)
        return None
    keys = folder / "keys"
    make_keys(keys)
    start_daemon(OWN_NAME, config, listen="tcp://127.0.0.1:0", keys=str(keys))
    state = read_state(find_named(OWN_NAME))
    assert state is not None
    chosen = choose_attachment(state.listen, keys)
    assert isinstance(chosen, RemoteDaemon)
    return chosen


@contextlib.contextmanager
def own_folders() -> Generator[Path]:
    """Run directories and logs of this block's processes in a folder of their own."""
    names = ("XDG_RUNTIME_DIR", "XDG_STATE_HOME")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="q") as folder:
        os.environ |= {names[0]: folder, names[1]: folder + "/state"}
        try:
            yield Path(folder)
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def find_leftovers(folder: Path) -> list[str]:
    """Processes and run directories that a daemon in `folder` has left. Left processes are ended."""
    wait_until(lambda: not _find_processes(folder), _LEFTOVER_TIMEOUT_S)
    left = _find_processes(folder)
    broken = [
        f"a process is left, {one.status()}: {' '.join(one.cmdline()[-3:])} (pid {one.pid})" for one in left
    ]
    for process in left:
        process.kill()
    return broken + [f"a file is left: {path.name}" for path in find_base().iterdir()]


def _list_dimensions(facts: EngineFacts) -> list[int | None]:
    """Of the embeddings that the engine makes, whole (None) and cut."""
    if "embed" not in facts.tasks:
        return []
    cuts = facts.matryoshka_dimensions or (1, facts.embedding_size // 2)
    return [None, *cuts] if facts.is_matryoshka else [None]


def _find_processes(folder: Path) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = process.environ().get("XDG_RUNTIME_DIR") == str(folder)
            if is_ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def is_running(pid: int) -> bool:
    """Whether it does more than wait to be buried. Raises psutil.NoSuchProcess."""
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def _find_children(pid: int, role: str) -> list[int]:
    return sorted(child for name, child in _list_children(pid) if name == role)


def _find_workers(core_pid: int) -> list[int]:
    """Of an engine; of one with several ranks, all of them."""
    children = _list_children(core_pid)
    return sorted(pid for role, pid in children if role == "worker" or role.startswith("worker-"))


def _list_children(pid: int) -> list[tuple[str, int]]:
    """Role and pid of what a process has started and that runs."""
    found: list[tuple[str, int]] = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.Error):
                if command := child.cmdline():  # none of a zombie
                    found.append((command[-1], child.pid))
    return found


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
