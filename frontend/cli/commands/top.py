"""`quire top`: what engines do, in the terminal. Loads rich, which no other command does."""

from __future__ import annotations

import os
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ....ipc.engine_views import ClientView, EngineLoad, EngineSnapshot, RequestView
from ....ipc.errors import QuireError
from ....ipc.processes.process import wait_readable
from ...client.engine_core_client import attach_sync_client
from ...client.remote_daemon import Attachment
from ...llm_engine import LLMEngine
from ..engine_choice import add_keys_option, choose_daemons
from ..exit_codes import ExitCode
from ..parser import Parser
from .daemon import DEFAULT_NAME

PERIOD_S = 0.5
_PIPED_SIZE = (100, 40)  # columns and lines where there is no terminal to ask
_MAX_CLIENTS = 4
_NUM_FIXED_LINES = 10  # of a frame without clients and requests
_SPARKS = " ▁▂▃▄▅▆▇█"
_ACCENT, _SECOND, _MUTED, _WAITING = "green", "blue", "bright_black", "yellow"


def run(argv: Sequence[str]) -> int:
    """Run `quire top`."""
    options = _make_parser().parse(argv)
    daemons = choose_daemons(options.attach or [DEFAULT_NAME], options.keys)
    with ExitStack() as stack:
        engines = [stack.enter_context(attach_engine(daemon)) for daemon in daemons]
        if options.json:
            shown = [engine.snapshot() for engine in engines]
            body = msgspec.json.encode(shown if len(shown) > 1 else shown[0])
            print(msgspec.json.format(body).decode())
        elif options.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            _print_frame([engine.snapshot() for engine in engines])
        else:
            _follow(engines)
    return ExitCode.OK


def attach_engine(daemon: Attachment) -> LLMEngine:
    """Attach to a running daemon, only to look: no tokenizer is read."""
    return LLMEngine(attach_sync_client(daemon, "top"), tokenizer=None)


