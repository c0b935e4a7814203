"""Scenario: everything that one simulated run is made of, drawn from a seed; it says no more than its text.

Sizes are small on purpose: a run of some milliseconds finds more an hour than a long one, because the
interesting moments are where few things meet.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, TypeVar, get_args

import msgspec

from ...ipc.params.pooling_params import PoolingTask
from ...ipc.spec.config import EngineConfig, RecoveryConfig, SchedulerConfig, SchedulingPolicy
from ...ipc.spec.model_spec import PoolingSpec
from .fake_worker import make_config

MAX_MODEL_LEN = 48
BLOCK_SIZE = 8
_Item = TypeVar("_Item")
_NO_LIMIT = 1_000_000
_POOLING_SHARE = 0.3  # of the runs
_WORK_SHARE = 0.25  # likewise
_GROUPS_SHARE = 0.5  # likewise
_STATES_SHARE = 0.5  # likewise
_HANG_SHARE = 0.2  # likewise
_LONG_SHARE = 0.15  # likewise
_FAR_SHARE = 0.15  # likewise
_WORK_US = (0, 300, 4000, 9000, 9000, 10_000)
_BUSY_S = 0.6  # requests arrive and faults happen within this time


class FaultKind(Enum):
    """What can go wrong at a moment."""

    CORE_CRASH = "core crash"
    WORKER_CRASH = "worker crash"
    STEP_FAILURE = "step failure"
    SHORTAGE = "shortage"  # the next step runs out of memory
    CLIENT_CRASH = "client crash"  # its process is gone, and another one comes
    CONNECTION_LOSS = "connection loss"
    CLIENT_STOP = "client stop"  # it reads nothing for a while
    DRAIN = "drain"  # an engine of several is to have nothing for a while
    ADD = "add"  # one more engine
    REMOVE = "remove"  # one of them is to end
    RESTART = "restart"


COMMANDS = frozenset({FaultKind.DRAIN, FaultKind.ADD, FaultKind.REMOVE, FaultKind.RESTART})  # to several
_DRAWN_KINDS = [kind for kind in FaultKind if kind not in COMMANDS]
_STARTS = ("", "", "killed", "short", "missing", "hang", "crash")

# A step with it raises, kills the worker, has no finite logits, runs out of memory, kills the core.
_DrawnPoison = Literal["step", "death", "logits", "memory", "core", "grammar"]
PoisonKind = Literal[_DrawnPoison, "hang"]  # takes too long


@dataclass(frozen=True, slots=True)
class Fault:
    """`client`, `engine`: the number of the one that it happens to."""

    at: float
    kind: FaultKind
    client: int = 0
    lasts_s: float = 0.0  # until what was lost is there again
    engine: int = 0
    start: str = ""  # how the start that it makes goes: "" well


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a client. Times are seconds from the start."""

    name: str
    client: int
    at: float
    prompt: tuple[int, ...]
    max_tokens: int
    num_stops: int = 0  # so many token ids of the vocabulary end it
    priority: int = 0
    tenant: str = ""
    abort_at: float | None = None
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    grammar: str = ""  # its tokens depend on it
    work_us: int = 0  # that each of its tokens takes for itself
    poison: PoisonKind | None = None
    poison_from: int = (
        0  # output position from which the poison works; of "hang": tokens since it has its row
    )
    beam_width: int | None = None  # of a beam search
    pooling: PoolingTask | None = None  # it answers with vectors


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run. `rng_seed` draws what remains: how long each message and step takes."""

    rng_seed: int
    clients: tuple[Literal["sync", "async"], ...]
    requests: tuple[SimRequest, ...]
    faults: tuple[Fault, ...]
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    capacity: int | None  # tokens of a step that the device has memory for; None: for all
    policy: SchedulingPolicy
    max_num_queued_reqs: int | None
    run_ahead: int
    caching: bool
    delay_s: float  # a message takes up to this long, one in ten up to ten times
    high_water_mark: int  # messages on the way to one client
    repeat_share: float  # of the messages to clients that arrive again later
    num_engines: int = 1
    num_stages: int = 1
    token_s: float = 0.0  # that each token of a prompt takes in a step
    kv_windows: tuple[int | None, ...] = (None,)  # of the model's KV groups
    num_snapshots: int | None = None  # state slots beside those of rows; None: no layer is recurrent
    window_bytes: int | None = None  # that a client of the network has on its way unread; None: it is local

    @property
    def poisons(self) -> dict[str, SimRequest]:
        """The requests that are poison, by name."""
        return {request.name: request for request in self.requests if request.poison is not None}

    def make_config(self) -> EngineConfig:
        """The engine's configuration."""
        scheduler = SchedulerConfig(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            policy=self.policy,
            max_num_queued_reqs=self.max_num_queued_reqs,
            run_ahead=self.run_ahead,
            num_stages=self.num_stages,
        )
        config = make_config(
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=self.caching,
            scheduler=scheduler,
            pooling=PoolingSpec(pools=("last",)),
            kv_windows=self.kv_windows,
            num_state_slots=None if self.num_snapshots is None else self.max_num_seqs + self.num_snapshots,
        )
        # The engine's end after too many deaths is not simulated.
        return msgspec.structs.replace(
            config, recovery=RecoveryConfig(max_core_restarts=_NO_LIMIT, max_worker_restarts=_NO_LIMIT)
        )

    def describe(self) -> str:
        """All options, a request and a fault a line."""
        names = [name for name in self.__slots__ if name not in ("requests", "faults")]
        lines = [", ".join(f"{name}={getattr(self, name)!r}" for name in names)]
        lines += [f"  {_describe_set_fields(request)}" for request in self.requests]
        lines += [f"  {_describe_set_fields(fault)}" for fault in self.faults]
        return "\n".join(lines)

    def list_smaller(self) -> Iterator[Scenario]:
        """This scenario without one half, quarter, ... or one of its requests or faults."""
        for requests in _list_shorter(self.requests):
            yield replace(self, requests=requests)
        for faults in _list_shorter(self.faults):
            yield replace(self, faults=faults)
        if self.repeat_share:
            yield replace(self, repeat_share=0.0)
        if self.capacity is not None:
            yield replace(self, capacity=None)
        if self.token_s:
            yield replace(self, token_s=0.0)
        if self.window_bytes is not None:
            yield replace(self, window_bytes=None)
        if self.num_stages > 1:
            yield replace(self, num_stages=1)
        if self.kv_windows != (None,):
            yield replace(self, kv_windows=(None,))
        if self.num_snapshots is not None:
            yield replace(self, num_snapshots=None)
        if self.num_engines > 2:
            faults = (replace(fault, engine=min(fault.engine, 1)) for fault in self.faults)
            yield replace(self, num_engines=2, faults=tuple(faults))


