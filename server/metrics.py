"""Prometheus metrics. Knows names and units; refuses to know requests' content.

Counts of tokens and drafts are those delivered to clients. Gauges and cache counters come from the engine's own statistics; a
counter of a restarted engine begins at zero again, and is added up here so that what is scraped never falls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from server.generation import Figures
from spec.request import PHASES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
_PAGE_STATES = ("live", "cached", "free")
_FINISHED_REASONS = ("stop", "length", "cancelled", "error")


class Metrics:
    """One registry per server, so that two servers in one process do not share counts."""

    def __init__(self, prefix: str = "forespeak:") -> None:
        self.registry = registry = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(prefix + name, text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(prefix + name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(prefix + name, text, buckets=buckets, registry=registry)

        self.running = gauge("num_requests_running", "Requests in the engine's batch.")
        self.waiting = gauge("num_requests_waiting", "Requests waiting for their first step.")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of KV pages held by live sequences, 0 to 1.")
        self.kv_pages = gauge("kv_pages", "KV pages by state.", "state")
        self.prefix_queries = counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.")
        self.preemptions = counter("preemptions_total", "Sequences put back to waiting because pages ran out.")
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of started requests.")
        self.generation_tokens = counter("generation_tokens_total", "Tokens delivered.")
        self.finished = counter("request_success_total", "Requests ended, by reason.", "finished_reason")
        self.ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", _LATENCY)
        self.token_gap = histogram("inter_token_latency_seconds", "Time per token after the first.", _GAP)
        self.latency = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY)
        self.queue_time = histogram("request_queue_time_seconds", "From arrival to the first step.", _LATENCY)
        self.decode_passes = counter(
            "decode_passes_total",
            "Target passes that delivered tokens of a request after its first ones, one per request and pass.",
        )
        self.decode_pass_tokens = counter("decode_pass_tokens_total", "Tokens that those passes delivered.")
        self.drafts = counter("spec_decode_num_drafts_total", "Target passes that verified at least one drafted node.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens_total", "Nodes drafted.", "drafter")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens_total", "Drafted tokens delivered.", "drafter")
        self.accepted_per_pos = counter(
            "spec_decode_num_accepted_tokens_per_pos_total", "Drafted tokens delivered, by depth in the tree.", "position"
        )
        self.judged_per_pos = counter(
            "spec_decode_num_judged_per_pos_total", "Passes in which drafts at that depth were judged, by depth.", "position"
        )
        self.restarts = counter("engine_restarts_total", "Engine processes replaced after a fault.")
        self.step = histogram("step_seconds", "One engine step.", _STEP)
        self.step_phases = counter(
            "step_phase_seconds_total", "Time of engine steps by phase; adds up to step_seconds.", "phase"
        )
        self.loop_lag = histogram("event_loop_lag_seconds", "Delay of a timer on the server's event loop.", _GAP)
        self._engine_counts = {
            "prefix_cache_queries": (self.prefix_queries, 0.0),
            "prefix_cache_hits": (self.prefix_hits, 0.0),
            "preemptions": (self.preemptions, 0.0),
        }
        for state in _PAGE_STATES:
            self.kv_pages.labels(state)
        for reason in _FINISHED_REASONS:
            self.finished.labels(reason)
        self._phases = [self.step_phases.labels(phase) for phase in PHASES]

    def on_stats(self, values: Mapping[str, Any]) -> None:
        """Take the engine's gauges and counters; unknown keys are left alone."""
        self.running.set(values.get("num_requests_running", 0))
        self.waiting.set(values.get("num_requests_waiting", 0))
        pages = {state: values.get(f"kv_pages_{state}", 0) for state in _PAGE_STATES}
        for state, count in pages.items():
            self.kv_pages.labels(state).set(count)
        total = sum(pages.values())
        self.kv_usage.set(pages["live"] / total if total else 0.0)
        for name, (counter, last) in self._engine_counts.items():
            value = float(values.get(name, last))
            counter.inc(value - last if value >= last else value)
            self._engine_counts[name] = (counter, value)

    def on_engine_gone(self, waiting: int) -> None:
        """No process holds anything now; its requests wait for the next one."""
        self.running.set(0)
        self.waiting.set(waiting)
        self._engine_counts = {name: (counter, 0.0) for name, (counter, _) in self._engine_counts.items()}

    def on_step(self, phases: Sequence[float]) -> None:
        """Seconds of one step, in the order of PHASES."""
        self.step.observe(sum(phases))
        for phase, seconds in zip(self._phases, phases, strict=True):
            phase.inc(seconds)

    def on_tokens(self, count: int, gap_seconds: float) -> None:
        """`count` tokens of one request were delivered, `gap_seconds` after its last ones (0: the first)."""
        self.generation_tokens.inc(count)
        if gap_seconds > 0 and count:
            self.decode_passes.inc()
            self.decode_pass_tokens.inc(count)
            each = gap_seconds / count
            for _ in range(count):
                self.token_gap.observe(each)

    def on_draft(self, drafted_by: Mapping[str, int], accepted: list[str], judged: int) -> None:
        """One target pass: nodes by drafter, the drafters of the delivered drafts, root side first, and how many positions were judged."""
        self.drafts.inc()
        for name, count in drafted_by.items():
            self.draft_tokens.labels(name).inc(count)
        for position, name in enumerate(accepted):
            self.accepted_tokens.labels(name).inc()
            self.accepted_per_pos.labels(str(position)).inc()
        for position in range(judged):
            self.judged_per_pos.labels(str(position)).inc()

    def on_end(self, reason: str, figures: Figures, now: float) -> None:
        self.finished.labels(reason).inc()
        if figures.steps:
            self.prompt_tokens.inc(figures.prompt_tokens)
            self.ttft.observe(figures.ttft_seconds)
            self.queue_time.observe(figures.queue_seconds)
            self.latency.observe(max(0.0, now - figures.arrival))

    def render(self) -> bytes:
        return generate_latest(self.registry)
