"""What `quire top` shows of one engine, as lines of a terminal of any size.

Whatever a colour says, a sign or a word says too.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ....ipc.protocol.engine_views import ClientView, EngineLoad, EngineSnapshot, RequestView
from .view import WINDOW_S, Look, Mode, View

_MAX_CLIENTS = 4
_NUM_FIXED_LINES = 8  # of a frame without what low terminals leave out
_NUM_CLIENT_LINES = 2  # beside the clients
_MIN_HEIGHT_FOR_CLIENTS = 14
_NUM_MORE_LINES = 2  # of latencies and processes
_MIN_HEIGHT_FOR_MORE = 16
_NARROW, _MEDIUM = 60, 70  # columns below which a table leaves some of its own out
_MIN_SHOWN_WORK_S = 0.1
_LAST_COLUMN = "waits for / cached"
_COLUMNS = {  # of requests, and from which width on each is shown
    "request": 0,
    "state": 0,
    "progress": _NARROW,
    "tokens": 0,
    "holds": _MEDIUM,
    "age": 0,
    _LAST_COLUMN: _NARROW,
}
_SPARKS = " ▁▂▃▄▅▆▇█"
_ACCENT, _SECOND, _MUTED, _WAITING = "green", "blue", "bright_black", "yellow"
HELP = """\
up, down, j, k       select a request
PgUp, PgDn, Space    a page of them
Home, End, g, G      the first, the last
Esc                  select none
c                    cancel the selected one, once you say y: it ends with what it has
s, S                 sort by the next, the last column
r                    the other way round
Tab                  the next engine, of several
h, ?                 this text; any key leaves it
q, Ctrl-C            leave

