"""StatsCollector: what a person or a monitor sees of the engine: its stats, a snapshot, its metrics.

A look is paid by whoever looks. Its cost is bounded by MAX_REQUEST_VIEWS, MAX_BLOCK_CELLS and the running
requests, whatever waits: 0.5 ms with 256 running and 10,000 waiting on 2 cores of a Xeon.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field

import msgspec

from ...ipc.protocol.engine_views import (
    ClientView,
    EngineMetrics,
    EngineSnapshot,
    RequestView,
    SchedulerStats,
)
from ...ipc.spec.config import EngineConfig
from ..kv.block_pool import BlockPool
from ..scheduling.request import Request, RequestStatus
from ..scheduling.scheduler import Scheduler
from ..scheduling.tenant import TenantLedger
from .history import History
from .stalls import DeviceFreeTime, find_stall
from .stats import EngineCounters, Observations, RateWindow

MAX_REQUEST_VIEWS = 200
MIN_WAITING_VIEWS = 50  # of them, if so many wait
MAX_BLOCK_CELLS = 512


@dataclass(frozen=True, slots=True)
class CoreProcessInfo:
    """What the core's process adds to the answers of utility calls: of its clients all but their requests."""

    epoch: str
    started_at: float  # wall clock
    clients: Mapping[bytes, ClientView] = field(default_factory=dict[bytes, ClientView])


