"""Send OpenTelemetry traces: a span for each request for tokens.

This module is imported only if traces are enabled, and needs the extra `otel`."""

from __future__ import annotations

import threading
import time
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers

from xgpt.core.version import __version__
from xrunner.server.request_info import RequestInfo

CLOSE_S = 3.0
"""Seconds for which an ending server waits for its collector."""
MAX_STATE = 512
"""Number of characters of the longest `tracestate` that is read. It is the length that systems must pass on (W3C, Trace
Context, sec. 3.3.1.5). The header is read before the API key is checked, and the library takes time in proportion to
the square of the number of blanks in it."""
ATTRIBUTES = {
    "key": "xgpt.key",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
}
"""OpenTelemetry's attribute for each field of a request's log line, or a name of ours if there is none."""


class Tracer:
    """Sends a span for each ended request. Times are on the clock of `time.perf_counter`."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("xgpt", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    @classmethod
    def to(cls, endpoint: str | None) -> Tracer:
        """Return a tracer to an OTLP collector over HTTP. None means the collector in the standard environment
        variables."""
        # The defaults of Resource.create record the process's command line, which may contain secrets.
        resource = Resource({SERVICE_NAME: "xgpt", "service.version": __version__})
        provider = TracerProvider(resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        to = OTLPSpanExporter() if endpoint is None else OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
        provider.add_span_processor(BatchSpanProcessor(to))
        return cls(provider)

    def note(self, method: str, path: str, headers: Headers, status: int, info: RequestInfo) -> None:
        """Record a request that has ended with this status (0: the client had disconnected), and add the trace's id to
        its log line."""
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        if len(carrier.get("tracestate", "")) > MAX_STATE:
            del carrier["tracestate"]
        attributes: dict[str, Any] = {"http.request.method": method, "url.path": path, "xgpt.request_id": info.id}
        if status:
            attributes["http.response.status_code"] = status
        attributes |= {name: info.log[field] for field, name in ATTRIBUTES.items() if field in info.log}
        span = self._tracer.start_span(
            f"{method} {path}",
            self._propagator.extract(carrier),
            trace.SpanKind.SERVER,
            attributes,
            start_time=self._ns(info.received_s),
        )
        if status >= 500:
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span)
        for name, start_s, end_s in info.phases:
            self._tracer.start_span(name, inside, start_time=self._ns(start_s)).end(self._ns(end_s))
        span.end(self._ns(time.perf_counter()))
        info.log["trace_id"] = trace.format_trace_id(span.get_span_context().trace_id)

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _ns(self, at_s: float) -> int:
        return self._epoch_ns + round(at_s * 1e9)
