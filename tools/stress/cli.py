"""`quire stress`: parses what is to be endured and hands over to those who play it, loaded only then."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, get_args

from ...frontend.cli.parser import Parser
from ...ipc.errors import InputError
from ...ipc.spec.weight_format import Quantization
from ..sigterm import unwinding_at_sigterm

_SUPERVISOR = "supervisor"
# Of its own engine, with the values that are its defaults.
_RANKS = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
_WEIGHTS = {"model": "pocket", "quantization": None}
_DURATION_S, _HOSTILE_DURATION_S = 60.0, 300.0
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


def run(argv: Sequence[str]) -> int:
    """Run `quire stress`."""
    options = _make_parser().parse(argv)
    with unwinding_at_sigterm():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    if options.simulate is not None:
        return _simulate(options)
    if options.duration is None:
        options.duration = _HOSTILE_DURATION_S if options.hostile else _DURATION_S
    _check_positive(options, "duration", "rate", "kill_interval", "max_tokens")
    if options.hostile:
        return _run_hostile(options)
    from .kills import METHODS, RAY_ROLES, ROLES
    from .stress import StressOptions, run_reproduction, run_stress

    has_ray = options.distributed_executor_backend == "ray"
    allowed = (*ROLES, *(RAY_ROLES if has_ray else ()), _SUPERVISOR)
    if options.kills is None:
        options.kills = "http,client" if options.attach else ",".join(allowed)
    names = _parse_names("kills", options.kills, allowed)
    roles = tuple(name for name in names if name != _SUPERVISOR)
    methods = _parse_names("signals", options.signals, METHODS)
    if options.reproduce is not None:
        if options.ssl:
            raise InputError("ssl", True, "not given with --reproduce")
        if options.attach is not None:
            raise InputError("attach", options.attach, "not given with --reproduce, which kills its engine")
        for field, default in (_RANKS | _WEIGHTS).items():
            if getattr(options, field) != default:
                raise InputError(field, getattr(options, field), f"{default} with --reproduce")
        if has_ray:
            raise InputError("distributed_executor_backend", "ray", "not given with --reproduce")
        return run_reproduction(options.reproduce, options.max_tokens, options.seed, options.warm_spare)
    if options.attach is not None:
        if options.warm_spare:
            raise InputError("warm_spare", True, "not given with --attach: the daemon's engine has its own")
        for field, default in (_RANKS | _WEIGHTS | {"engines": 1}).items():
            if getattr(options, field) != default:
                raise InputError(
                    field, getattr(options, field), "not given with --attach: the daemon has its own"
                )
        if options.network:
            raise InputError("network", True, "not given with --attach, which may be an address itself")
        if has_ray:
            raise InputError("distributed_executor_backend", "ray", "not given with --attach")
        _check_victims_of_others(options, set(names))
    return run_stress(
        StressOptions(
            attach=options.attach,
            seed=options.seed,
            duration_s=options.duration,
            rate=options.rate,
            max_tokens=options.max_tokens,
            roles=roles,
            kills_supervisor=_SUPERVISOR in names,
            methods=methods,
            kill_interval_s=options.kill_interval,
            has_noise=options.noise,
            warm_spare=options.warm_spare,
            engine={
                "data_parallel_size": options.engines,
                **{field: getattr(options, field) for field in (*_RANKS, *_WEIGHTS)},
            },
            has_network=options.network,
            has_ray=has_ray,
            has_ssl=options.ssl,
            json_path=options.json,
        )
    )


def _check_victims_of_others(options: argparse.Namespace, names: set[str]) -> None:
    """A daemon that is not the run's own keeps its supervisor, and its other processes unless it is said."""
    if _SUPERVISOR in names:
        raise InputError("kills", options.kills, "no supervisor with --attach: that would end the daemon")
    if names - {"http", "client"} and not options.kill_others:
        raise InputError(
            "kills", options.kills, "http, client or none with --attach; --kill-others allows core and worker"
        )


