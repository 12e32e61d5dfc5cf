"""What a running server's figures say should change. Pure: the text of /metrics in, advice out.

Every rule names the figure it stands on, and none speaks before enough was seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

ENOUGH_TOKENS = 2000  # delivered, before anything is said about drafts or chunks
ENOUGH_NODES = 500  # drafted, before a drafter is judged
ENOUGH_DRAFTS = 500  # trees verified, before their size is judged
POOR_ACCEPTANCE = 0.1
DEEP, SHALLOW = 12, 4  # depths that say whether trees are cut short
FULL = 0.9  # share of pages in live use


@dataclass(slots=True)
class Figures:
    """Totals and gauges by name, without prefix; those with a label by its value; histograms as (upper bound, count so far)."""

    values: dict[str, float] = field(default_factory=dict)
    labelled: dict[str, dict[str, float]] = field(default_factory=dict)
    buckets: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def get(self, name: str) -> float:
        return self.values.get(name, 0.0)

    def quantile(self, name: str, share: float) -> float:
        """The bound of the bucket that holds it, between bounds in proportion; 0 when nothing was counted."""
        buckets = sorted(self.buckets.get(name, []))
        total = buckets[-1][1] if buckets else 0.0
        low, before = 0.0, 0.0
        for bound, count in buckets:
            if total and count >= share * total:
                if bound == float("inf"):
                    return low
                inside = (share * total - before) / (count - before) if count > before else 1.0
                return low + (bound - low) * inside
            low, before = bound, count
        return 0.0


@dataclass(frozen=True, slots=True)
class Advice:
    """`setting`: the name in a config file, "" where none helps. `why` says the figure."""

    setting: str
    change: str
    why: str


def read_figures(text: str) -> Figures:
    """The figures in a /metrics answer, whatever prefix they carry. Raises ValueError on anything else."""
    found = Figures()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.rsplit(":", 1)[-1]
            labels = dict(sample.labels)
            if name.endswith("_bucket"):
                found.buckets.setdefault(name.removesuffix("_bucket"), []).append((float(labels["le"]), sample.value))
            elif labels:
                found.labelled.setdefault(name, {})[next(iter(labels.values()))] = sample.value
            else:
                found.values[name] = sample.value
    if "num_requests_running" not in found.values:
        raise ValueError("no num_requests_running among the metrics; this is no Forespeak server")
    return found


def advise(figures: Figures) -> list[Advice]:
    """Most urgent first; empty when nothing stands out."""
    return [*_faults(figures), *_memory(figures), *_drafts(figures), *_chunks(figures)]


def _faults(figures: Figures) -> Iterator[Advice]:
    restarts = figures.get("engine_restarts_total")
    if restarts:
        yield Advice("", "read the log", f"the engine process was replaced {restarts:.0f} times")
    lag = figures.quantile("event_loop_lag_seconds", 0.99)
    if lag > 0.05:
        yield Advice("threads", "one fewer", f"the server's own loop waits {lag * 1e3:.0f} ms (p99) for a core")


def _memory(figures: Figures) -> Iterator[Advice]:
    preempted, usage, waiting = (figures.get(n) for n in ("preemptions_total", "kv_cache_usage_perc", "num_requests_waiting"))
    if preempted:
        yield Advice(
            "kv_memory", "more, or a lower max_sequences", f"{preempted:.0f} preemptions: pages ran out and work was done twice"
        )
    elif waiting and usage > FULL:
        yield Advice("kv_memory", "more", f"{waiting:.0f} requests wait while {usage:.0%} of the pages are in use")
    elif waiting and usage < 0.7:
        yield Advice("max_sequences", "higher", f"{waiting:.0f} requests wait while only {usage:.0%} of the pages are in use")
    pages = figures.labelled.get("kv_pages", {})
    looked, hits = figures.get("prefix_cache_queries_total"), figures.get("prefix_cache_hits_total")
    total = sum(pages.values())
    if looked > ENOUGH_TOKENS and hits / looked > 0.2 and total and pages.get("free", 0.0) < 0.02 * total and not preempted:
        yield Advice(
            "kv_memory", "more", f"{hits / looked:.0%} of prompt tokens come from the cache, and it has no free page left"
        )


def _drafts(figures: Figures) -> Iterator[Advice]:
    if figures.get("generation_tokens_total") < ENOUGH_TOKENS:
        return
    drafted = figures.labelled.get("spec_decode_num_draft_tokens_total", {})
    accepted = figures.labelled.get("spec_decode_num_accepted_tokens_total", {})
    good = [name for name, count in drafted.items() if not _poor(count, accepted.get(name, 0.0))]
    for name, count in drafted.items():
        if name not in good:
            left = ",".join(good) or "none"
            yield Advice(
                "drafters", left, f"{accepted.get(name, 0.0) / count:.1%} of {count:.0f} nodes of {name} were accepted"
            )
    drafts = figures.get("spec_decode_num_drafts_total")
    depths = _by_depth(figures)
    if drafts < ENOUGH_DRAFTS or not depths:
        return
    deep = sum(count for depth, count in depths.items() if depth == DEEP) / drafts
    if deep > 0.05:
        yield Advice("max_tree_nodes", "higher", f"{deep:.0%} of drafts are accepted {DEEP} tokens deep or more")
    past = sum(count for depth, count in depths.items() if depth == SHALLOW + 1) / drafts
    if past < 0.005:
        yield Advice("max_tree_nodes", "lower", f"{past:.1%} of drafts are accepted deeper than {SHALLOW} tokens")


def _poor(drafted: float, accepted: float) -> bool:
    return drafted >= ENOUGH_NODES and accepted / drafted < POOR_ACCEPTANCE


def _by_depth(figures: Figures) -> Mapping[int, float]:
    """Delivered drafts by depth, 1 = the first."""
    found = figures.labelled.get("spec_decode_num_accepted_tokens_per_pos_total", {})
    return {int(position) + 1: count for position, count in found.items()}


def _chunks(figures: Figures) -> Iterator[Advice]:
    if figures.get("generation_tokens_total") < ENOUGH_TOKENS:
        return
    usual, worst = (figures.quantile("inter_token_latency_seconds", share) for share in (0.5, 0.99))
    queue, first = (figures.quantile(name, 0.5) for name in ("request_queue_time_seconds", "time_to_first_token_seconds"))
    if usual > 0.0 and worst > 8.0 * usual:
        yield Advice(
            "chunk_tokens",
            "half",
            f"one gap in a hundred is {worst * 1e3:.0f} ms, the usual one {usual * 1e3:.1f}: prompts hold up answers",
        )
    elif usual > 0.0 and worst < 2.0 * usual and first > 1.0 and queue < 0.2 * first:
        yield Advice("chunk_tokens", "double", f"first tokens take {first:.1f} s, little of it queueing, and gaps are even")