class StatsCollector:
    """Reads a core's parts, and keeps what they do not: rates, histograms, tokens per client."""

    def __init__(
        self,
        config: EngineConfig,
        counters: EngineCounters,
        scheduler: Scheduler,
        pool: BlockPool,
        tenants: TenantLedger,
    ) -> None:
        self.observations = Observations(config.model.max_model_len)
        self.free_time = DeviceFreeTime()
        self._config = config
        self._counters = counters
        self._scheduler = scheduler
        self._pool = pool
        self._tenants = tenants
        self.history = History(self._count, self._gauge)
        self.window = RateWindow(counters, self.history.note)
        self._tokens_of_ended: dict[bytes, int] = {}  # client -> tokens of its requests that have ended

    def note_end(self, request: Request) -> None:
        """A live request has its finish_reason."""
        self.observations.observe_finish(request)
        ended = self._tokens_of_ended
        num_tokens = 1 if request.is_continued else request.num_output_tokens  # others have counted the rest
        ended[request.client] = ended.get(request.client, 0) + num_tokens

    def forget_client(self, client: bytes) -> None:
        """A client is gone."""
        self._tokens_of_ended.pop(client, None)

    def stats(self, num_clients: int, now: float) -> SchedulerStats:
        """The counts of this moment."""
        return SchedulerStats(
            **self._gauge(),
            num_clients=num_clients,
            kv_blocks_total=self._pool.num_blocks,
            **self._count_states(),
            held_bytes=self._tenants.held_bytes,
            stall=find_stall(self._live(), self.free_time, now),
            **{f"{name}_total": value for name, value in asdict(self._counters).items()},
        )

    def _count_states(self) -> dict[str, int]:
        states = self._scheduler.batch.manager.states
        if states is None:
            return {}
        used, cached, total = states.num_used, states.num_cached, states.num_slots
        return {"state_slots_used": used, "state_slots_cached": cached, "state_slots_total": total}

    def _count(self) -> dict[str, float]:
        num_prompt, num_generated = self._counters.prompt_tokens, self._counters.generation_tokens
        return self.observations.sum_latencies() | {
            "prompt_tokens": num_prompt,
            "generation_tokens": num_generated,
        }

    def _gauge(self) -> dict[str, int]:
        return {
            "num_running": len(self._scheduler.running),
            "num_waiting": len(self._scheduler.waiting) + len(self._scheduler.policy.parked),
            "kv_blocks_used": self._pool.num_blocks - self._pool.num_free,
        }

    def metrics(self, stats: SchedulerStats) -> EngineMetrics:
        """Everything that was counted since the start."""
        cache = {name: str(value) for name, value in msgspec.structs.asdict(self._config.cache).items()}
        cache |= {"num_gpu_blocks": str(self._pool.num_blocks), "cache_dtype": self._config.kv_dtype}
        return self.observations.to_message(stats, cache)

    def snapshot(
        self, process: CoreProcessInfo, ids_of: Mapping[bytes, Collection[str]], now: float
    ) -> EngineSnapshot:
        """What live views show; `ids_of` are the live requests of each client."""
        names = _name_clients(process.clients)
        stats = self.stats(len(process.clients), now)
        shown = self._find_shown()
        block_map, blocks_per_cell = self._pool.map_cells(MAX_BLOCK_CELLS)
        return EngineSnapshot(
            at=now,
            epoch=process.epoch,
            model=self._config.model.served_model_name,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            uptime_s=max(now - process.started_at, 0.0),
            stats=stats,
            **self.window.measure(now)._asdict(),
            requests=[self._view_request(request, names, now) for request in shown],
            num_hidden_requests=stats.num_running + stats.num_waiting - len(shown),
            block_map=block_map,
            blocks_per_cell=blocks_per_cell,
            clients=self._view_clients(process.clients, names, ids_of),
        )

    def _live(self) -> Iterable[Request]:
        scheduler = self._scheduler
        return itertools.chain(scheduler.running, scheduler.waiting, scheduler.policy.parked)

    def _find_shown(self) -> list[Request]:
        """The first requests: running ones, waiting ones in the order in which they will run, parked ones."""
        running = self._scheduler.running
        num_waiting = max(MAX_REQUEST_VIEWS - len(running), MIN_WAITING_VIEWS)
        waiting = self._scheduler.waiting.first(num_waiting)
        waiting += itertools.islice(self._scheduler.policy.parked, num_waiting - len(waiting))
        return running[: MAX_REQUEST_VIEWS - len(waiting)] + waiting

    def _view_request(self, request: Request, names: Mapping[bytes, str], now: float) -> RequestView:
        return RequestView(
            request_id=_find_shown_id(request),
            client=names.get(request.client, ""),
            state=request.status.name.lower(),
            waits_for=self._why_waiting(request),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_output_tokens=request.num_output_tokens,
            max_total_tokens=request.max_total_tokens,
            num_blocks=request.num_blocks,
            num_preemptions=request.num_preemptions,
            age_s=max(now - request.queued_time, 0.0),
            held_bytes=request.held_bytes,
            num_cached_tokens=request.num_cached_tokens or 0,
            prefix_miss=request.prefix_miss,
            kind=_describe_kind(request),
            work_s=1e-6 * request.total_work_us,
            owner=request.options.tenant,
        )

    def _why_waiting(self, request: Request) -> str:
        if request.status is RequestStatus.RUNNING:
            return ""
        policy = self._scheduler.policy
        if policy.is_parked(request):
            return "until it is known which request makes steps fail"
        return policy.why_waiting(request)

    def count_served(self, client: bytes) -> int:
        """Tokens of its requests that have ended."""
        return self._tokens_of_ended.get(client, 0)

    def _view_clients(
        self,
        clients: Mapping[bytes, ClientView],
        names: Mapping[bytes, str],
        ids_of: Mapping[bytes, Collection[str]],
    ) -> list[ClientView]:
        """The clients. Tokens served are those of requests that run or have ended."""
        num_running: Counter[bytes] = Counter()
        served = Counter(self._tokens_of_ended)
        for request in self._scheduler.running:
            num_running[request.client] += 1
            served[request.client] += request.num_output_tokens
        return [
            msgspec.structs.replace(
                client,
                name=names[identity],
                num_running=num_running[identity],
                num_waiting=len(ids_of.get(identity, ())) - num_running[identity],
                tokens_served_total=served[identity],
            )
            for identity, client in clients.items()
        ]


def _find_shown_id(request: Request) -> str:
    """Of a beam search one for all rounds."""
    names = request.options.names
    return names[-1] if request.is_continued and names else request.request_id


def _describe_kind(request: Request) -> str:
    return "" if request.kind == "plain" else request.kind


def _name_clients(clients: Mapping[bytes, ClientView]) -> dict[bytes, str]:
    """kind-pid, numbered from the second of the same process on."""
    counts: Counter[str] = Counter()
    names: dict[bytes, str] = {}
    for identity, client in clients.items():
        name = f"{client.kind}-{client.pid}"
        counts[name] += 1
        names[identity] = name if counts[name] == 1 else f"{name}.{counts[name]}"
    return names