KV: a column is a run of blocks, as full as it is high; ░ can be found again, · is free.
step: █ schedule, ▓ update, ░ wait for the device. TTFT: time to the first token, ITL: between
tokens, E2E: of a whole request for a vector. holds: what the engine keeps for a request.
CPU: 100 % is one core.
"""


def render(
    look: Look, history: Sequence[float], width: int, height: int, view: View | None = None
) -> RenderableType:
    """One frame of at most `height` lines, one less without a view. `history`: generated tokens a second, the
    oldest first.
    """
    view, has_status = view or View(), view is not None
    snapshot = look.snapshot
    if view.mode is Mode.HELP:
        lines = HELP.splitlines()[: max(0, height - 1)]
        return Group(_render_head(snapshot, width), *(Text(line, no_wrap=True) for line in lines))
    has_more, has_clients = height >= _MIN_HEIGHT_FOR_MORE, height >= _MIN_HEIGHT_FOR_CLIENTS
    num_lines = _NUM_FIXED_LINES + _NUM_MORE_LINES * has_more + _NUM_CLIENT_LINES * has_clients
    room = max(0, height - num_lines)
    engines = snapshot.engines[: room // 3]
    room -= len(engines)
    clients = snapshot.clients[: min(_MAX_CLIENTS, room // 3) * has_clients]
    num_rows = room - len(clients)
    return Group(
        _render_head(snapshot, width),
        _render_rates(snapshot, history, width),
        _render_load(snapshot),
        _render_blocks(snapshot, width),
        _render_step(snapshot, width),
        *([_render_latencies(look), _render_processes(look)] if has_more else ()),
        *(_render_engine(engine) for engine in engines),
        *([Text(""), _render_clients(clients, width)] if has_clients else ()),
        Text(""),
        _render_requests(snapshot, num_rows, width, view),
        *([_render_status(view)] if has_status else ()),
    )


# -- the parts of a frame


def _render_head(snapshot: EngineSnapshot, width: int) -> Text:
    head = Text.assemble(("Quire ", "bold"), snapshot.model, no_wrap=True, overflow="ellipsis")
    end = f"up {_format_duration(snapshot.uptime_s)}   h help   q leaves" if width >= _NARROW else "h help"
    head.truncate(max(0, width - len(end) - 2), overflow="ellipsis", pad=True)
    return head.append(f"  {end}", _MUTED)


def _render_rates(snapshot: EngineSnapshot, history: Sequence[float], width: int) -> Text:
    line = Text.assemble(
        (f"{snapshot.generation_tokens_per_s:,.0f}", f"bold {_ACCENT}"),
        (" generated tok/s   ", _MUTED),
        (f"{snapshot.prompt_tokens_per_s:,.0f}", "bold"),
        (" prompt tok/s   ", _MUTED),
        no_wrap=True,
    )
    return line.append(_spark(history, max(0, width - line.cell_len)), _ACCENT)


def _render_load(snapshot: EngineSnapshot) -> Text:
    stats = snapshot.stats
    if (stall := stats.stall) is not None:
        text = f"{stall.request_id} gets no token for {_format_duration(stall.free_s)}: {stall.stage}"
        return Text(text, f"bold {_WAITING}", no_wrap=True, overflow="ellipsis")
    found, asked = stats.prefix_cache_hits_total, stats.prefix_cache_queries_total
    return Text.assemble(
        (f"{stats.num_running}", "bold"),
        (f" of {snapshot.max_num_seqs} running   ", _MUTED),
        (f"{stats.num_waiting:,}", f"bold {_WAITING}" if stats.num_waiting else "bold"),
        (" waiting   ", _MUTED),
        (f"{100 * found / asked if asked else 0:.0f} %", "bold"),
        (" prefix hits   ", _MUTED),
        (f"{stats.num_preemptions_total:,}", "bold"),
        (" preemptions", _MUTED),
        no_wrap=True,
        overflow="ellipsis",
    )


def _render_blocks(snapshot: EngineSnapshot, width: int) -> Text:
    """The block map in one line: each column is a run of blocks, as full as it is high."""
    used, total = snapshot.stats.kv_blocks_used, snapshot.stats.kv_blocks_total
    label = f"KV {100 * used / total if total else 0:>3.0f} % "
    end = f" {used:,}/{total:,}"
    num_columns = max(0, width - len(label) - len(end))
    line = Text(label, no_wrap=True)
    for share_used, share_cached in _resample(snapshot.block_map, num_columns):
        if share_used:
            line.append(_height_of(share_used), _ACCENT)
        else:
            line.append("░" if share_cached else "·", _MUTED)
    return line.append(end, _MUTED)


def _render_step(snapshot: EngineSnapshot, width: int) -> Text:
    parts = (
        ("schedule", snapshot.schedule_ms, _ACCENT, "█"),
        ("update", snapshot.update_ms, _SECOND, "▓"),
        ("wait", snapshot.step_wait_ms, _MUTED, "░"),
    )
    texts = [f" {sign} {name} {value:.2f} ms" for name, value, _, sign in parts]
    label, end = "step   ", f"  {snapshot.steps_per_s:.0f}/s"
    room = max(0, width - len(label) - len(end) - sum(map(len, texts)))
    total = sum(value for _, value, _, _ in parts)
    line = Text(label, no_wrap=True, overflow="ellipsis")
    for _, value, color, sign in parts:
        line.append(sign * round(room * value / total if total else 0), color)
    for (_, _, color, _), text in zip(parts, texts, strict=True):
        line.append(text, color)
    return line.append(end, _MUTED)


def _render_latencies(look: Look) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for name, quantiles in look.latencies.items():
        shown = "-" if quantiles is None else f"{'/'.join(f'{1e3 * value:.3g}' for value in quantiles)} ms"
        line.append(f"{name} ", _MUTED).append(f"{shown}   ")
    when = f"the last {WINDOW_S:.0f} s" if look.has_window else "all since the start"
    return line.append(f"p50/p95/p99, {when}", _MUTED)


def _render_processes(look: Look) -> Text:
    """What it computes on, with which weights, and what its processes take here."""
    facts, usage = look.facts, look.usage
    parts = [facts.device, f"{facts.weights} weights" if facts.weights else facts.dtype]
    if facts.tensor_parallel_size > 1:
        parts.append(f"{facts.tensor_parallel_size} ranks")
    if facts.pipeline_parallel_size > 1:
        parts.append(f"{facts.pipeline_parallel_size} stages")
    line = Text(", ".join(parts), no_wrap=True, overflow="ellipsis")
    if facts.ledger:
        size_bytes = sum(size for _, size in facts.ledger)
        line.append(f"   {_format_size(size_bytes)}").append(" on the device", _MUTED)
    if usage is not None:
        line.append(f"   {usage.cpu_percent:.0f} %").append(" CPU   ", _MUTED)
        processes = "process" if usage.num_processes == 1 else "processes"
        line.append(_format_size(usage.rss_bytes)).append(f" in {usage.num_processes} {processes}", _MUTED)
    return line


def _render_status(view: View) -> Text:
    """The last line: a question, an answer, or how rows are sorted."""
    if view.mode is Mode.CONFIRM:
        return Text(f"cancel {view.asked}? y/n", "bold", no_wrap=True, overflow="ellipsis")
    if not view.message and not view.is_plain:
        turned = ", reversed" if view.is_reversed else ""
        return Text(f"sorted by {view.sort}{turned}", _MUTED, no_wrap=True)
    return Text(view.message, no_wrap=True, overflow="ellipsis")


def _render_engine(engine: EngineLoad) -> Text:
    """One line of one of several engines."""
    used, total = engine.kv_blocks_used, engine.kv_blocks_total
    return Text.assemble(
        (f"engine {engine.index}", "bold"),
        (f"   {engine.generation_tokens_per_s:,.0f}", _ACCENT),
        (f" tok/s   {engine.prompt_tokens_per_s:,.0f} prompt tok/s", _MUTED),
        (f"   {engine.num_running} running   {engine.num_waiting:,} waiting", _MUTED),
        (f"   KV {100 * used / total if total else 0:.0f} %", _MUTED),
        no_wrap=True,
        overflow="ellipsis",
    )


def _render_clients(clients: Sequence[ClientView], width: int) -> Table:
    names = ("client", "running", "waiting", "tokens", "unsent", "weight", "attached")
    shown = names if width >= _NARROW else names[:4]
    table = _make_table(width)
    for name in shown:
        table.add_column(name, justify="left" if name == "client" else "right", no_wrap=True)
    for client in clients:
        row = (
            Text(client.name),
            f"{client.num_running}",
            f"{client.num_waiting:,}",
            f"{client.tokens_served_total:,}",
            f"{client.num_unsent:,}",
            f"{client.weight:g}",
            _format_duration(client.connected_s),
        )
        table.add_row(*row[: len(shown)])
    return table


def _render_requests(snapshot: EngineSnapshot, num_rows: int, width: int, view: View) -> RenderableType:
    """Rows in the view's order. What has no row is counted in the last line."""
    num_all = len(snapshot.requests) + snapshot.num_hidden_requests
    if num_all > num_rows:
        num_rows = max(0, num_rows - 1)  # for the last line
    rows = view.order(snapshot.requests)
    first = view.place_rows(rows, num_rows)
    shown = _choose_first(rows, num_rows) if view.is_plain else rows[first : first + num_rows]
    table = _make_table(width)
    columns = [name for name, min_width in _COLUMNS.items() if width >= min_width]
    for name in columns:
        is_number = name in ("tokens", "holds", "age")
        sign = "" if name != view.sort else "▲" if view.is_reversed else "▼"
        is_last = name == _LAST_COLUMN
        options: dict[str, Any] = {"overflow": "ellipsis", "ratio": 1} if is_last else {}
        table.add_column(name + sign, justify="right" if is_number else "left", no_wrap=True, **options)
    for row in shown:
        is_selected = row.request_id == view.selected
        cells = _describe(row, is_selected)
        table.add_row(*(cells[name] for name in columns), style="reverse" if is_selected else None)
    if num_all == len(shown):
        return table
    if view.is_plain:
        return Group(table, Text(f"and {num_all - len(shown):,} more", _MUTED))
    return Group(table, Text(f"{first + 1} to {first + len(shown)} of {num_all:,}", _MUTED, no_wrap=True))


