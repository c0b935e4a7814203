"""What `quire top` shows of one engine, as lines of a terminal of any size.

Whatever a colour says, a sign or a word says too.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ....ipc.protocol.engine_views import ClientView, EngineLoad, EngineSnapshot, RequestView
from .view import WINDOW_S, FrameData, Mode, View

_MAX_CLIENTS = 4
_NUM_TABLE_LINES = 4  # heads of the two tables, and an empty line before each
_MIN_HEIGHT_OF_TABLES = 9  # with less, lines above them are left out
_NARROW = 60  # columns below which a table leaves some of its own out
_MIN_SHOWN_WORK_S = 0.1
_LAST_COLUMN = "waits for / cached"
_NARROW_COLUMNS = ("request", "state", "tokens", "age", "client", "running", "waiting")
_NUMBERS = ("tokens", "holds", "age", "running", "waiting", "unsent", "weight", "attached")
_HEIGHTS = "▁▂▃▄▅▆▇█"
_ACCENT, _MUTED, _WAITING = "green", "bright_black", "yellow"
HELP = """\
up, down, j, k       select a request
PgUp, PgDn           a page of them
Esc                  select none
c                    cancel the selected one, once you say y: it ends with what it has
s                    sort by the next column
Tab                  the next engine, of several
h, ?                 this text; any key leaves it
q, Ctrl-C            leave

KV: a column is a run of blocks, as full as it is high; ░ can be found again, · is free.
step: the engine's own time, and the wait for the device. TTFT: time to the first token, ITL: between
tokens, E2E: of a whole request for a vector. holds: what the engine keeps for a request.
CPU: 100 % is one core.
"""


def render(look: FrameData, width: int, height: int, view: View | None = None) -> RenderableType:
    """One frame of at most `height` lines, one less without a view; what has no room is left out."""
    snapshot = look.snapshot
    head = _render_head(snapshot, width)
    if view is not None and view.mode is Mode.HELP:
        return Group(head, *map(_join, HELP.splitlines()[: height - 1]))
    lines = [head, _render_rates(snapshot), _render_load(snapshot), _render_blocks(snapshot, width)]
    lines += [_render_step(snapshot), _render_latencies(look), _render_processes(look)]
    status = [] if view is None else [_render_status(view)]
    if height - len(lines) < _MIN_HEIGHT_OF_TABLES:
        lines = lines[:4]
    room = max(0, height - len(lines) - _NUM_TABLE_LINES - 1)  # for a last line, too
    engines = _render_engines(snapshot.engines, max(1, 2 * room // 3))
    clients = snapshot.clients[: max(0, min(_MAX_CLIENTS, (room - len(engines)) // 3))]
    lines += engines
    tables = [Text(""), _render_clients(clients, width)] if clients else []
    num_rows = max(0, height - len(lines) - (len(clients) + 2 if clients else 0) - 3)
    requests = _render_requests(snapshot, num_rows, width, view or View())
    return Group(*lines, *tables, Text(""), requests, *status)


# -- the parts of a frame


def _join(*parts: str | tuple[str, str]) -> Text:
    """One line, cut where the terminal ends."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _render_head(snapshot: EngineSnapshot, width: int) -> Text:
    head = _join(("Quire ", "bold"), snapshot.model)
    end = f"up {_format_duration(snapshot.uptime_s)}   h help   q leaves" if width >= _NARROW else "h help"
    head.truncate(max(0, width - len(end) - 2), overflow="ellipsis", pad=True)
    return head.append(f"  {end}", _MUTED)


def _render_rates(snapshot: EngineSnapshot) -> Text:
    return _join(
        (f"{snapshot.generation_tokens_per_s:,.0f}", f"bold {_ACCENT}"),
        (" generated tok/s   ", _MUTED),
        (f"{snapshot.prompt_tokens_per_s:,.0f}", "bold"),
        (" prompt tok/s", _MUTED),
    )


def _render_load(snapshot: EngineSnapshot) -> Text:
    stats = snapshot.stats
    if (stall := stats.stall) is not None:
        text = f"{stall.request_id} gets no token for {_format_duration(stall.free_s)}: {stall.stage}"
        return _join((text, f"bold {_WAITING}"))
    hits, queries = stats.prefix_cache_hits_total, stats.prefix_cache_queries_total
    return _join(
        (f"{stats.num_running}", "bold"),
        (f" of {snapshot.max_num_seqs} running   ", _MUTED),
        (f"{stats.num_waiting:,}", f"bold {_WAITING}" if stats.num_waiting else "bold"),
        (" waiting   ", _MUTED),
        (f"{_percent(hits, queries):.0f} %", "bold"),
        (" prefix hits   ", _MUTED),
        (f"{stats.num_preemptions_total:,}", "bold"),
        (" preemptions", _MUTED),
    )


