"""Lets the tests beside it import their helpers, and opens apps and servers over scripted engines for them.

A test asks for `llm`, `client` and `serving`, those of one app; it and its module say with the mark `app` how
the app is made, as `make_app` takes it: `@pytest.mark.app(template=TEMPLATE, max_model_len=2000)`. One that
asks for `peer` and `server` has a server on a socket; the mark `server` says how, as `start_server` takes it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from openai_fakes import AsgiClient, FakeLLM, OpenApp, OpenApps, make_app
from quire.frontend.http.serving import Serving
from server_fakes import open_server, peer, read_marks, running, server  # noqa: F401


@pytest.fixture
def open_app() -> Iterator[OpenApps]:
    """Opens apps; at the end no request may be left in any."""
    apps: list[OpenApp] = []

    def open_another(**how: Any) -> OpenApp:
        apps.append(make_app(**how))
        return apps[-1]

    yield open_another
    for app in apps:
        app.check_ended()


@pytest.fixture
def app(open_app: OpenApps, request: pytest.FixtureRequest) -> OpenApp:
    """The app of this test."""
    return open_app(**read_marks(request, "app"))


@pytest.fixture
def llm(request: pytest.FixtureRequest) -> FakeLLM:
    """The engine of this test's server, or of its app."""
    has_server = "peer" in request.fixturenames or "server" in request.fixturenames
    return request.getfixturevalue("running" if has_server else "app").llm


@pytest.fixture
def client(app: OpenApp) -> AsgiClient:
    return app.client


@pytest.fixture
def serving(app: OpenApp) -> Serving:
    return app.serving


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What a test lets go of is to go by itself, not when the collector comes by."""
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()
