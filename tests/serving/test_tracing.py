"""OpenTelemetry spans: one per answer with its phases, under the client's trace, without a word of anybody; off by default."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import websockets.sync.client as ws_client
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from serving import Running, running, toy_settings, wait_for

from server.ports import TextTools
from server.serve import ServeOptions
from server.tracing import NoTracing, SpanTracing, open_tracing
from spec.errors import ConfigError

SECRET = "a secret nobody should read"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(text: TextTools, spans: InMemorySpanExporter) -> Iterator[Running]:
    with running(toy_settings(), text, ServeOptions(tracing=SpanTracing(SimpleSpanProcessor(spans), "1"))) as server:
        yield server


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 9, "temperature": 0} | fields


def finished(spans: InMemorySpanExporter, count: int) -> list[Any]:
    wait_for(lambda: len(spans.get_finished_spans()) >= count, 5)
    found = list(spans.get_finished_spans())
    spans.clear()
    return found


def test_an_answer_is_a_span_with_its_phases(traced: Running, spans: InMemorySpanExporter) -> None:
    answer = traced.http.post("/v1/chat/completions", json=body(), headers={"traceparent": TRACE}).json()
    *phases, whole = finished(spans, 4)
    assert (whole.name, whole.kind, whole.status.status_code) == ("chat toy", SpanKind.SERVER, StatusCode.UNSET)
    assert f"{whole.context.trace_id:032x}-{whole.parent.span_id:016x}" == TRACE[3:-3]
    assert whole.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert whole.attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"] == 9
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert whole.attributes["forespeak.accepted"] == answer["speculation"]["accepted"] > 0
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert all(span.parent.span_id == whole.context.span_id for span in phases)
    moments = [moment for span in phases for moment in (span.start_time, span.end_time)]
    assert moments == sorted(moments)
    assert whole.start_time == moments[0]
    assert whole.end_time >= moments[-1]
    milliseconds = (phases[1].end_time - whole.start_time) / 1e6
    assert milliseconds == pytest.approx(answer["timings"]["ttft_ms"], abs=1)
    assert SECRET not in "".join(span.to_json() for span in (*phases, whole))


def test_every_way_in_is_traced(traced: Running, spans: InMemorySpanExporter) -> None:
    with ws_client.connect(traced.ws_url, additional_headers={"traceparent": TRACE}) as ws:
        ws.recv()
        ws.send(json.dumps({"type": "chat", "id": 1} | body()))
        while json.loads(ws.recv(timeout=10))["type"] != "done":
            pass
    traced.http.post("/v1/responses", json={"input": SECRET, "max_output_tokens": 9}, headers={"traceparent": "garbage"})
    native, responses = (span for span in finished(spans, 8) if span.name == "chat toy")
    assert f"{native.context.trace_id:032x}" == TRACE.split("-")[1]
    assert responses.parent is None


def test_a_failed_answer_is_an_error(text: TextTools) -> None:
    spans = InMemorySpanExporter()
    options = ServeOptions(tracing=SpanTracing(SimpleSpanProcessor(spans)))
    with running(toy_settings(), text, options) as server:
        request = body(response_format={"type": "regex", "regex": "refuse"})
        assert server.http.post("/v1/chat/completions", json=request).status_code == 400
        [span] = finished(spans, 1)
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "invalid_grammar"


def test_off_by_default_and_plain_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_tracing("", "1"), NoTracing)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'forespeak\[otel\]'"):
        open_tracing("http://127.0.0.1:4318/v1/traces", "1")


def test_a_collector_that_is_not_there_holds_nothing_up(text: TextTools, caplog: pytest.LogCaptureFixture) -> None:
    with running(toy_settings(otlp_endpoint="http://127.0.0.1:9/v1/traces"), text) as server:
        assert server.http.post("/v1/chat/completions", json=body()).status_code == 200
    assert server.exit_code == 0
