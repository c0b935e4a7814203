"""`quire stress`: parses what is to be endured and hands over to those who play it, loaded only then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

from ...ipc.errors import InputError
from ...ipc.spec.weight_format import Quantization
from ..options import Check, option, parse_options
from ..sigterm import unwinding_at_sigterm
from .kills import METHODS, RAY_ROLES, ROLES, Method, Role

_SUPERVISOR = "supervisor"
_DURATION_S, _HOSTILE_DURATION_S = 60.0, 300.0
_POSITIVE = Check(lambda value: 0 < value < float("inf"), "a number above 0")
_EPILOG = """\
Requests of known tokens come over HTTP, also in the background, and from AsyncLLM and LLM at once while
processes are killed. Exit code 1 when a request is lost, fails or gets another token than in a run that
nothing disturbs, or when a block, a process, a file, a file descriptor or a stored response is left.

The engine is one of its own, unless --attach names a running daemon that nobody else uses meanwhile; of that
one core and worker are killed only with --kill-others, and one that is served beyond this machine is refused.
Everything stays on this machine: sockets in a private folder, HTTP on 127.0.0.1.

With --hostile 16 streams of one key run undisturbed first, then beside attacks that another key, nobody's
key, or a program of the same user may make: requests as large as they may be, floods, connections that are
slow, silent or without end, descriptors and disks that run out, files that vanish. Exit code 1 when a stream
gets another token, when its p99 gap or time to first token is over twice the undisturbed one and 100 ms, when
a process is lost, grows beyond its bound or stays large, or when an attack gets an answer that it may not.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """Load and deaths together: does every request get its tokens?"""

    attach: str | None = option(None, "a running daemon instead of one of its own", metavar="NAME")
    kill_others: bool = option(False, "allow to kill that daemon's processes")
    seed: int = option(0, "of the load and the kills (0)", metavar="N")
    duration: float | None = option(
        None, "of the load (60), of the attacks of --hostile (300)", _POSITIVE, type=float, metavar="S"
    )
    rate: float = option(6.0, "requests/s, Poisson (6)", _POSITIVE, metavar="R")
    max_tokens: int = option(200, "longest answer (200)", _POSITIVE, metavar="N")
    kills: str | None = option(
        None,
        "who dies: core,worker,http,client and, at last, supervisor (all; http,client with --attach)",
        metavar="ROLES",
    )
    signals: str = option(
        "KILL,TERM,STOP,STOP+CONT", "with which signals (KILL,TERM,STOP,STOP+CONT)", metavar="HOW"
    )
    kill_interval: float = option(
        8.0, "one kill in each (8), later where the engine would give up", _POSITIVE, metavar="S"
    )
    noise: bool = option(True, "storms of broken connections, and junk to every socket (on)")
    engines: int = option(1, "of its own daemon, any of which may die (1)", metavar="N")
    network: bool = option(False, "clients come to its own daemon over TCP, with keys")
    ssl: bool = option(
        False, "the server speaks TLS, with certificates that openssl makes and that are replaced meanwhile"
    )
    warm_spare: bool = option(False, "the engine keeps a spare for the next worker")
    tensor_parallel_size: int = option(
        1, "ranks of each stage of the engine, any of which may be the worker that is killed (1)", metavar="N"
    )
    distributed_executor_backend: str = option(
        "mp",
        "ray: its workers are on nodes of a Ray that this machine plays, where actor and node die too (mp)",
        choices=("mp", "ray"),
    )
    pipeline_parallel_size: int = option(1, "stages of the engine (1)", metavar="N")
    model: str = option("pocket", "of the engine: a folder or .gguf file (pocket)")
    quantization: str | None = option(
        None,
        "int4, int8 or fp8 of the engine's weights, while they are read (none)",
        choices=get_args(Quantization),
        metavar="FORMAT",
    )
    reproduce: int | None = option(
        None, "N requests, one death of each kind, beside Dynamo's table", type=int, metavar="N"
    )
    hostile: bool = option(
        False, "nobody is killed: one key's attacks beside 16 ordinary streams of another key"
    )
    attacks: str | None = option(None, "which attacks --hostile plays (all)", metavar="NAMES")
    simulate: int | None = option(
        None,
        "no processes: N seeds of the simulator, whose messages are lost, late and doubled",
        Check(lambda value: value >= 1, "at least 1 seed"),
        type=int,
        metavar="N",
    )
    json: str | None = option(None, "write every figure to a file too", metavar="FILE")

    @property
    def duration_s(self) -> float:
        """Of the load or the attacks."""
        return self.duration or (_HOSTILE_DURATION_S if self.hostile else _DURATION_S)

    @property
    def has_ray(self) -> bool:
        """Whether its workers are on nodes of a Ray."""
        return self.distributed_executor_backend == "ray"

    @property
    def roles(self) -> tuple[Role, ...]:
        """Who is killed while the load runs. Raises InputError."""
        return tuple(name for name in self._list_victims() if name != _SUPERVISOR)

    @property
    def kills_supervisor(self) -> bool:
        """At last; only of a daemon of its own."""
        return _SUPERVISOR in self._list_victims()

    @property
    def methods(self) -> tuple[Method, ...]:
        """How they are killed. Raises InputError."""
        return _parse_names("signals", self.signals, METHODS)

    @property
    def engine(self) -> dict[str, Any]:
        """Of its own engine, arguments by EngineArgs' names."""
        return {"data_parallel_size": self.engines} | {name: getattr(self, name) for name in _ENGINE_FIELDS}

    def _list_victims(self) -> tuple[Any, ...]:
        allowed = (*ROLES, *(RAY_ROLES if self.has_ray else ()), _SUPERVISOR)
        default = "http,client" if self.attach else ",".join(allowed)
        return _parse_names("kills", self.kills or default, allowed)