def _render_blocks(snapshot: EngineSnapshot, width: int) -> Text:
    """The block map in one line: each column is a run of blocks, as full as it is high."""
    stats = snapshot.stats
    used, total = stats.kv_blocks_used, stats.kv_blocks_total
    label, end = f"KV {_percent(used, total):>3.0f} % ", f" {used:,}/{total:,}"
    if slots := stats.state_slots_total:
        end += f"   states {stats.state_slots_used:,}+{stats.state_slots_cached:,}/{slots:,}"
    line = _join(label)
    for share_used, share_cached in _resample(snapshot.block_map, max(0, width - len(label) - len(end))):
        if share_used:  # never drawn as empty
            line.append(_HEIGHTS[max(0, round(8 * share_used / 255) - 1)], _ACCENT)
        else:
            line.append("░" if share_cached else "·", _MUTED)
    return line.append(end, _MUTED)


def _render_step(snapshot: EngineSnapshot) -> Text:
    times = {"schedule": snapshot.schedule_ms, "update": snapshot.update_ms, "wait": snapshot.step_wait_ms}
    shown = "   ".join(f"{name} {value:.2f} ms" for name, value in times.items())
    return _join("step ", (f"  {shown}   {snapshot.steps_per_s:.0f}/s", _MUTED))


def _render_latencies(look: FrameData) -> Text:
    line = _join()
    for name, quantiles in look.latencies.items():
        shown = "-" if quantiles is None else f"{'/'.join(f'{1e3 * value:.3g}' for value in quantiles)} ms"
        line.append(f"{name} ", _MUTED).append(f"{shown}   ")
    when = f"the last {WINDOW_S:.0f} s" if look.has_window else "all since the start"
    return line.append(f"p50/p95/p99, {when}", _MUTED)


def _render_processes(look: FrameData) -> Text:
    """What it computes on, with which weights, and what its processes take here."""
    facts, usage = look.facts, look.usage
    parts = [facts.device, f"{facts.weights} weights" if facts.weights else facts.dtype]
    if facts.tensor_parallel_size > 1:
        parts.append(f"{facts.tensor_parallel_size} ranks")
    if facts.pipeline_parallel_size > 1:
        parts.append(f"{facts.pipeline_parallel_size} stages")
    line = _join(", ".join(parts))
    if facts.ledger:
        line.append(f"   {_format_size(sum(size for _, size in facts.ledger))}").append(
            " on the device", _MUTED
        )
    if usage is not None:
        line.append(f"   {usage.cpu_percent:.0f} %").append(" CPU   ", _MUTED)
        processes = "process" if usage.num_processes == 1 else "processes"
        line.append(_format_size(usage.rss_bytes)).append(f" in {usage.num_processes} {processes}", _MUTED)
    return line


def _render_status(view: View) -> Text:
    """The last line: a question, an answer, or how rows are sorted."""
    if view.mode is Mode.CONFIRM:
        return _join((f"cancel {view.to_cancel}? y/n", "bold"))
    return _join(view.message) if view.message or view.is_plain else _join((f"sorted by {view.sort}", _MUTED))


def _render_engines(engines: Sequence[EngineLoad], num_lines: int) -> list[Text]:
    """A line for each of several engines; the last line counts those that have no room."""
    if len(engines) <= num_lines:
        return list(map(_render_engine, engines))
    shown = [_render_engine(engine) for engine in engines[: num_lines - 1]]
    return [*shown, _join((f"and {len(engines) - len(shown)} more engines", _MUTED))]


def _render_engine(engine: EngineLoad) -> Text:
    return _join(
        (f"engine {engine.index}", "bold"),
        (f"   {engine.generation_tokens_per_s:,.0f}", _ACCENT),
        (f" tok/s   {engine.prompt_tokens_per_s:,.0f} prompt tok/s", _MUTED),
        (f"   {engine.num_running} running   {engine.num_waiting:,} waiting", _MUTED),
        (f"   KV {_percent(engine.kv_blocks_used, engine.kv_blocks_total):.0f} %", _MUTED),
    )


def _render_clients(clients: Sequence[ClientView], width: int) -> Table:
    rows = [
        {
            "client": Text(client.name),
            "running": f"{client.num_running}",
            "waiting": f"{client.num_waiting:,}",
            "tokens": f"{client.tokens_served_total:,}",
            "unsent": f"{client.num_unsent:,}",
            "weight": f"{client.weight:g}",
            "attached": _format_duration(client.connected_s),
        }
        for client in clients
    ]
    table = _make_table(list(rows[0]), width)
    for row in rows:
        _add_row(table, row)
    return table


