"""The page at "/", where programs read what Ollama's clients look for before they ask; and what it shows: one
EngineSnapshot at /stats, two a second at /stats/stream.

However many look, the engine is asked once each period; while nobody looks it is not asked at all. Of several
engines `?model=NAME` chooses one.

The page is one document made of page/: scripts and styles are written as files and sent within it, so the
policy under which a browser shows it can name each by its hash, and it needs no further request, whatever
path a proxy gives it. Two libraries that few messages need are asked for by the first of these, by the same
policy.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from ....ipc.protocol.engine_views import EngineSnapshot, hide_others
from ....ipc.protocol.rights import Reach
from ..bodies.openapi import Routes
from ..caller import Caller
from ..engines.served_models import ServedModel, ServedModels
from ..errors import ErrorResponse
from ..headers import find_header
from ..stream import EventStream, encode_event, respond

PERIOD_S = 0.5
_FOLDER = Path(__file__).parents[1] / "page"
_LIBRARIES = ("highlight", "katex")


def add_routes(routes: Routes, models: ServedModels, find_caller: Callable[[Request], Caller]) -> None:
    """Serve the page, /stats and /stats/stream, whose streams end when the server is about to.

    An engine that is gone raises EngineDeadError or ApiError, for the app to answer.
    """
    page = load_page()
    headers = {"content-security-policy": make_content_security_policy(page), "cache-control": "no-cache"}
    headers["vary"] = "accept"
    feeds = {model: SnapshotFeed(functools.partial(_look, model)) for model in models.models}
    models.parts.on_drain += [feed.close for feed in feeds.values()]

    async def show_page(http: Request) -> Response:
        if b"text/html" not in find_header(http.scope["headers"], b"accept"):  # who is no browser
            return PlainTextResponse("Ollama is running", headers={"vary": "accept"})
        return HTMLResponse(page, headers={**headers, "x-content-type-options": "nosniff"})

    async def show_library(http: Request) -> Response:
        # The page asks for it by its hash, so that what a browser keeps is never old.
        kept = {"cache-control": "public, max-age=31536000, immutable", "x-content-type-options": "nosniff"}
        return Response(_read(http.scope["route"].path[1:]), headers=kept, media_type="text/javascript")

    async def show_stats(http: Request, model: str | None = None) -> Response:
        return respond(_show(await _look(models.find(model)), find_caller(http), "/stats"))

    async def show_history(model: str | None = None) -> Response:
        return respond({"engines": list((await models.find(model).serving.llm.history_by_engine()).values())})

    async def stream_stats(http: Request, model: str | None = None) -> Response:
        events = feeds[models.find(model)].watch(find_caller(http))
        return EventStream(events, models.parts.options.limits)

    routes.add_page("/", show_page)
    for name in _LIBRARIES:
        routes.add_page(f"/vendor/{name}.min.js", show_library)
    routes.add("/stats", show_stats, "The engine at this moment", EngineSnapshot, more={404: ErrorResponse})
    routes.add("/stats/history", show_history, "Each engine's last quarter of an hour, in periods")
    summary = "The engine, twice a second, as events"
    routes.add("/stats/stream", stream_stats, summary, "text/event-stream")


def _show(snapshot: EngineSnapshot, caller: Caller, path: str) -> EngineSnapshot:
    """What a caller may see of it."""
    return snapshot if caller.reaches(path) is Reach.ALL else hide_others(snapshot, caller.owns)


async def _look(model: ServedModel) -> EngineSnapshot:
    return await model.serving.llm.snapshot()


class EncodedSnapshot:
    """A snapshot as events, each encoded once for all viewers of a tenant."""

    def __init__(self, snapshot: EngineSnapshot) -> None:
        self._snapshot = snapshot
        self._events: dict[str, bytes] = {}

    def encode(self, caller: Caller) -> bytes:
        """What the caller may see of it."""
        event = self._events.get(caller.tenant)
        if event is None:
            shown = _show(self._snapshot, caller, "/stats/stream")
            event = self._events[caller.tenant] = encode_event(shown)
        return event


class SnapshotFeed:
    """One look a period, shared by all who wait for it; who asks for none has none made."""

    def __init__(self, look: Callable[[], Awaitable[EngineSnapshot]], period_s: float = PERIOD_S) -> None:
        self._look = look
        self._period_s = period_s
        self._closed = asyncio.Event()
        self._looking: asyncio.Task[EncodedSnapshot] | None = None
        self._next_at = 0.0  # when there may be another look, by the loop's clock

    async def watch(self, caller: Caller) -> AsyncGenerator[bytes, None]:
        """Snapshots as events, as the caller may see them, until the feed is closed; one that a slow viewer
        misses is left out.

        Raises what the look raised.
        """
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            while True:
                if self._looking is None or self._looking.done():
                    self._looking = asyncio.create_task(self._look_in_time())
                    self._looking.add_done_callback(_retrieve)
                looking = self._looking
                await asyncio.wait({looking, closed}, return_when=asyncio.FIRST_COMPLETED)
                if self._closed.is_set():
                    return
                yield looking.result().encode(caller)
        finally:
            closed.cancel()

    def close(self) -> None:
        """End every stream, now and from now on."""
        self._closed.set()
        if self._looking is not None:
            self._looking.cancel()

    async def _look_in_time(self) -> EncodedSnapshot:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._next_at - loop.time())
        self._next_at = loop.time() + self._period_s
        return EncodedSnapshot(await self._look())


def _retrieve(looking: asyncio.Task[EncodedSnapshot]) -> None:
    """Its error is the viewers' answer, if any are left."""
    if not looking.cancelled():
        looking.exception()


@functools.cache
def load_page() -> str:
    """page/index.html with the styles and scripts that it names in their places."""
    page = (_FOLDER / "index.html").read_text()
    page = re.sub(r'<link rel="stylesheet" href="(\S+)">', lambda match: _inline("style", match[1]), page)
    page = re.sub(r'<script src="(\S+)"></script>', lambda match: _inline("script", match[1]), page)
    hashes = {name: _hash(_read(f"vendor/{name}.min.js")) for name in _LIBRARIES}
    metas = "".join(f'<meta name="{name}" content="{digest}">' for name, digest in hashes.items())
    return page.replace("</head>", f"{metas}</head>", 1)


@functools.cache
def make_content_security_policy(page: str) -> str:
    """Only this page's own scripts and style, by their hashes, and this server; no text becomes markup."""
    scripts = " ".join(f"'{_hash(body)}'" for body in re.findall(r"<script>(.*?)</script>", page, re.S))
    libraries = "".join(f" '{digest}'" for digest in re.findall(r'content="(sha256-\S+)"', page))
    styles = " ".join(f"'{_hash(body)}'" for body in re.findall(r"<style>(.*?)</style>", page, re.S))
    return (
        f"default-src 'none'; script-src {scripts}{libraries}; style-src {styles}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types quire-library"
    )


def _read(name: str) -> str:
    return (_FOLDER / name).read_text()


def _inline(tag: str, name: str) -> str:
    body = _read(name)
    if tag == "script":
        # What would end a script's element, or begin another in it, stands in literals; \x3c is the same.
        body = re.sub(r"<(?=!--|/?script)", r"\\x3c", body, flags=re.I)
    return f"<{tag}>{body}</{tag}>"


def _hash(body: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