def _run_hostile(options: argparse.Namespace) -> int:
    """Its daemon and server are its own, since it takes all that they have and deletes their files."""
    ray = "distributed_executor_backend"
    given = ("attach", "reproduce", "kills", "warm_spare", *_RANKS, *_WEIGHTS, "network", "ssl", ray)
    for field in given:
        value = getattr(options, field)
        if value not in (None, False, 1, "mp", "pocket"):
            raise InputError(field, value, "not given with --hostile, which attacks an engine of its own")
    from .hostile.attacks import ATTACKS
    from .hostile.run import HostileOptions, run_hostile

    known = tuple(ATTACKS)
    names = known if options.attacks is None else _parse_names("attacks", options.attacks, known)
    return run_hostile(
        HostileOptions(
            seed=options.seed,
            duration_s=options.duration,
            max_tokens=options.max_tokens,
            attacks=names,
            json_path=options.json,
        )
    )


def _check_positive(options: argparse.Namespace, *fields: str) -> None:
    for field in fields:
        if not 0 < getattr(options, field) < float("inf"):
            raise InputError(field, getattr(options, field), "a number above 0")


def _simulate(options: argparse.Namespace) -> int:
    if options.simulate < 1:
        raise InputError("simulate", options.simulate, "at least 1 seed")
    for field in ("attach", "reproduce", "hostile"):
        if getattr(options, field) not in (None, False):
            raise InputError(
                field, getattr(options, field), "not given with --simulate, which has no processes"
            )
    from ..sim.simulate import simulate

    return simulate(range(options.seed, options.seed + options.simulate))


def _parse_names(field: str, text: str, allowed: tuple[Any, ...]) -> tuple[Any, ...]:
    """Names with commas between them; 'none' is no name."""
    names = () if text == "none" else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in allowed:
            raise InputError(field, text, f"none, or of {', '.join(allowed)} with commas between them")
    return names


def _make_parser() -> Parser:
    parser = Parser("quire stress", "Load and deaths together: does every request get its tokens?", _EPILOG)
    add = parser.add_argument
    add("--attach", metavar="NAME", help="a running daemon instead of one of its own")
    add("--kill-others", action="store_true", help="allow to kill that daemon's processes")
    add("--seed", type=int, default=0, metavar="N", help="of the load and the kills (0)")
    add("--duration", type=float, metavar="S", help="of the load (60), of the attacks of --hostile (300)")
    add("--rate", type=float, default=6.0, metavar="R", help="requests/s, Poisson (6)")
    add("--max-tokens", type=int, default=200, metavar="N", help="longest answer (200)")
    add(
        "--kills",
        metavar="ROLES",
        help="who dies: core,worker,http,client and, at last, supervisor (all; http,client with --attach)",
    )
    text = "with which signals (KILL,TERM,STOP,STOP+CONT)"
    add("--signals", default="KILL,TERM,STOP,STOP+CONT", metavar="HOW", help=text)
    text = "one kill in each (8), later where the engine would give up"
    add("--kill-interval", type=float, default=8.0, metavar="S", help=text)
    text = "storms of broken connections, and junk to every socket (on)"
    add("--noise", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--engines", type=int, default=1, metavar="N", help="of its own daemon, any of which may die (1)")
    add("--network", action="store_true", help="clients come to its own daemon over TCP, with keys")
    text = "the server speaks TLS, with certificates that openssl makes and that are replaced meanwhile"
    add("--ssl", action="store_true", help=text)
    add("--warm-spare", action="store_true", help="the engine keeps a spare for the next worker")
    text = "ranks of each stage of the engine, any of which may be the worker that is killed (1)"
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help=text)
    text = "ray: its workers are on nodes of a Ray that this machine plays, where actor and node die too (mp)"
    add("--distributed-executor-backend", choices=("mp", "ray"), default="mp", help=text)
    add("--pipeline-parallel-size", type=int, default=1, metavar="N", help="stages of the engine (1)")
    add("--model", default=_WEIGHTS["model"], help="of the engine: a folder or .gguf file (pocket)")
    text = "of the engine's weights, while they are read (none)"
    add("--quantization", choices=get_args(Quantization), metavar="FORMAT", help=f"int4, int8 or fp8 {text}")
    add(
        "--reproduce", type=int, metavar="N", help="N requests, one death of each kind, beside Dynamo's table"
    )
    add(
        "--hostile",
        action="store_true",
        help="nobody is killed: one key's attacks beside 16 ordinary streams of another key",
    )
    add("--attacks", metavar="NAMES", help="which attacks --hostile plays (all)")
    text = "no processes: N seeds of the simulator, whose messages are lost, late and doubled"
    add("--simulate", type=int, metavar="N", help=text)
    add("--json", metavar="FILE", help="write every figure to a file too")
    return parser
