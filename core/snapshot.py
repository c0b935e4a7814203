"""What a person sees who looks into the engine: views of requests, clients and blocks.

Paid by whoever looks: nothing here runs, and nothing is kept, when nobody does. The cost is bounded by
MAX_REQUEST_VIEWS, MAX_BLOCK_CELLS and the running requests, whatever waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..ipc.messages import ClientView, RequestView
from .request import Request, RequestStatus
from .scheduler import Scheduler

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
    """What the process around the core adds to a snapshot."""

    epoch: str
    started_at: float  # wall clock
    clients: Mapping[bytes, AttachedClient] = field(default_factory=dict[bytes, AttachedClient])


def name_clients(clients: Mapping[bytes, AttachedClient]) -> dict[bytes, str]:
    """kind-pid, numbered from the second of the same process on."""
    counts: Counter[str] = Counter()
    names: dict[bytes, str] = {}
    for identity, client in clients.items():
        name = f"{client.kind}-{client.pid}"
        counts[name] += 1
        names[identity] = name if counts[name] == 1 else f"{name}.{counts[name]}"
    return names


def find_shown(scheduler: Scheduler) -> list[Request]:
    """The first requests: running ones, then waiting ones in the order in which they will run."""
    num_waiting = max(MAX_REQUEST_VIEWS - len(scheduler.running), MIN_WAITING_VIEWS)
    waiting = scheduler.waiting.first(num_waiting)
    return scheduler.running[: MAX_REQUEST_VIEWS - len(waiting)] + waiting


def view_requests(
    scheduler: Scheduler, requests: Sequence[Request], names: Mapping[bytes, str], now: float
) -> list[RequestView]:
    """The requests as a person sees them."""
    return [
        RequestView(
            request_id=request.request_id,
            client=names.get(request.client, ""),
            state=request.status.name.lower(),
            waits_for="" if request.status is RequestStatus.RUNNING else scheduler.why_waiting(request),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_output_tokens=request.num_output_tokens,
            max_total_tokens=request.max_total_tokens,
            num_blocks=len(request.block_ids),
            num_preemptions=request.num_preemptions,
            age_s=max(now - request.queued_time, 0.0),
        )
        for request in requests
    ]


def view_clients(
    surroundings: Surroundings,
    names: Mapping[bytes, str],
    ids_of: Mapping[bytes, Collection[str]],
    tokens_served: Mapping[bytes, int],
    running: Sequence[Request],
) -> list[ClientView]:
    """The clients; `ids_of` are their live requests, `running` those of all that run."""
    num_running = Counter(request.client for request in running)
    return [
        ClientView(
            name=names[identity],
            kind=client.kind,
            pid=client.pid,
            weight=client.weight,
            num_running=num_running[identity],
            num_waiting=len(ids_of.get(identity, ())) - num_running[identity],
            tokens_served_total=tokens_served.get(identity, 0),
            num_unsent=client.num_unsent,
            connected_s=client.connected_s,
        )
        for identity, client in surroundings.clients.items()
    ]