_ENGINE_FIELDS = ("tensor_parallel_size", "pipeline_parallel_size", "model", "quantization")
_BACKEND = "distributed_executor_backend"
# What is refused beside an option: the others, and how they are told.
_CONFLICTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "simulate",
        ("attach", "reproduce", "hostile"),
        "not given with --simulate, which has no processes",
    ),
    (
        "hostile",
        ("attach", "reproduce", "kills", "warm_spare", *_ENGINE_FIELDS, "network", "ssl", _BACKEND),
        "not given with --hostile, which attacks an engine of its own",
    ),
    ("reproduce", ("ssl", "attach", _BACKEND), "not given with --reproduce, which kills its engine"),
    ("reproduce", _ENGINE_FIELDS, "{default} with --reproduce"),
    (
        "attach",
        ("warm_spare", *_ENGINE_FIELDS, "engines", "network", _BACKEND),
        "not given with --attach: the daemon has its own",
    ),
)


def run(argv: Sequence[str]) -> int:
    """Run `quire stress`."""
    options = parse_options(Options, "quire stress", argv, _EPILOG)
    _check_conflicts(options)
    with unwinding_at_sigterm():
        if options.simulate is not None:
            from ..sim.simulate import simulate

            return simulate(range(options.seed, options.seed + options.simulate))
        return _run_hostile(options) if options.hostile else _run(options)


def _run(options: Options) -> int:
    from .stress import run_reproduction, run_stress

    if options.reproduce is not None:
        return run_reproduction(options.reproduce, options.max_tokens, options.seed, options.warm_spare)
    if options.attach is not None:
        # A daemon that is not the run's own keeps its supervisor, and its other processes unless it is said.
        if options.kills_supervisor:
            raise InputError("kills", options.kills, "no supervisor with --attach: that would end the daemon")
        if set(options.roles) - {"http", "client"} and not options.kill_others:
            allowed = "http, client or none with --attach; --kill-others allows core and worker"
            raise InputError("kills", options.kills, allowed)
    return run_stress(options)


def _run_hostile(options: Options) -> int:
    """Its daemon and server are its own, since it takes all that they have and deletes their files."""
    from .hostile.attacks import ATTACKS
    from .hostile.run import HostileOptions, run_hostile

    known = tuple(ATTACKS)
    names = known if options.attacks is None else _parse_names("attacks", options.attacks, known)
    return run_hostile(
        HostileOptions(
            seed=options.seed,
            duration_s=options.duration_s,
            max_tokens=options.max_tokens,
            attacks=names,
            json_path=options.json,
        )
    )


def _check_conflicts(options: Options) -> None:
    """Raises InputError for an option that goes with none of the others."""
    defaults: dict[str, Any] = {item.name: item.default for item in fields(Options)}
    for mode, names, allowed in _CONFLICTS:
        for name in names if getattr(options, mode) not in (None, False) else ():
            if getattr(options, name) != defaults[name]:
                text = allowed.format(default=defaults[name])
                raise InputError(name, getattr(options, name), text)


def _parse_names(field: str, text: str, allowed: tuple[Any, ...]) -> tuple[Any, ...]:
    """Names with commas between them; 'none' is no name."""
    names = () if text == "none" else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in allowed:
            raise InputError(field, text, f"none, or of {', '.join(allowed)} with commas between them")
    return names
