"""OpenTelemetry spans, one per answer with its phases below it. Knows names of spans and attributes; never sees a word of anybody.

OpenTelemetry is an optional dependency (`pip install 'forespeak[otel]'`), imported only when tracing is configured. Attribute names
follow the semantic conventions for generative AI where there is one.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

from server.generation import Figures, Generation
from spec.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter

SHUTDOWN_SECONDS = 2.0  # for spans not yet exported when the server ends
_INSTALL = "otlp_endpoint is set, but OpenTelemetry is not installed: pip install 'forespeak[otel]'"


class Tracing(Protocol):
    """What the service tells about every answer that ended. Must not block."""

    def on_end(self, generation: Generation, model: str, traceparent: str) -> None:
        """`traceparent` is the client's W3C trace context, "" when it sent none."""

    def close(self) -> None: ...


class NoTracing:
    def on_end(self, generation: Generation, model: str, traceparent: str) -> None:
        pass

    def close(self) -> None:
        pass


class SpanTracing:
    """Makes spans when an answer has ended, with the times that were measured anyway. Nothing is done while it runs."""

    def __init__(self, processor: SpanProcessor, version: str = "") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create({"service.name": "forespeak", "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("forespeak", version)

    def on_end(self, generation: Generation, model: str, traceparent: str) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        figures, request = generation.figures, generation.request
        end_ns, end = time.time_ns(), time.perf_counter()

        def wall(moment: float) -> int:
            return end_ns - round((end - moment) * 1e9)

        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent} if traceparent else {})
        span = self._tracer.start_span(f"chat {model}", parent, SpanKind.SERVER, start_time=wall(figures.arrival))
        span.set_attributes(
            {
                "gen_ai.operation.name": "chat", "gen_ai.request.model": model,
                "gen_ai.request.max_tokens": request.sampling.max_tokens,
                "gen_ai.request.temperature": request.sampling.temperature,
                "gen_ai.usage.input_tokens": figures.prompt_tokens, "gen_ai.usage.output_tokens": figures.completion_tokens,
                "gen_ai.response.finish_reasons": (str(generation.finish_reason),),
                "forespeak.request": request.id, "forespeak.tenant": request.tenant,
                "forespeak.cached_tokens": figures.cached_tokens, "forespeak.steps": figures.steps,
                "forespeak.drafted": figures.drafted, "forespeak.accepted": figures.accepted,
            }
        )  # fmt: skip
        if generation.error is not None:
            span.set_attribute("error.type", generation.error.code or "error")
            span.set_status(Status(StatusCode.ERROR, generation.error.message))
        inside = set_span_in_context(span)
        for name, begin, stop in phases(figures):
            self._tracer.start_span(name, inside, start_time=wall(begin)).end(wall(stop))
        span.end(end_ns)

    def close(self) -> None:
        """Export what is left, for a bounded time: a collector that does not answer must not hold up the end."""
        closing = threading.Thread(target=self._provider.shutdown, name="span export", daemon=True)
        closing.start()
        closing.join(SHUTDOWN_SECONDS)


def phases(figures: Figures) -> list[tuple[str, float, float]]:
    """(name, begin, end) in seconds of time.perf_counter(); none of an answer that never started."""
    if not figures.steps:
        return []
    admitted = min(figures.arrival + figures.queue_seconds, figures.first_token)
    return [
        ("queue", figures.arrival, admitted),
        ("prefill", admitted, figures.first_token),
        ("decode", figures.first_token, figures.last_token),
    ]


def open_tracing(endpoint: str, version: str) -> Tracing:
    """Spans to an OTLP/HTTP collector such as http://127.0.0.1:4318/v1/traces; none for "". Raises ConfigError without the package."""
    if not endpoint:
        return NoTracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(_INSTALL) from error
    return export_to(OTLPSpanExporter(endpoint=endpoint), version)


def export_to(exporter: SpanExporter, version: str = "") -> SpanTracing:
    """Spans leave in batches from a thread of OpenTelemetry's own."""
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return SpanTracing(BatchSpanProcessor(exporter), version)