def draw_scenario(seed: int) -> Scenario:
    """The scenario of a seed: the same on every machine and Python."""
    rng = random.Random(seed)
    num_clients = rng.choice([1, 2, 2, 3])
    delay_s = rng.choice([0.001, 0.005, 0.02])
    scenario = Scenario(
        rng_seed=rng.getrandbits(32),
        clients=tuple(rng.choice(("sync", "async")) for _ in range(num_clients)),
        requests=tuple(_draw_request(rng, i, num_clients) for i in range(rng.randint(1, 9))),
        faults=tuple(sorted(_draw_faults(rng, num_clients), key=lambda fault: fault.at)),
        num_blocks=rng.randint(-(-MAX_MODEL_LEN // BLOCK_SIZE), 14),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.choice([8, 16, 40, 200]),
        capacity=rng.choice([None] * 7 + [rng.randint(1, 20)]),
        policy=rng.choice((*get_args(SchedulingPolicy), "fair")),
        max_num_queued_reqs=rng.choice([None, None, 2]),
        run_ahead=rng.choice([1, 2, 2]),
        caching=rng.random() < 0.75,
        delay_s=delay_s,
        high_water_mark=rng.choice([1, 3, 1000]),
        repeat_share=rng.choice([0.0, 0.0, 0.1]),
    )
    scenario = replace(scenario, num_stages=random.Random(f"stages/{seed}").choice([1, 1, 1, 2, 3]))
    scenario = _maybe_be_far(random.Random(f"window/{seed}"), scenario)
    scenario = _maybe_work(random.Random(f"work/{seed}"), scenario)
    scenario = _maybe_hang(random.Random(f"hang/{seed}"), scenario)
    scenario = _maybe_be_long(random.Random(f"long/{seed}"), scenario)
    scenario = _maybe_forget(random.Random(f"groups/{seed}"), scenario)
    states_rng = random.Random(f"states/{seed}")
    if states_rng.random() < _STATES_SHARE:
        scenario = replace(scenario, num_snapshots=states_rng.choice([0, 1, 1, 2, 3, 5]))
    pooling_rng = random.Random(f"pooling/{seed}")
    if pooling_rng.random() >= _POOLING_SHARE:
        return scenario
    return replace(
        scenario, requests=tuple(_maybe_pool(pooling_rng, request) for request in scenario.requests)
    )


def draw_group_scenario(seed: int) -> Scenario:
    """The scenario of a seed with two or three engines, which are drained too."""
    scenario, rng = draw_scenario(seed), random.Random(f"group/{seed}")
    num_engines = rng.choice([2, 2, 3])
    faults = [replace(fault, engine=rng.randrange(num_engines)) for fault in scenario.faults]
    for _ in range(rng.choice([0, 0, 1, 2])):
        at, lasts_s = rng.uniform(0.0, _BUSY_S), rng.choice([0.01, 0.05, 0.2])
        faults.append(Fault(at, FaultKind.DRAIN, lasts_s=lasts_s, engine=rng.randrange(num_engines)))
    for _ in range(rng.choice([0, 1, 2, 3])):
        kind = rng.choice([FaultKind.ADD, FaultKind.ADD, FaultKind.REMOVE, FaultKind.RESTART])
        # The first engine stays, and is not lost for good: somebody is left.
        engine = rng.randrange(1, num_engines + 1)
        at, lasts_s = rng.uniform(0.0, _BUSY_S), rng.choice([0.01, 0.05, 0.2])
        faults.append(Fault(at, kind, lasts_s=lasts_s, engine=engine, start=rng.choice(_STARTS)))
    faults.sort(key=lambda fault: fault.at)
    return replace(scenario, num_engines=num_engines, faults=tuple(faults))


def _maybe_work(rng: random.Random, scenario: Scenario) -> Scenario:
    """In some runs several requests at once take long for themselves."""
    if rng.random() >= _WORK_SHARE:
        return scenario
    requests = [
        replace(one, work_us=rng.choice(_WORK_US), at=one.at / 10, max_tokens=rng.randint(8, 18))
        if one.beam_width is None and one.abort_at is None
        else one
        for one in scenario.requests
    ]
    return replace(scenario, requests=tuple(requests), max_num_seqs=6, num_blocks=30)


def _maybe_hang(rng: random.Random, scenario: Scenario) -> Scenario:
    """In some runs one to three requests take too long, at once or again and again later."""
    if rng.random() >= _HANG_SHARE:
        return scenario
    requests = list(scenario.requests)
    for place in rng.sample(range(len(requests)), min(len(requests), rng.choice([1, 2, 3]))):
        if requests[place].beam_width is None:
            poison_from, max_tokens = rng.choice([0, 0, 1, 3, 5]), rng.randint(8, 18)
            requests[place] = replace(
                requests[place], poison="hang", poison_from=poison_from, max_tokens=max_tokens
            )
    return replace(scenario, requests=tuple(requests))


def _maybe_be_long(rng: random.Random, scenario: Scenario) -> Scenario:
    """In some runs prompts that take long come beside streams."""
    if rng.random() >= _LONG_SHARE:
        return scenario
    requests = [
        replace(one, at=one.at / 10, max_tokens=24, num_stops=0) if one.beam_width is None else one
        for one in scenario.requests
    ]
    for place in range(1, len(requests), 2):
        prompt = tuple(rng.randint(1, 3) for _ in range(rng.randint(36, 44)))
        requests[place] = replace(
            requests[place], at=rng.uniform(0.05, 1.0), prompt=prompt, max_tokens=rng.randint(1, 4)
        )
    return replace(
        scenario, requests=tuple(requests), max_num_batched_tokens=128, num_blocks=30, token_s=0.01
    )


def _maybe_forget(rng: random.Random, scenario: Scenario) -> Scenario:
    """In half of the runs some layers see through windows, and the pool is as small as ever."""
    if rng.random() >= _GROUPS_SHARE:
        return scenario
    window, other = rng.choice([1, 4, 7, 8, 9, 16, 24]), rng.choice([2, 12])
    shapes = [(window,), (None, window), (None, window, window), (window, other), (None, None, window, other)]
    scenario = replace(scenario, kv_windows=rng.choice(shapes))
    least = scenario.make_config().max_blocks_per_request
    num_blocks = scenario.num_blocks - -(-MAX_MODEL_LEN // BLOCK_SIZE) + least
    return replace(scenario, num_blocks=num_blocks)


def _maybe_be_far(rng: random.Random, scenario: Scenario) -> Scenario:
    """In some runs clients come over the network."""
    if rng.random() >= _FAR_SHARE:
        return scenario
    return replace(scenario, window_bytes=rng.choice([1, 400]))


def _maybe_pool(rng: random.Random, request: SimRequest) -> SimRequest:
    """One in two answers with vectors, in the place of text."""
    task = rng.choice([None, None, "embed", "token_embed"])
    if task is None:
        return request
    poison = None if request.poison == "grammar" else request.poison
    return replace(request, grammar="", beam_width=None, poison=poison, poison_from=0, pooling=task)


def _draw_request(rng: random.Random, index: int, num_clients: int) -> SimRequest:
    at = rng.choice([0.0, rng.uniform(0.0, _BUSY_S)])
    shared = (7,) * rng.choice([0, 0, 8, 11, 16])
    own = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 8)))
    poison = rng.choice(get_args(_DrawnPoison)) if rng.random() < 0.08 else None
    beam_width = rng.choice([None] * 5 + [1, 2, 3])
    return SimRequest(
        name=f"r{index}",
        client=rng.randrange(num_clients),
        at=at,
        prompt=shared + own,
        max_tokens=rng.choice([1, rng.randint(1, 8), rng.randint(8, 18)]),
        num_stops=rng.choice([0, 0, 40]),
        priority=rng.randrange(3),
        tenant=rng.choice(["", "", "a", "b"]),
        abort_at=at + rng.uniform(0.0, 0.4) if rng.random() < 0.15 else None,
        timeout_s=rng.uniform(0.05, 1.0) if rng.random() < 0.1 else None,
        queue_timeout_s=rng.uniform(0.02, 0.2) if rng.random() < 0.1 else None,
        grammar=rng.choice(["", "", "", "start: /a/", "start: /b/"]) if beam_width is None else "",
        poison=poison,
        poison_from=rng.choice([0, 3]) if poison else 0,
        beam_width=beam_width,
    )


def _draw_faults(rng: random.Random, num_clients: int) -> Iterator[Fault]:
    for _ in range(rng.choice([0, 1, 2, 3, 4, 6])):
        at = rng.uniform(0.0, _BUSY_S)
        for _ in range(rng.choice([1, 1, 1, 2])):  # some meet another one closely
            kind = rng.choice(_DRAWN_KINDS)
            client = rng.randrange(num_clients) if "CLIENT" in kind.name or "CONN" in kind.name else 0
            yield Fault(at, kind, client, lasts_s=rng.choice([0.01, 0.05, 0.2]))
            at += rng.uniform(0.0, 0.05)


def _list_shorter(items: tuple[_Item, ...]) -> Iterator[tuple[_Item, ...]]:
    size = len(items)
    while size:
        for start in range(0, len(items), size):
            yield items[:start] + items[start + size :]
        size //= 2


def _describe_set_fields(item: SimRequest | Fault) -> str:
    defaults = {name: field.default for name, field in type(item).__dataclass_fields__.items()}
    values = [(name, getattr(item, name)) for name in type(item).__slots__]
    shown = [f"{name}={value!r}" for name, value in values if value != defaults[name]]
    return f"{type(item).__name__}({', '.join(shown)})"
