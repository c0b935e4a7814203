"""Spans of requests, as a collector gets them from a real server."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from daemons import Daemon, fake_modules, runtime_folders
from openai_fakes import AsgiClient
from quire.frontend.cli import main
from quire.frontend.http.observe.tracing import note_pooled, trace_requests
from quire.frontend.http.serving import Serving
from quire.frontend.options.engine_args import EngineArgs
from served import Served

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(HTTPServer):
    """An OTLP collector that keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


def read_spans(bodies: list[bytes]) -> list[Any]:
    import gzip

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []
    for body in bodies:
        request = ExportTraceServiceRequest()
        request.ParseFromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
        spans += [span for one in request.resource_spans for scope in one.scope_spans for span in scope.spans]
    return spans


@pytest.fixture
def daemon() -> Iterator[str]:
    """The name of an engine whose worker is a fake."""
    with runtime_folders(), fake_modules(), Daemon("traced", EngineArgs().create_engine_config()):
        yield "traced"


def test_a_request_is_a_span_below_its_callers_with_the_engines_figures(
    collector: Collector, daemon: str
) -> None:
    served = Served("--otlp-traces-endpoint", collector.url, "--attach", daemon)
    try:
        body = json.dumps({"model": "pocket", "prompt": "Once", "max_tokens": 5, "stream": True}).encode()
        headers = {"content-type": "application/json", "traceparent": PARENT}
        request = urllib.request.Request(f"{served.url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.read().endswith(b"data: [DONE]\n\n")
        assert served.get("/live") == {"status": "live"}
    finally:
        assert served.stop() == 0
    spans = read_spans(collector.bodies)  # sent when the server ends, at the latest
    assert [span.name for span in spans] == ["POST /v1/completions"]
    assert spans[0].trace_id.hex() == PARENT.split("-")[1]
    assert spans[0].parent_span_id.hex() == PARENT.split("-")[2]
    values = {one.key: one.value for one in spans[0].attributes}
    assert values["http.response.status_code"].int_value == 200
    assert values["gen_ai.usage.completion_tokens"].int_value == 5
    assert values["gen_ai.latency.time_to_first_token"].double_value > 0


def test_an_endpoint_that_is_no_url_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--otlp-traces-endpoint", "collector:4318"]) == 2
    said = "otlp_traces_endpoint='collector:4318': expected an http:// or https:// URL"
    assert said in capsys.readouterr().err


@pytest.mark.app(tasks=("embed", "token_embed"), embedding_size=4)
async def test_the_span_of_a_request_for_vectors_has_its_figures(
    client: AsgiClient, serving: Serving
) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    serving._parts.on_pooled.append(note_pooled)
    client.app = trace_requests(client.app, provider)
    for path in ("/v1/embeddings", "/pooling", "/embed"):
        fields = {"inputs" if path == "/embed" else "input": ["One", "Two words"]}
        assert (await client.post(path, fields)).status == 200
    await client.post("/tokenize", {"prompt": "One"})
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["POST /v1/embeddings", "POST /pooling", "POST /embed"]
    for span in spans:
        values = span.attributes or {}
        assert (values["gen_ai.operation.name"], values["quire.num_inputs"]) == ("embeddings", 2)
        assert values["gen_ai.usage.prompt_tokens"] == 4