def _choose_first(requests: Sequence[RequestView], num_rows: int) -> list[RequestView]:
    """Running ones first; the waiting keep half of the rows."""
    running = [view for view in requests if view.state == "running"]
    waiting = [view for view in requests if view.state != "running"]
    num_waiting = min(len(waiting), max(num_rows // 2, num_rows - len(running)))
    return running[: num_rows - num_waiting] + waiting[:num_waiting]


def _describe(view: RequestView, is_selected: bool) -> dict[str, str | Text]:
    """Its cells, by column."""
    num_wanted = view.max_total_tokens - view.num_prompt_tokens
    is_prefill = view.state == "running" and view.num_output_tokens == 0
    done, whole = view.num_output_tokens, num_wanted
    if is_prefill:
        done, whole = view.num_computed_tokens, view.num_prompt_tokens
    filled = round(10 * min(done, whole) / whole) if whole > 0 else 0
    waits = Text(view.waits_for, _WAITING) if view.waits_for else Text(_describe_prefix(view), _MUTED)
    return {
        "request": Text(_shorten(f"▶ {view.request_id}" if is_selected else view.request_id, 20)),
        "state": "prefill" if is_prefill else view.state,
        "progress": Text.assemble(("━" * filled, _ACCENT), ("╌" * (10 - filled), _MUTED)),
        "tokens": f"{view.num_prompt_tokens}+{view.num_output_tokens}",
        "holds": _format_size(view.held_bytes),
        "age": _format_duration(view.age_s),
        _LAST_COLUMN: waits,
    }


def _describe_prefix(view: RequestView) -> str:
    """What was found of its prompt when it began, and why no more; first of all what kind it is, and what its
    row took for itself.
    """
    work = f"own work {view.work_s:.1f} s" if view.work_s >= _MIN_SHOWN_WORK_S else ""
    return ", ".join(filter(None, (view.kind, work, f"{view.num_cached_tokens:,} tokens", view.prefix_miss)))


def _make_table(width: int) -> Table:
    return Table(box=None, width=width, padding=(0, 2, 0, 0), header_style=_MUTED, pad_edge=False)


# -- text


def _spark(values: Sequence[float], width: int) -> str:
    """The last `width` values as a line of blocks, the highest being full."""
    shown = list(values)[-width:] if width else []
    top = max(shown, default=0.0)
    return "".join(_SPARKS[round(8 * value / top)] if top else _SPARKS[0] for value in shown)


def _height_of(share: int) -> str:
    """A block as high as `share` of 255, never empty."""
    return _SPARKS[max(1, round(8 * share / 255))]


def _resample(block_map: bytes, num_columns: int) -> Generator[tuple[int, int]]:
    """The map's cells in at most `num_columns` columns: mean share in use, mean share cached, 0 to 255."""
    num_cells = len(block_map) // 2
    num_columns = min(num_columns, num_cells)
    for column in range(num_columns):
        start, end = num_cells * column // num_columns, num_cells * (column + 1) // num_columns
        used, cached = block_map[2 * start : 2 * end : 2], block_map[2 * start + 1 : 2 * end : 2]
        yield -(-sum(used) // len(used)), -(-sum(cached) // len(cached))


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


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
