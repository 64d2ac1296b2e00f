"""Metrics: what /metrics shows, in Prometheus' text form, under the field's names with the prefix `specctl:`.

Counters the engine keeps are read from it when somebody looks; only times are recorded as they happen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specctl.engine.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)


class Metrics:
    """Of one engine and its server. measured_speedup: what --verify found, None when it was not asked."""

    def __init__(self, engine: Engine, measured_speedup: float | None = None) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, measured_speedup))

        def histogram(name: str, what: str) -> Histogram:
            return Histogram(f"specctl:{name}", what, buckets=_SECONDS, registry=self._registry)

        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token of a choice.")
        self._per_token = histogram("time_per_output_token_seconds", "Between tokens, the mean of each choice.")
        self._latency = histogram("e2e_request_latency_seconds", "From arrival to the last token of a choice.")
        self._finished = Counter(
            "specctl:request_success", "Choices that ended, by reason.", ["finished_reason"], registry=self._registry
        )
        for reason in ("stop", "length", "abort"):
            self._finished.labels(reason)  # shown as 0 until there is one

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def per_token(self, seconds: float) -> None:
        self._per_token.observe(seconds)

    def finished(self, reason: str, seconds: float) -> None:
        self._finished.labels(reason).inc()
        self._latency.observe(seconds)

    def aborted(self, choices: int) -> None:
        self._finished.labels("abort").inc(choices)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine, measured_speedup: float | None) -> None:
        self._engine = engine
        self._measured_speedup = measured_speedup

    def collect(self) -> Iterator[Metric]:
        engine, stats = self._engine, self._engine.stats
        yield _gauge("num_requests_running", "Choices that hold pages.", engine.num_running)
        yield _gauge("num_requests_waiting", "Choices that wait for pages.", engine.num_waiting)
        yield _gauge("kv_cache_usage_perc", "KV pages in use, 1 being all of them.", engine.cache_usage)
        yield _counter("prompt_tokens", "Prompt tokens taken in.", stats.prompt_tokens)
        yield _counter("generation_tokens", "Tokens given out.", stats.speculation.emitted_tokens)
        yield _counter("num_preemptions", "Choices that gave way and were recomputed.", stats.preemptions)
        yield _labelled("step_seconds", "Seconds spent by phase of a step.", "phase", dict(stats.seconds))
        yield from self._speculation()

    def _speculation(self) -> Iterator[Metric]:
        engine, counters = self._engine, self._engine.stats.speculation
        accept = engine.options.accept
        lossy = engine.drafter is not None and accept is not None and accept.lossy
        yield _gauge("speculation_enabled", "1 when there is a draft.", int(engine.drafter is not None))
        yield _gauge("speculation_lossy", "1 when acceptance changes what the target would say.", int(lossy))
        if self._measured_speedup is not None:
            yield _gauge("measured_speedup", "Plain over speculative time, by --verify.", self._measured_speedup)
        yield _counter("spec_decode_num_drafts", "Blocks of drafted tokens.", counters.num_drafts)
        yield _counter("spec_decode_num_draft_tokens", "Drafted tokens.", counters.num_draft_tokens)
        yield _counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", counters.num_accepted_tokens)
        for name, what, counts in (
            ("draft", "Blocks that reached this position (0 is the first).", counters.drafted_per_position),
            ("accepted", "Blocks accepted up to this position (0 is the first).", counters.accepted_per_position),
        ):
            by_position = {str(position): count for position, count in enumerate(list(counts))}
            yield _labelled(f"spec_decode_num_{name}_tokens_per_pos", what, "position", by_position)
        yield _draft_lengths(dict(engine.stats.steps_by_k), engine.max_k)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"specctl:{name}", what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"specctl:{name}", what, value=value)


def _labelled(name: str, what: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"specctl:{name}", what, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _draft_lengths(steps_by_k: Mapping[int, int], max_k: int) -> Metric:
    """Decode-only steps by draft length, as a histogram with a bucket for each length."""
    totals = list(accumulate(steps_by_k.get(k, 0) for k in range(max_k + 1)))
    buckets = [(str(float(k)), float(total)) for k, total in enumerate(totals)] + [("+Inf", float(totals[-1]))]
    return HistogramMetricFamily(
        "specctl:spec_decode_k",
        "Draft length of decode-only steps.",
        buckets=buckets,
        sum_value=sum(k * steps for k, steps in steps_by_k.items()),
    )
