"""`quire stress`: what its options mean, from a site over the load to the exit code."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec

from ...ipc.errors import InputError
from ...ipc.spec.config import RecoveryConfig
from ..bench.machine import print_machine
from ..bench.table import format_table
from .asks import (
    CLIENT_KINDS,
    Arrival,
    Ask,
    ClientKind,
    ClientPlan,
    deal,
    draw_arrivals,
    draw_conversations,
    draw_pool,
    list_all,
)
from .certificates import open_certificates
from .checks import count_failed
from .kills import Kill, KillPace, Role, draw_kills
from .last_kill import kill_supervisor
from .measures import find_recoveries, measure
from .options import Options
from .ray_nodes import open_ray
from .record import Golden
from .report import BROKEN_EXIT_CODE, format_report, format_run, summarize, write_run
from .run import StressResult, run_load
from .site import Site, open_site
from .victims import Victims

_POOL_SIZE = 32
_NUM_CONVERSATIONS = 8  # asked for in the background, beside the pool
_BACKGROUND_SHARE = 0.2  # of the rate, beside it
_BACKGROUND_ODD_SHARE = 0.6  # half of them are cancelled
_ODD_SHARE = 0.2  # of the requests: their readers leave, or are slow
_TIMEOUT_S = 90.0  # of one request: some deaths, and a queue behind them
_USERS = 8  # of --reproduce
_ENGINE_CLIENTS: tuple[ClientKind, ...] = ("async", "llm")  # whose process is the engine's client itself

# NVIDIA Dynamo, tests/fault_tolerance/README.md: no redundancy, 8 clients, an 8B model, 8 L40.
_DYNAMO: dict[Role, tuple[str, str]] = {
    "core": ("decode worker: 280", "38.0"),
    "worker": ("vLLM worker child: 680", "never"),
    "http": ("frontend: 144", "17.5"),
}


def run_stress(options: Options) -> int:
    """Run, print and write; 0 when every invariant holds."""
    arrivals = draw_arrivals(options.seed, options.rate, options.duration_s, _POOL_SIZE, _ODD_SHARE)
    kills = draw_kills(
        options.seed, options.roles, options.methods, options.kill_interval, options.duration_s
    )
    facts = print_machine()
    left: list[str] = []
    recovery = RecoveryConfig(warm_spare=options.warm_spare)
    with (
        open_ray(options.engines) if options.has_ray else contextlib.nullcontext() as ray,
        open_certificates() if options.ssl else contextlib.nullcontext() as certificates,
        open_site(
            left, recovery, options.engine, has_network=options.network, ray=ray, certificates=certificates
        ) as site,
    ):
        check_kills(options.roles, site.recovery)
        pool = draw_pool(options.seed, _POOL_SIZE, options.max_tokens, site.abilities)
        spoken = draw_conversations(options.seed, _NUM_CONVERSATIONS, options.max_tokens, site.abilities)
        first, pool = len(pool), pool + spoken
        golden = site.compute_golden(pool)
        site.start_grammar_processes()
        kinds = CLIENT_KINDS if site.grpc_address else CLIENT_KINDS[:-1]
        plans = [_make_plan(site, kind, pool, share) for kind, share in deal(arrivals, kinds).items()]
        if spoken:
            rate = _BACKGROUND_SHARE * options.rate
            talk = draw_arrivals(options.seed, rate, options.duration_s, len(spoken), _BACKGROUND_ODD_SHARE)
            talk = [msgspec.structs.replace(one, ask=first + one.ask) for one in talk]
            plans.append(_make_plan(site, "background", pool, talk))
        endless = [
            msgspec.structs.replace(
                _make_plan(site, kind, pool, list_all(pool)), is_endless=True, max_concurrency=1
            )
            for kind in _ENGINE_CLIENTS
        ]
        victims = Victims(endless) if "client" in options.roles else None
        noise_seed = options.seed if options.noise else None
        with contextlib.nullcontext() if certificates is None else certificates:
            result = run_load(site, plans, kills, golden, noise_seed, victims)
        if certificates is not None:
            result.broken += certificates.find_stale(site.url)
        if options.kills_supervisor:
            result.broken += kill_supervisor(site, endless, golden)
    result.broken += left
    print(format_run(result))
    print(
        f"seed {options.seed}: {len(arrivals)} requests in {result.duration_s:.1f} s, "
        f"{len(result.strikes)} of {len(kills)} kills done, "
        f"{result.num_lost_clients} clients lost; beside them {result.noise or 'no noise'}"
    )
    if certificates is not None:
        print(f"its clients spoke TLS with a server that had {certificates.num_made} certificates in turn")
    if options.kills_supervisor:
        print("then the supervisor was killed, and another daemon started in its place")
    write_run(result, facts, options.json)
    return BROKEN_EXIT_CODE if result.broken else 0


def check_kills(roles: Sequence[Role], recovery: RecoveryConfig) -> None:
    """Raises InputError for a process that an engine with these limits may not lose."""
    pace = KillPace(recovery)
    for role in roles:
        if not pace.allows(role):
            limits = f"max_core_restarts={recovery.max_core_restarts}"
            limits += f" and max_worker_restarts={recovery.max_worker_restarts}"
            raise InputError("kills", ",".join(roles), f"no {role} of an engine with {limits}")


def run_reproduction(num_requests: int, max_tokens: int, seed: int, warm_spare: bool) -> int:
    """Dynamo's table: 8 clients and one death in the middle, once for each kind of process."""
    if num_requests < _USERS:
        raise InputError("reproduce", num_requests, f"at least {_USERS}, a request for each client")
    print_machine()
    pool = draw_pool(seed, _POOL_SIZE, max_tokens)
    broken: list[str] = []
    rows: list[list[str]] = []
    with open_site(broken, RecoveryConfig(warm_spare=warm_spare)) as site:
        golden = site.compute_golden(pool)
        arrivals = list_all(pool, num_requests)
        plan = msgspec.structs.replace(_make_plan(site, "http", pool, arrivals), max_concurrency=_USERS)
        for role in _DYNAMO:
            result = _kill_one(site, plan, golden, role)
            broken += result.broken
            rows.append(_make_row(role, result))
    header = ["killed once", "failed", "tried again", "recovery s", "p99 gap ms"]
    note = (
        f"{_USERS} clients over HTTP, {num_requests} requests, up to {max_tokens} tokens; a client that "
        "gets a broken connection or a 503 asks again.\n"
        "recovery: from the kill to the end of the longest silence (http: until the last broken request has "
        "a token)\nDynamo's own figures are of a larger model on other "
        "machines: the counts compare, the seconds do not"
    )
    print(format_report([format_table([*header, "Dynamo: failed", "recovery s"], rows), note], broken))
    return BROKEN_EXIT_CODE if broken else 0


