"""Metrics: what /metrics shows, in Prometheus' text form, under the field's names with the prefix `specctl:`.

Counters the engine keeps are read from it when somebody looks; only times are recorded as they happen.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specctl.engine.engine import Engine

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)


class Metrics:
    """Of one engine and its server. measured_speedup: what --verify found, None when it was not asked."""

    def __init__(self, engine: Engine, measured_speedup: float | None = None) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, measured_speedup))

        def histogram(name: str, what: str) -> Histogram:
            return Histogram(f"specctl:{name}", what, buckets=_SECONDS, registry=self._registry)

        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._per_token = histogram("time_per_output_token_seconds", "Between tokens, the mean of each choice.")
        self._latency = histogram("e2e_request_latency_seconds", "From arrival to the last token of a choice.")
        self._finished = Counter(
            "specctl:request_success", "Choices that ended.", ["finished_reason"], registry=self._registry
        )

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def per_token(self, seconds: float) -> None:
        self._per_token.observe(seconds)

    def finished(self, reason: str, seconds: float) -> None:
        self._finished.labels(reason).inc()
        self._latency.observe(seconds)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine, measured_speedup: float | None) -> None:
        self._engine = engine
        self._measured_speedup = measured_speedup

    def collect(self) -> Iterator[Metric]:
        engine, stats = self._engine, self._engine.stats
        counters = stats.speculation
        yield _gauge("num_requests_running", "Choices that hold pages.", engine.num_running)
        yield _gauge("num_requests_waiting", "Choices that wait for pages.", engine.num_waiting)
        yield _gauge("kv_cache_usage_perc", "KV pages in use, 1 being all of them.", engine.cache_usage)
        if self._measured_speedup is not None:
            yield _gauge("measured_speedup", "Plain over speculative time, by --verify.", self._measured_speedup)
        yield _counter("prompt_tokens", "Prompt tokens taken in.", stats.prompt_tokens)
        yield _counter("generation_tokens", "Tokens given out.", counters.emitted_tokens)
        yield _counter("num_preemptions", "Choices that gave way and were recomputed.", stats.preemptions)
        yield _counter("spec_decode_num_drafts", "Blocks of drafted tokens.", counters.num_drafts)
        yield _counter("spec_decode_num_draft_tokens", "Drafted tokens.", counters.num_draft_tokens)
        yield _counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", counters.num_accepted_tokens)
        yield _labelled(
            "spec_decode_num_accepted_tokens_per_pos",
            "Blocks accepted up to this position (0 is the first).",
            "position",
            dict(enumerate(list(counters.accepted_per_position))),
        )
        yield _labelled("spec_decode_steps", "Decode-only steps by draft length.", "k", dict(stats.steps_by_k))
        yield _labelled("step_seconds", "Seconds spent by phase of a step.", "phase", dict(stats.seconds))


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"specctl:{name}", what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"specctl:{name}", what, value=value)


def _labelled(name: str, what: str, label: str, values: dict[int, int] | dict[str, float]) -> Metric:
    family = CounterMetricFamily(f"specctl:{name}", what, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], value)
    return family
