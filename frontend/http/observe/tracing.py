"""Request tracing with OpenTelemetry: one server span a request to /v1 or any route that computes, with what
the engine says of it.

Optional: the SDK and its exporter are an extra, loaded when an endpoint is configured. Attributes are named
by OpenTelemetry's GenAI conventions, latencies as in vLLM. Prompts and answers are never in a span.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....ipc.errors import ConfigError, describe_install
from ....ipc.params.pooling_params import EMBEDDING, PoolingParams
from ....ipc.params.sampling_params import SamplingParams
from ...outputs import RequestOutput
from ...requests.vectors.outputs import PoolingOutput, PoolingRequestOutput
from ..dialects.table import computes
from ..engines.server_parts import ServerParts

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_SERVICE_NAME = "quire"
_TRACED_PREFIX = "/v1/"
_MAX_PATH_LENGTH = 200  # a caller without a key is traced as well
_FLUSH_TIMEOUT_MS = 2000


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError for what cannot be an endpoint, or when the extra is not installed."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError("otlp_traces_endpoint", endpoint, "an http:// or https:// URL of an OTLP collector")
    try:
        importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError:
        allowed = f"given with the extra installed: {describe_install('tracing')}"
        raise ConfigError("otlp_traces_endpoint", endpoint, allowed) from None


class Tracing:
    """Spans of one server. `wrap` goes around the app, `close` sends what is left."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource.create({"service.name": _SERVICE_NAME}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))

    def wrap(self, app: ASGIApp, parts: ServerParts) -> ASGIApp:
        """The app with a span around each such request; `parts` tells spans what the engines say."""
        parts.on_output.append(note_output)
        parts.on_pooled.append(note_pooled)
        return trace_requests(app, self._provider)

    def close(self) -> None:
        """Send finished spans, for a bounded time."""
        self._provider.force_flush(_FLUSH_TIMEOUT_MS)
        self._provider.shutdown()


def trace_requests(app: ASGIApp, provider: TracerProvider) -> ASGIApp:
    """The app with a span around each such request."""
    from opentelemetry import propagate, trace

    tracer = provider.get_tracer(__name__)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_traced(scope["path"]):
            await app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"][:_MAX_PATH_LENGTH]
        attributes = {"http.request.method": scope["method"], "url.path": path}
        with tracer.start_as_current_span(
            f"{scope['method']} {path}",
            context=propagate.extract(headers),
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
        ) as span:

            async def send_and_note(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            await app(scope, receive, send_and_note)

    return answer


def _is_traced(path: str) -> bool:
    return path.startswith(_TRACED_PREFIX) or computes(path)


def note_pooled(
    request_id: str, params: PoolingParams, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]
) -> None:
    """Put the figures of a request for vectors into the current span."""
    from opentelemetry import trace

    values: dict[str, Any] = {
        "gen_ai.operation.name": "embeddings" if params.task in EMBEDDING else params.task,
        "gen_ai.request.id": request_id,
        "quire.num_inputs": len(outputs),
        "gen_ai.embeddings.dimension.count": params.dimensions,
        "gen_ai.usage.prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "gen_ai.usage.cached_tokens": sum(output.num_cached_tokens for output in outputs),
    }
    _set_attributes(trace.get_current_span(), values)


def note_output(output: RequestOutput, params: SamplingParams) -> None:
    """Put a finished output's figures into the current span."""
    from opentelemetry import trace

    span = trace.get_current_span()
    metrics = output.metrics
    values: dict[str, Any] = {
        "gen_ai.request.id": output.request_id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.cached_tokens": output.num_cached_tokens,
        "gen_ai.response.finish_reasons": [str(completion.finish_reason) for completion in output.outputs],
    }
    if metrics is not None:
        values["gen_ai.usage.completion_tokens"] = metrics.num_generation_tokens
        values["gen_ai.latency.time_to_first_token"] = metrics.first_token_latency
        if metrics.queued_ts is not None and metrics.scheduled_ts is not None:
            values["gen_ai.latency.time_in_queue"] = metrics.scheduled_ts - metrics.queued_ts
        if metrics.last_token_ts is not None:
            values["gen_ai.latency.e2e"] = metrics.last_token_ts - metrics.arrival_time
    _set_attributes(span, values)


def _set_attributes(span: Span, values: dict[str, Any]) -> None:
    span.set_attributes({name: value for name, value in values.items() if value is not None})
