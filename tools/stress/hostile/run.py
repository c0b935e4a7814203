"""One hostile run: 16 ordinary streams of one key, undisturbed, then beside attacks, then after them."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ....ipc.daemon.daemon_state import read_state
from ....ipc.daemon.run_dir import find_named
from ....ipc.errors import QuireError
from ....ipc.network.keys import add_client, make_keys
from ....ipc.processes.process import module_command
from ...bench.machine import print_machine
from ..asks import Ask, ClientPlan, draw_pool, list_all
from ..checks import check_records
from ..line_process import ClientProcess, LineProcess, all_ready
from ..measures import Phase, measure
from ..record import Golden
from ..report import BROKEN_EXIT_CODE
from ..samples import Sample, Sampler
from ..server import NUM_HTTP_PROCESSES
from ..site import OWN_NAME, Site, open_started_site
from ..waiting import wait_until
from .judge import (
    LATENCY_MARGIN_S,
    HostileResult,
    check_answers,
    check_costs,
    check_latency,
    check_losses,
    check_memory,
    check_tries,
    measure_costs,
    measure_memory,
)
from .plan import AttackPlan, Played, Target, TurnReport, draw_turns
from .report import format_hostile, write_hostile

NUM_STREAMS = 16
MAX_OPEN_FILES = 1024  # of each process of the site, which the attackers' connections exceed
_POOL_SIZE = 32
_ATTACKED = "attacked"
_ATTACKERS_KEYS = "attackers"  # their folder with a key for the daemon's listener
_KEYS = ("ordinary-streams", "attackers")
_TIMEOUT_S = 60.0  # of an ordinary request
_WARM_TIMEOUT_S = 30.0
_LATE_S = 30.0  # that the attacks may take beyond their time
_SHARE = 8  # the streams run undisturbed for an eighth of the attacks' time, and again after them
_MIN_ASIDE_S, _MAX_ASIDE_S = 1.0, 30.0  # but as long as this
_COUNTS = {"core": 1, "worker": 1, "http": NUM_HTTP_PROCESSES}
_ENGINE_OPTIONS = ("--num-gpu-blocks-override", "2048", "--scheduling-policy", "fair")


@dataclass(frozen=True, slots=True)
class HostileOptions:
    """See `quire stress --help`.

    scale: of the attacks' sizes and counts. margin_s: what latencies may gain beside the factor.
    """

    seed: int
    duration_s: float
    max_tokens: int
    attacks: tuple[str, ...]
    margin_s: float = LATENCY_MARGIN_S
    scale: float = 1.0
    json_path: str | None = None


def run_hostile(options: HostileOptions) -> int:
    """Run, print and write; 0 when every invariant holds, else 1."""
    facts = print_machine()
    result = play_hostile(options)
    print(format_hostile(result, options.margin_s))
    write_hostile(result, facts, options.json_path)
    return BROKEN_EXIT_CODE if result.broken else 0


def play_hostile(options: HostileOptions) -> HostileResult:
    """Run and judge, on a site of its own."""
    pool = draw_pool(options.seed, _POOL_SIZE, options.max_tokens)
    result, left = HostileResult(), list[str]()
    with open_started_site(left, _start_daemon) as site:
        site.fill_cache()
        golden = site.compute_golden(pool)
        with contextlib.ExitStack() as stack:
            _play(site, options, pool, result, stack)
        _judge(site, options, golden, result)
    result.broken += left
    return result


def _play(
    site: Site, options: HostileOptions, pool: list[Ask], result: HostileResult, stack: contextlib.ExitStack
) -> None:
    client, attacker = ClientProcess(_make_client_plan(site, pool)), _start_attacker(site, options)
    stack.enter_context(all_ready([client, attacker]))
    sampler = stack.enter_context(Sampler(site))
    client.begin()
    wait_until(lambda: len(client.items) >= NUM_STREAMS or site.has_ended, _WARM_TIMEOUT_S)
    # 1. Undisturbed.
    aside_s = min(_MAX_ASIDE_S, max(_MIN_ASIDE_S, options.duration_s / _SHARE))
    times = [time.monotonic()]
    wait_until(lambda: site.has_ended, aside_s)
    # 2. Attacked.
    times.append(time.monotonic())
    attacker.begin()
    wait_until(lambda: not attacker.is_running or site.has_ended, options.duration_s + _LATE_S)
    if attacker.is_running:
        attacker.kill()
    # 3. Settling.
    times.append(time.monotonic())
    wait_until(lambda: site.has_ended, aside_s)
    times.append(time.monotonic())
    client.close_input()
    client.end(0.0 if site.has_ended else 2 * _TIMEOUT_S)
    result.started_at, result.records, result.reports = times[0], client.items, attacker.items
    result.samples = sampler.samples
    result.phases = [
        Phase(name, *span, is_to_blame=name == _ATTACKED)
        for name, span in zip(("undisturbed", _ATTACKED, "settling"), itertools.pairwise(times), strict=True)
    ]
    if client.last is None:
        result.broken.append(f"the ordinary client did not end; {len(client.items)} of its requests did")
    if attacker.last is None:
        result.broken.append("the attacks were not played to their end")


def _judge(site: Site, options: HostileOptions, golden: Sequence[Golden], result: HostileResult) -> None:
    calm, hostile, settling = result.phases
    said = (site.read_server_log(), site.read_log())
    result.logs = "".join(said)
    result.memories = measure_memory(result.samples, calm, settling)
    result.lost_at = _find_new(result.samples)
    if site.has_ended:
        words = [(text.strip() or "it has said nothing").splitlines()[-1] for text in said]
        result.broken.append(f"ended: the server ({words[0]}), or its daemon ({words[1]})")
    result.broken += check_losses(result.samples, _COUNTS, result.logs)
    latencies = [measure(result.records, phase) for phase in (calm, hostile)]
    result.broken += check_latency(latencies[0], latencies[1], options.margin_s)
    result.costs = measure_costs(result.records, result.reports, latencies[0], options.margin_s)
    result.broken += check_costs(result.costs)
    result.broken += check_tries(result.records)
    result.broken += check_answers(result.reports)
    result.broken += check_memory(result.memories)
    result.broken += check_records([], result.records, golden)
    if not site.has_ended:
        result.broken += _check_idle(site)


def _check_idle(site: Site) -> list[str]:
    try:
        return site.check_idle()
    except (QuireError, OSError) as error:
        return [f"the daemon cannot be asked after the attacks: {error}"]


def _find_new(samples: Sequence[Sample]) -> list[float]:
    """When a process of the site was seen first that is not one of the first of its role."""
    first_at: dict[int, tuple[float, str]] = {}
    for sample in samples:
        first_at.setdefault(sample.pid, (sample.at, sample.role))
    begins_at = min((at for at, _ in first_at.values()), default=0.0)
    return [at for at, role in first_at.values() if role in _COUNTS and at > begins_at + 1.0]


def _make_client_plan(site: Site, pool: list[Ask]) -> ClientPlan:
    plan = site.plan_client("http", pool, list_all(pool), _TIMEOUT_S)
    return msgspec.structs.replace(plan, api_key=_KEYS[0], is_endless=True, max_concurrency=NUM_STREAMS)


def _start_attacker(site: Site, options: HostileOptions) -> LineProcess[TurnReport, Played]:
    url = urlsplit(site.url)
    target = Target(
        host=url.hostname or "",
        port=url.port or 0,
        api_key=_KEYS[1],
        model=site.model,
        daemon=site.daemon,
        supervisor_pid=site.supervisor.pid,
        server_pid=site.server.pid,
        grpc_address=site.grpc_address,
        network_address=_find_listen(),
        network_keys=os.path.join(os.environ["XDG_RUNTIME_DIR"], _ATTACKERS_KEYS),
        keyless_port=urlsplit(site.keyless_url).port or 0,
        scale=options.scale,
    )
    turns = draw_turns(options.seed, options.attacks, options.duration_s)
    plan = AttackPlan(target=target, seed=options.seed, turns=turns)
    return LineProcess(f"{__package__}.attacker", plan, TurnReport, Played)


def _find_listen() -> str:
    """Where the daemon of this run listens."""
    state = read_state(find_named(OWN_NAME))
    return "" if state is None else state.listen


def _start_daemon(folder: Path) -> dict[str, Any]:
    """One whose processes, as its server's, have few descriptors."""
    prefix = ("sh", "-c", f'ulimit -n {MAX_OPEN_FILES} && exec "$@"', "sh")
    keys = folder / "keys"
    make_keys(keys)
    add_client(keys, folder / _ATTACKERS_KEYS)
    command = [*prefix, *module_command("quire", "daemon", "start", "--name", OWN_NAME)]
    command += ["--listen", "tcp://127.0.0.1:0", "--keys", str(keys)]
    done = subprocess.run([*command, *_ENGINE_OPTIONS], capture_output=True, text=True)
    if done.returncode:
        raise QuireError(f"quire daemon start: {done.stderr.strip() or 'failed'}")
    return {"api_keys": _KEYS, "command_prefix": prefix, "has_keyless": True}
