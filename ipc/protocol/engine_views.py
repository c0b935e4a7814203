"""What an engine says of itself: statistics, live views, metrics. Answers to utility calls (messages.py)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

DEFAULT_METRICS_PREFIX = "quire:"  # of the names of series that are made of EngineMetrics


class StalledRequest(msgspec.Struct, frozen=True):
    """A live request that gets no token though the device could compute it."""

    request_id: str
    stage: str  # how far it is, for a person
    free_s: float  # how long the device was free since its last token, or since it came
    owner: str = ""  # as RequestView.owner


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A look at the engine at one moment. Counters (`_total`) only grow within an epoch."""

    num_running: int
    num_waiting: int
    num_clients: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefix_cache_queries_total: int  # tokens looked up
    prefix_cache_hits_total: int  # tokens found
    num_preemptions_total: int
    num_steps_total: int
    prompt_tokens_total: int  # computed, without cached ones
    generation_tokens_total: int
    schedule_s_total: float  # time in schedule()
    update_s_total: float  # time in update()
    step_wait_s_total: float  # time blocked on the executor with work in flight
    held_bytes: int = 0  # the price of all live requests
    row_work_s_total: float = (
        0.0  # of the worker, that rows took for themselves (ipc/protocol/step.py: RowWork)
    )
    prefix_misses_unknown_total: int = 0  # tokens of whole blocks that were not found: nobody has had them
    prefix_misses_evicted_total: int = 0  # they were there, and gave way to others
    prefix_misses_other_salt_total: int = 0  # the tenant has had them with another cache_salt
    prefix_misses_no_state_total: int = 0  # they are there, and no recurrent state after them
    state_slots_used: int = 0  # of running requests; 0 of a model without recurrent layers, like the others
    state_slots_cached: int = 0  # whose states a prefix hit can use
    state_slots_total: int = 0
    stall: StalledRequest | None = None  # the worst; None in an engine that is well


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One live request as a person sees it."""

    request_id: str
    client: str  # ClientView.name
    state: str  # running, waiting or preempted
    waits_for: str  # why it does not run, '' when it runs
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_total_tokens: int
    num_blocks: int
    num_preemptions: int
    age_s: float
    held_bytes: int = 0  # its price: what the core holds for it (request_price.py)
    num_cached_tokens: int = 0  # of its prompt, found when it began
    prefix_miss: str = ""  # no such prefix, evicted, other salt, not looked up; empty: all was found
    work_s: float = 0.0  # of the worker, that its row took for itself
    kind: str = ""  # its purpose, "grammar" or "pooling"; empty: none of these
    owner: str = ""  # the tenant that its client has named; not shown to who owns some requests only


class ClientView(msgspec.Struct, frozen=True, kw_only=True):
    """One attached client as a person sees it."""

    name: str = ""
    kind: str
    pid: int
    weight: float
    num_running: int = 0
    num_waiting: int = 0
    tokens_served_total: int = 0
    num_unsent: int  # outputs that wait for it to read
    connected_s: float


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one of several engines does, in a snapshot of all together."""

    index: int
    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    prompt_tokens_per_s: float
    generation_tokens_per_s: float


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What the live views show: the engine at one moment, rates over the last seconds."""

    at: float  # wall clock
    epoch: str
    model: str  # as served
    max_num_seqs: int
    uptime_s: float
    stats: SchedulerStats
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    steps_per_s: float
    schedule_ms: float  # a step, mean over the same window; so are the next two
    update_ms: float
    step_wait_ms: float
    requests: list[RequestView]  # the first ones in running, then in waiting order
    num_hidden_requests: int
    # A cell is a run of equally many blocks in the order of their ids; the last may be shorter. It has two
    # bytes: the share of its blocks in use, and the share with contents to be found again, 0 to 255 each.
    block_map: bytes
    blocks_per_cell: int
    clients: list[ClientView]
    engines: list[EngineLoad] = []  # each of several; empty of one


Owns = Callable[[str], bool]  # whether a request with this owner is of who looks


def hide_stall(stats: SchedulerStats, owns: Owns) -> SchedulerStats:
    """The stats without the name of a request that is not of who looks."""
    stall = stats.stall
    if stall is None:
        return stats
    request_id = stall.request_id if owns(stall.owner) else ""
    return replace(stats, stall=replace(stall, request_id=request_id, owner=""))


def hide_others(snapshot: EngineSnapshot, owns: Owns) -> EngineSnapshot:
    """The snapshot with the requests of who looks, the clients that they came through, and counts."""
    requests = [replace(request, owner="") for request in snapshot.requests if owns(request.owner)]
    through = {request.client for request in requests}
    return replace(
        snapshot,
        stats=hide_stall(snapshot.stats, owns),
        requests=requests,
        num_hidden_requests=snapshot.num_hidden_requests + len(snapshot.requests) - len(requests),
        clients=[client for client in snapshot.clients if client.name in through],
    )


class Histogram(msgspec.Struct, kw_only=True):
    """`counts[i]` observations were at most `bounds[i]` and above the bound before; the last has no bound."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class HistoryPoint(msgspec.Struct, kw_only=True):
    """What an engine did in one period."""

    at: float  # when the period began, wall clock: a multiple of its length
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_first_tokens: int = 0  # requests that got their first one
    first_token_s: float = 0.0  # their sum of times to it
    num_gaps: int = 0  # tokens behind another one of the same request
    gap_s: float = 0.0  # the sum of times between the two
    num_running: int = 0  # the highest of what was seen twice a second; so are the next two
    num_waiting: int = 0
    kv_blocks_used: int = 0


class EngineHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The last quarter of an hour; a period without work has no point."""

    at: float  # wall clock
    period_s: float
    kv_blocks_total: int
    points: list[HistoryPoint]


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is counted since the core started, over all clients; names without the prefix."""

    stats: SchedulerStats
    histograms: dict[str, Histogram]
    finished_total: dict[str, int]  # finish reason -> requests
    finished_by_kind_total: dict[str, int] = {}  # RequestKind of core/scheduling/request.py -> requests
    tool_parse_errors_total: int = 0  # as frontends have counted them
    reasoning_tokens_total: int = 0  # likewise
    cache_config: dict[str, str] = {}  # how the KV cache was made; vLLM's labels of cache_config_info


MAX_TRACED_STEPS = 50_000  # of a profile: 3 MB on the wire


class TracedStep(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One step. Times are of the core's wall clock, in seconds."""

    step_id: int
    schedule_at: float  # the core began to decide what is in it
    submitted_at: float  # it was on its way to the worker
    answered_at: float  # the core had the worker's answer
    updated_at: float  # and had taken it in
    num_tokens: int  # computed in it
    num_rows: int  # requests in it
    num_sampled: int  # rows that a token was sampled for
    num_running: int  # requests when it was scheduled
    num_waiting: int  # likewise


class StepTrace(msgspec.Struct, array_like=True, frozen=True):
    """A profile's steps in the order of their answers; those beyond MAX_TRACED_STEPS are only counted."""

    steps: list[TracedStep]
    num_dropped: int = 0
