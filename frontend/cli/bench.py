"""`quire bench`: parses what is to be measured and hands over to quire.tools.bench, loaded only then."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from ...ipc.errors import InputError, QuireError, did_you_mean
from .exit_codes import ExitCode
from .parser import Parser, UsageError

_HELP = """\
usage: quire bench KIND [OPTIONS]

kinds:
  offline   generated tokens/s of Quire and transformers on the same workloads, side by side
  startup   import, --help, cold start to the first token and where it goes, idle CPU, memory
  core      what the engine core's scheduling costs a step, with a fake worker

`quire bench KIND --help` has the options.
"""


def run(argv: Sequence[str]) -> int:
    """Run `quire bench`."""
    kind = argv[0] if argv else "--help"
    if kind in ("-h", "--help"):
        print(_HELP, end="")
        return ExitCode.OK if argv else ExitCode.USAGE
    runner = _KINDS.get(kind)
    if runner is None:
        raise UsageError(f"bench={kind!r}: one of {', '.join(_KINDS)}{did_you_mean(kind, _KINDS)}")
    try:
        return runner(argv[1:])
    except subprocess.CalledProcessError as error:
        # What it had to say is on stderr already.
        raise QuireError(f"{' '.join(error.cmd[1:3])} ended with code {error.returncode}") from None


def _run_offline(argv: Sequence[str]) -> int:
    from ...tools.bench import offline

    parser = Parser(
        "quire bench offline",
        "Quire and its peers on the same workloads in one run, each in a process of its own.",
        "workloads:\n" + "".join(f"  {n}  {kind.summary}\n" for n, kind in offline.WORKLOADS.items()),
    )
    parser.add_argument(
        "--model", default="tiny", help="tiny, small (random weights, made on first use), pocket, or a folder"
    )
    parser.add_argument("--workload", nargs="+", choices=tuple(offline.WORKLOADS), metavar="W")
    parser.add_argument(
        "--peer",
        nargs="+",
        choices=("none", "transformers", *offline.PEERS),
        default=["transformers"],
        metavar="PEER",
        help=f"none, transformers (all three), or of {', '.join(offline.PEERS)}",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measured rounds (3)")
    parser.add_argument("--json", metavar="FILE", help="write every figure to a file too")
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an EngineArgs field for Quire",
    )
    options = parser.parse(argv)
    _check_count("rounds", options.rounds)
    return offline.run_offline(
        offline.OfflineOptions(
            model=options.model,
            workloads=tuple(options.workload or offline.WORKLOADS),
            peers=_expand_peers(options.peer, tuple(offline.PEERS)),
            rounds=options.rounds,
            json_path=options.json,
            engine_args=dict(_parse_engine_arg(text) for text in options.engine_arg),
        )
    )


def _run_startup(argv: Sequence[str]) -> int:
    from ...tools.bench.startup import run_startup

    parser = Parser("quire bench startup", "What starting costs, measured in fresh processes.")
    parser.add_argument("--model", default="pocket", help="the model of the cold start (pocket)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="cold starts (5)")
    parser.add_argument(
        "--idle", type=float, default=10.0, metavar="S", help="seconds of idling to watch (10)"
    )
    parser.add_argument("--json", metavar="FILE", help="write every figure to a file too")
    options = parser.parse(argv)
    _check_count("rounds", options.rounds)
    return run_startup(options.model, options.rounds, options.idle, options.json)


def _run_core(argv: Sequence[str]) -> int:
    from ...tools.bench.core import run_core

    parser = Parser(
        "quire bench core", "schedule() and update() of 256 running requests, with a fake worker."
    )
    parser.add_argument("--steps", type=int, default=500, metavar="N", help="decode steps to measure (500)")
    options = parser.parse(argv)
    _check_count("steps", options.steps)
    return run_core(options.steps)


def _expand_peers(chosen: Sequence[str], known: tuple[str, ...]) -> tuple[str, ...]:
    if "transformers" in chosen:
        return known
    return tuple(peer for peer in known if peer in chosen)


def _parse_engine_arg(text: str) -> tuple[str, Any]:
    """'max_num_seqs=8' -> ('max_num_seqs', 8); a value that is no JSON is a text."""
    name, separator, value = text.partition("=")
    if not separator:
        raise InputError("engine_arg", text, "NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _check_count(field: str, value: int) -> None:
    if value < 1:
        raise InputError(field, value, "an integer of at least 1")


_KINDS: dict[str, Callable[[Sequence[str]], int]] = {
    "offline": _run_offline,
    "startup": _run_startup,
    "core": _run_core,
}
