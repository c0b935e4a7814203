"""StatsCollector: what a person or a monitor sees of the engine: its stats, a snapshot, its metrics.

A look is paid by whoever looks. Its cost is bounded by MAX_REQUEST_VIEWS, MAX_BLOCK_CELLS and the running
requests, whatever waits: 0.5 ms with 256 running and 10,000 waiting on 2 cores of a Xeon.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ...ipc.config import EngineConfig
from ...ipc.messages import ClientView, EngineMetrics, EngineSnapshot, RequestView, SchedulerStats
from ..faults.blame import Blame
from ..kv.block_pool import BlockPool
from ..scheduling.request import Request, RequestStatus
from ..scheduling.scheduler import Scheduler
from ..scheduling.tenant import TenantLedger
from .stats import EngineCounters, Observations, RateWindow

MAX_REQUEST_VIEWS = 200
MIN_WAITING_VIEWS = 50  # of them, if so many wait
MAX_BLOCK_CELLS = 512


@dataclass(frozen=True, slots=True)
class AttachedClient:
    """What the process around the core knows of a client."""

    kind: str
    pid: int
    weight: float
    num_unsent: int
    connected_s: float


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the process around the core adds to the answers of utility calls."""

    epoch: str
    started_at: float  # wall clock
    clients: Mapping[bytes, AttachedClient] = field(default_factory=dict[bytes, AttachedClient])


class StatsCollector:
    """Looks at the parts of a core, and keeps what they do not: rates, histograms, tokens per client."""

    def __init__(
        self,
        config: EngineConfig,
        counters: EngineCounters,
        scheduler: Scheduler,
        blame: Blame,
        pool: BlockPool,
        tenants: TenantLedger,
    ) -> None:
        self.window = RateWindow(counters)
        self.observations = Observations(config.model.max_model_len)
        self._config = config
        self._counters = counters
        self._scheduler = scheduler
        self._blame = blame
        self._pool = pool
        self._tenants = tenants
        self._tokens_of_ended: dict[bytes, int] = {}  # client -> tokens of its requests that have ended

    def note_end(self, request: Request) -> None:
        """A live request has its finish_reason."""
        self.observations.observe_finish(request)
        ended = self._tokens_of_ended
        ended[request.client] = ended.get(request.client, 0) + request.num_output_tokens

    def forget_client(self, client: bytes) -> None:
        """A client is gone."""
        self._tokens_of_ended.pop(client, None)

    def stats(self, num_clients: int) -> SchedulerStats:
        """The counts of this moment."""
        counters = self._counters
        return SchedulerStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting) + len(self._blame.parked),
            num_clients=num_clients,
            kv_blocks_used=self._pool.num_blocks - self._pool.num_free,
            kv_blocks_total=self._pool.num_blocks,
            prefix_cache_queries_total=counters.prefix_cache_queries,
            prefix_cache_hits_total=counters.prefix_cache_hits,
            num_preemptions_total=counters.num_preemptions,
            num_steps_total=counters.num_steps,
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            schedule_s_total=counters.schedule_s,
            update_s_total=counters.update_s,
            step_wait_s_total=counters.step_wait_s,
            held_bytes=self._tenants.held_bytes,
        )

    def metrics(self, stats: SchedulerStats) -> EngineMetrics:
        """Everything that was counted since the start."""
        return EngineMetrics(
            stats=stats,
            histograms=self.observations.to_messages(),
            finished_total=self.observations.finished_total,
        )

    def snapshot(
        self, surroundings: Surroundings, ids_of: Mapping[bytes, Collection[str]], now: float
    ) -> EngineSnapshot:
        """What live views show; `ids_of` are the live requests of each client."""
        rates = self.window.measure(now)
        names = _name_clients(surroundings.clients)
        stats = self.stats(len(surroundings.clients))
        shown = self._find_shown()
        block_map, blocks_per_cell = self._pool.map_cells(MAX_BLOCK_CELLS)
        return EngineSnapshot(
            at=now,
            epoch=surroundings.epoch,
            model=self._config.model.served_model_name,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            uptime_s=max(now - surroundings.started_at, 0.0),
            stats=stats,
            prompt_tokens_per_s=rates.prompt_tokens_per_s,
            generation_tokens_per_s=rates.generation_tokens_per_s,
            steps_per_s=rates.steps_per_s,
            schedule_ms=rates.schedule_ms,
            update_ms=rates.update_ms,
            step_wait_ms=rates.step_wait_ms,
            requests=[self._view_request(request, names, now) for request in shown],
            num_hidden_requests=stats.num_running + stats.num_waiting - len(shown),
            block_map=block_map,
            blocks_per_cell=blocks_per_cell,
            clients=self._view_clients(surroundings.clients, names, ids_of),
        )

    def _find_shown(self) -> list[Request]:
        """The first requests: running ones, waiting ones in the order in which they will run, parked ones."""
        running = self._scheduler.running
        num_waiting = max(MAX_REQUEST_VIEWS - len(running), MIN_WAITING_VIEWS)
        waiting = self._scheduler.waiting.first(num_waiting)
        waiting += itertools.islice(self._blame.parked, num_waiting - len(waiting))
        return running[: MAX_REQUEST_VIEWS - len(waiting)] + waiting

    def _view_request(self, request: Request, names: Mapping[bytes, str], now: float) -> RequestView:
        return RequestView(
            request_id=request.request_id,
            client=names.get(request.client, ""),
            state=request.status.name.lower(),
            waits_for=self._why_waiting(request),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_output_tokens=request.num_output_tokens,
            max_total_tokens=request.max_total_tokens,
            num_blocks=len(request.block_ids),
            num_preemptions=request.num_preemptions,
            age_s=max(now - request.queued_time, 0.0),
            held_bytes=request.held_bytes,
        )

    def _why_waiting(self, request: Request) -> str:
        if request.status is RequestStatus.RUNNING:
            return ""
        if self._blame.is_parked(request):
            return "until it is known which request makes steps fail"
        return self._scheduler.policy.why_waiting(request)

    def _view_clients(
        self,
        clients: Mapping[bytes, AttachedClient],
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
            ClientView(
                name=names[identity],
                kind=client.kind,
                pid=client.pid,
                weight=client.weight,
                num_running=num_running[identity],
                num_waiting=len(ids_of.get(identity, ())) - num_running[identity],
                tokens_served_total=served[identity],
                num_unsent=client.num_unsent,
                connected_s=client.connected_s,
            )
            for identity, client in clients.items()
        ]


def _name_clients(clients: Mapping[bytes, AttachedClient]) -> dict[bytes, str]:
    """kind-pid, numbered from the second of the same process on."""
    counts: Counter[str] = Counter()
    names: dict[bytes, str] = {}
    for identity, client in clients.items():
        name = f"{client.kind}-{client.pid}"
        counts[name] += 1
        names[identity] = name if counts[name] == 1 else f"{name}.{counts[name]}"
    return names