def render(snapshot: EngineSnapshot, history: Sequence[float], width: int, height: int) -> RenderableType:
    """One frame of at most `height` lines. `history`: generated tokens a second, the oldest first."""
    room = max(0, height - _NUM_FIXED_LINES)
    engines = snapshot.engines[: room // 3]
    room -= len(engines)
    clients = snapshot.clients[: min(_MAX_CLIENTS, room // 3)]
    num_rows = room - len(clients)
    return Group(
        _render_head(snapshot, width),
        _render_rates(snapshot, history, width),
        _render_load(snapshot),
        _render_blocks(snapshot, width),
        _render_step(snapshot, width),
        *(_render_engine(engine) for engine in engines),
        Text(""),
        _render_clients(clients, width),
        Text(""),
        _render_requests(snapshot, num_rows, width),
    )


def _make_parser() -> Parser:
    parser = Parser("quire top", "Watch engines: rates, requests, KV blocks, clients. q or Ctrl-C leaves.")
    text = f"which daemon ({DEFAULT_NAME!r}); repeated: one below the other"
    parser.add_argument("--attach", action="append", metavar="NAME", help=text)
    add_keys_option(parser)
    parser.add_argument("--once", action="store_true", help="print one frame and leave, as when piped")
    text = "print one snapshot as JSON and leave, a list of them with several daemons"
    parser.add_argument("--json", action="store_true", help=text)
    return parser


# -- on the screen


def _print_frame(snapshots: Sequence[EngineSnapshot]) -> None:
    is_terminal = sys.stdout.isatty()
    console = Console() if is_terminal else Console(width=_PIPED_SIZE[0], height=_PIPED_SIZE[1])
    # Printing ends with a line break, and the prompt needs a line too.
    height = (console.height - 1) // len(snapshots)
    for snapshot in snapshots:
        console.print(render(snapshot, [snapshot.generation_tokens_per_s], console.width, height))


def _follow(engines: Sequence[LLMEngine]) -> None:
    """Show a frame each period until q or Ctrl-C. One engine that ends is an error, of several a line."""
    console = Console()
    histories = [deque[float](maxlen=1000) for _ in engines]
    with _unbuffered_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            width, height = console.size
            height //= len(engines)
            pairs = zip(engines, histories, strict=True)
            parts = [_look(engine, history, width, height, len(engines) == 1) for engine, history in pairs]
            live.update(Group(*parts), refresh=True)
            if _is_told_to_leave(PERIOD_S):
                return


def _look(
    engine: LLMEngine, history: deque[float], width: int, height: int, is_alone: bool
) -> RenderableType:
    """A frame of an engine as it is now. Raises QuireErrors of one that is alone."""
    try:
        snapshot = engine.snapshot()
    except QuireError as error:
        if is_alone:
            raise
        return Text(str(error), f"bold {_WAITING}", no_wrap=True, overflow="ellipsis")
    history.append(snapshot.generation_tokens_per_s)
    return render(snapshot, history, width, height)


@contextmanager
def _unbuffered_keys() -> Generator[None]:
    """Keys arrive as they are pressed and are not shown."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_told_to_leave(timeout_s: float) -> bool:
    """True when q is pressed, or nothing more can be, within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        if wait_readable(sys.stdin.fileno(), left_s):
            keys = os.read(sys.stdin.fileno(), 64)
            if not keys or b"q" in keys.lower():
                return True
    return False


# -- the parts of a frame


def _render_head(snapshot: EngineSnapshot, width: int) -> Text:
    head = Text.assemble(("Quire ", "bold"), snapshot.model, no_wrap=True, overflow="ellipsis")
    end = f"up {_format_duration(snapshot.uptime_s)}   q leaves"
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
        ("schedule", snapshot.schedule_ms, _ACCENT),
        ("update", snapshot.update_ms, _SECOND),
        ("wait", snapshot.step_wait_ms, _MUTED),
    )
    texts = [f" {name} {value:.2f} ms" for name, value, _ in parts]
    label, end = "step   ", f"  {snapshot.steps_per_s:.0f}/s"
    room = max(0, width - len(label) - len(end) - sum(map(len, texts)))
    total = sum(value for _, value, _ in parts)
    line = Text(label, no_wrap=True, overflow="ellipsis")
    for _, value, color in parts:
        line.append("█" * round(room * value / total if total else 0), color)
    for (_, _, color), text in zip(parts, texts, strict=True):
        line.append(text, color)
    return line.append(end, _MUTED)


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
    table = _make_table(width)
    for name in ("client", "running", "waiting", "tokens", "unsent", "weight", "attached"):
        table.add_column(name, justify="left" if name == "client" else "right", no_wrap=True)
    for client in clients:
        table.add_row(
            client.name,
            f"{client.num_running}",
            f"{client.num_waiting:,}",
            f"{client.tokens_served_total:,}",
            f"{client.num_unsent:,}",
            f"{client.weight:g}",
            _format_duration(client.connected_s),
        )
    return table


def _render_requests(snapshot: EngineSnapshot, num_rows: int, width: int) -> RenderableType:
    """Running ones first; the waiting keep half of the rows. What has no row is counted in the last line."""
    num_all = len(snapshot.requests) + snapshot.num_hidden_requests
    if num_all > num_rows:
        num_rows = max(0, num_rows - 1)  # for the last line
    running = [view for view in snapshot.requests if view.state == "running"]
    waiting = [view for view in snapshot.requests if view.state != "running"]
    num_waiting = min(len(waiting), max(num_rows // 2, num_rows - len(running)))
    shown = running[: num_rows - num_waiting] + waiting[:num_waiting]
    table = _make_table(width)
    for name in ("request", "state", "progress", "tokens", "holds", "age"):
        is_number = name in ("tokens", "holds", "age")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    table.add_column("waits for / cached", no_wrap=True, overflow="ellipsis", ratio=1)
    for view in shown:
        table.add_row(*_describe(view))
    if num_all == len(shown):
        return table
    return Group(table, Text(f"and {num_all - len(shown):,} more", _MUTED))


def _describe(view: RequestView) -> tuple[str | Text, ...]:
    num_wanted = view.max_total_tokens - view.num_prompt_tokens
    is_prefill = view.state == "running" and view.num_output_tokens == 0
    done, whole = view.num_output_tokens, num_wanted
    if is_prefill:
        done, whole = view.num_computed_tokens, view.num_prompt_tokens
    filled = round(10 * min(done, whole) / whole) if whole > 0 else 0
    return (
        _shorten(view.request_id, 20),
        "prefill" if is_prefill else view.state,
        Text.assemble(("━" * filled, _ACCENT), ("━" * (10 - filled), _MUTED)),
        f"{view.num_prompt_tokens}+{view.num_output_tokens}",
        _format_size(view.held_bytes),
        _format_duration(view.age_s),
        Text(view.waits_for, _WAITING) if view.waits_for else Text(_describe_prefix(view), _MUTED),
    )


def _describe_prefix(view: RequestView) -> str:
    """What was found of its prompt when it began, and why no more; first of all what kind it is."""
    return ", ".join(filter(None, (view.kind, f"{view.num_cached_tokens:,} tokens", view.prefix_miss)))


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
    return f"{num_bytes / 1e3:.0f} kB" if num_bytes < 1e6 else f"{num_bytes / 1e6:.0f} MB"


def _format_duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