def _make_plan(site: Site, kind: ClientKind, pool: list[Ask], arrivals: list[Arrival]) -> ClientPlan:
    """gRPC knows nothing of logits processors and vectors, and its requests, as AsyncLLM's, are prompts."""
    if kind in ("async", "grpc"):
        arrivals = [one for one in arrivals if pool[one.ask].chat is None]
    if kind == "grpc":
        arrivals = [one for one in arrivals if not (pool[one.ask].extra_args or pool[one.ask].embeds)]
    return site.plan_client(kind, pool, arrivals, _TIMEOUT_S)


def _kill_one(site: Site, plan: ClientPlan, golden: list[Golden], role: Role) -> StressResult:
    """The death comes when a third of the answers are there."""
    kill = Kill(0.0, role, "KILL", 0, 0.0, after_ended=len(plan.arrivals) // 3)
    return run_load(site, [plan], [kill], golden)


def _make_row(role: Role, result: StressResult) -> list[str]:
    latency = measure(result.records)
    recoveries = find_recoveries(result.records, result.strikes, result.started_at)
    return [
        role,
        f"{count_failed(result.records)} of {len(result.records)}",
        str(sum(len(record.broken_at) for record in result.records)),
        summarize(recoveries)[0],
        "-" if latency is None else latency.gaps.list_ms()[1],
        *_DYNAMO[role],
    ]