def _render_requests(snapshot: EngineSnapshot, num_rows: int, width: int, view: View) -> RenderableType:
    """Rows in the view's order. What has no row is counted in the last line."""
    num_all = len(snapshot.requests) + snapshot.num_hidden_requests
    if num_all > num_rows:
        num_rows = max(0, num_rows - 1)  # for the last line
    rows = view.order(snapshot.requests)
    first = view.place_rows(rows, num_rows)
    shown = _choose_first(rows, num_rows) if view.is_plain else rows[first : first + num_rows]
    columns = ["request", "state", "progress", "tokens", "holds", "age", _LAST_COLUMN]
    table = _make_table(columns, width, sorted_by=view.sort)
    for row in shown:
        is_selected = row.request_id == view.selected
        _add_row(table, _describe(row, is_selected), "reverse" if is_selected else None)
    if num_all == len(shown):
        return table
    if view.is_plain:
        return Group(table, _join((f"and {num_all - len(shown):,} more", _MUTED)))
    return Group(table, _join((f"{first + 1} to {first + len(shown)} of {num_all:,}", _MUTED)))


def _choose_first(requests: Sequence[RequestView], num_rows: int) -> list[RequestView]:
    """Running ones first; the waiting keep half of the rows."""
    running = [view for view in requests if view.state == "running"]
    waiting = [view for view in requests if view.state != "running"]
    num_waiting = min(len(waiting), max(num_rows // 2, num_rows - len(running)))
    return running[: num_rows - num_waiting] + waiting[:num_waiting]


def _describe(view: RequestView, is_selected: bool) -> dict[str, str | Text]:
    """Its cells, by column."""
    is_prefill = view.state == "running" and view.num_output_tokens == 0
    done, whole = view.num_output_tokens, view.max_total_tokens - view.num_prompt_tokens
    if is_prefill:
        done, whole = view.num_computed_tokens, view.num_prompt_tokens
    filled = round(10 * min(done, whole) / whole) if whole > 0 else 0
    name = f"▶ {view.request_id}" if is_selected else view.request_id
    work = f"own work {view.work_s:.1f} s" if view.work_s >= _MIN_SHOWN_WORK_S else ""
    # What was found of its prompt when it began, and why no more.
    prefix = (view.kind, work, f"{view.num_cached_tokens:,} tokens", view.prefix_miss)
    waits = (view.waits_for, _WAITING) if view.waits_for else (", ".join(filter(None, prefix)), _MUTED)
    return {
        "request": Text(name if len(name) <= 20 else f"{name[:19]}…"),
        "state": "prefill" if is_prefill else view.state,
        "progress": Text.assemble(("━" * filled, _ACCENT), ("╌" * (10 - filled), _MUTED)),
        "tokens": f"{view.num_prompt_tokens}+{view.num_output_tokens}",
        "holds": _format_size(view.held_bytes),
        "age": _format_duration(view.age_s),
        _LAST_COLUMN: Text(*waits),
    }


def _make_table(columns: Sequence[str], width: int, sorted_by: str = "") -> Table:
    table = Table(box=None, width=width, padding=(0, 2, 0, 0), header_style=_MUTED, pad_edge=False)
    for name in columns:
        if width >= _NARROW or name in _NARROW_COLUMNS:
            head = f"{name}▼" if name == sorted_by else name
            ratio = 1 if name == _LAST_COLUMN else None
            justify = "right" if name in _NUMBERS else "left"
            table.add_column(head, justify=justify, no_wrap=True, overflow="ellipsis", ratio=ratio)
    return table


def _add_row(table: Table, cells: dict[str, str | Text], style: str | None = None) -> None:
    shown = [str(column.header).removesuffix("▼") for column in table.columns]
    table.add_row(*(cells[name] for name in shown), style=style)


# -- text


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def _resample(block_map: bytes, num_columns: int) -> Generator[tuple[int, int]]:
    """The map's cells in at most `num_columns` columns: mean share in use, mean share cached, 0 to 255."""
    num_cells = len(block_map) // 2
    num_columns = min(num_columns, num_cells)
    for column in range(num_columns):
        start, end = num_cells * column // num_columns, num_cells * (column + 1) // num_columns
        used, cached = block_map[2 * start : 2 * end : 2], block_map[2 * start + 1 : 2 * end : 2]
        yield -(-sum(used) // len(used)), -(-sum(cached) // len(cached))


def _format_size(num_bytes: int) -> str:
    if num_bytes < 1e6:
        return f"{num_bytes / 1e3:.0f} kB"
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes < 1e10 else f"{num_bytes / 1e9:.0f} GB"


def _format_duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
