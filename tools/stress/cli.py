"""`quire stress`: parses what is to be endured and hands over to those who play it, loaded only then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ...ipc.errors import InputError
from ..options import parse_options
from ..sigterm import unwinding_at_sigterm
from .options import ENGINE_FIELDS, Options, parse_names

_EPILOG = """\
Requests of known tokens come over HTTP, also in the background, and from AsyncLLM and LLM at once while
processes are killed. Exit code 1 when a request is lost, fails or gets another token than in a run that
nothing disturbs, or when a block, a process, a file, a file descriptor or a stored response is left.

The engine is one of its own, and everything stays on this machine: sockets in a private folder, HTTP on
127.0.0.1.

With --hostile 16 streams of one key run undisturbed first, then beside attacks that another key, nobody's
key, or a program of the same user may make: requests as large as they may be, floods, connections that are
slow, silent or without end, descriptors and disks that run out, files that vanish. Exit code 1 when a stream
gets another token, when its p99 gap or time to first token is over twice the undisturbed one and 100 ms, when
a process is lost, grows beyond its bound or stays large, or when an attack gets an answer that it may not.
"""
_BACKEND = "distributed_executor_backend"
# What is refused beside an option: the others, and how they are told.
_CONFLICTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "simulate",
        ("reproduce", "hostile", "long_prompt"),
        "not given with --simulate, which has no processes",
    ),
    (
        "hostile",
        ("reproduce", "kills", "warm_spare", *ENGINE_FIELDS, "network", "ssl", _BACKEND),
        "not given with --hostile, which attacks an engine of its own",
    ),
    (
        "long_prompt",
        ("reproduce", "hostile", "kills", "warm_spare", "network", "ssl", "engines", _BACKEND),
        "not given with --long-prompt, which kills nobody",
    ),
    ("reproduce", ("ssl", _BACKEND), "not given with --reproduce, which kills its engine"),
    ("reproduce", ENGINE_FIELDS, "{default} with --reproduce"),
)


def run(argv: Sequence[str]) -> int:
    """Run `quire stress`."""
    options = parse_options(Options, "quire stress", argv, _EPILOG)
    _check_conflicts(options)
    with unwinding_at_sigterm():
        if options.simulate is not None:
            from ..sim.simulate import simulate

            return simulate(range(options.seed, options.seed + options.simulate))
        if options.hostile:
            return _run_hostile(options)
        if options.long_prompt is not None:
            from .long_prompt import run_long_prompt

            return run_long_prompt(options.long_prompt, options.engine)
        from .stress import run_reproduction, run_stress

        if options.reproduce is None:
            return run_stress(options)
        return run_reproduction(options.reproduce, options.max_tokens, options.seed, options.warm_spare)


def _run_hostile(options: Options) -> int:
    """Its daemon and server are its own, since it takes all that they have and deletes their files."""
    from .hostile.attacks import ATTACKS
    from .hostile.run import HostileOptions, run_hostile

    known = tuple(ATTACKS)
    names = known if options.attacks is None else parse_names("attacks", options.attacks, known)
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
