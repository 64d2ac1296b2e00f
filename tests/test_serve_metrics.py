"""/metrics: the field's names, read by Prometheus' own parser, and numbers that are those of the answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from fixtures import Make
from prometheus_client.parser import text_string_to_metric_families
from serving import Call, local, scrape

from specctl.sampling.params import Accept
from specctl.serve.app import Serving, create_app
from specctl.serve.metrics import Metrics

NAMES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "speculation_enabled": "gauge",
    "speculation_lossy": "gauge",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "num_preemptions": "counter",
    "step_seconds": "counter",
    "request_success": "counter",
    "spec_decode_num_drafts": "counter",
    "spec_decode_num_draft_tokens": "counter",
    "spec_decode_num_accepted_tokens": "counter",
    "spec_decode_num_draft_tokens_per_pos": "counter",
    "spec_decode_num_accepted_tokens_per_pos": "counter",
    "spec_decode_k": "histogram",
    "time_to_first_token_seconds": "histogram",
    "time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
}


@pytest.fixture
def open_near(make: Make) -> Callable[..., Serving]:
    target: Path = make(tiny.llama, seed=1)
    return lambda **options: local(target, make(tiny.near, of=target), **options)


def asked(serving: Serving, *bodies: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The usage of each completion, made one after the other, and the metrics afterwards."""

    async def run() -> tuple[list[dict[str, Any]], dict[str, float]]:
        app = create_app(serving)
        async with app.router.lifespan_context(app):
            usages = []
            for fields in bodies:
                body = json.dumps({"prompt": "hello", **fields}).encode()
                status, answer = await Call(app, "POST", "/v1/completions", body).answer()
                assert status == 200, answer
                usages.append(answer["usage"])
            page = Call(app, "GET", "/metrics")
            _, text = await page.answer()
            assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
            return usages, scrape(text)

    return asyncio.run(run())


def test_names_and_kinds(open_near: Callable[..., Serving]) -> None:
    serving = open_near()
    page = serving.worker.metrics.render().decode()
    kinds = {family.name: family.type for family in text_string_to_metric_families(page)}
    # Counters are sampled with _total, histograms in seconds have buckets that end with +Inf.
    assert {name: kinds[f"specctl:{name}"] for name in NAMES} == NAMES
    stray = {name for name in kinds if name.removesuffix("_created") not in {f"specctl:{name}" for name in NAMES}}
    assert not stray
    names = set(scrape(page))
    assert "specctl:spec_decode_num_drafts_total" in names
    assert "specctl:time_to_first_token_seconds_bucket{le=+Inf}" in names


def test_numbers_are_those_of_the_answers(open_near: Callable[..., Serving]) -> None:
    usages, metrics = asked(
        open_near(k=3),
        {"max_tokens": 20},
        {"max_tokens": 1},
        {"max_tokens": 9, "n": 2, "ignore_eos": True},
        {"max_tokens": 20, "speculation": {"k": 0}, "ignore_eos": True},
    )

    def total(name: str, *labels: str) -> float:
        return metrics[f"specctl:{name}_total" + (f"{{{','.join(labels)}}}" if labels else "")]

    spent = [usage["speculation"] for usage in usages]
    assert total("generation_tokens") == sum(usage["completion_tokens"] for usage in usages)
    assert total("prompt_tokens") == sum(usage["prompt_tokens"] for usage in usages) == 20
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert total(f"spec_decode_{name}") == sum(one[name] for one in spent) > 0
    for kind in ("draft", "accepted"):
        lists = [one["drafted_per_position" if kind == "draft" else "accepted_per_position"] for one in spent]
        for position in range(3):
            counted = sum(counts[position] for counts in lists if counts)
            assert total(f"spec_decode_num_{kind}_tokens_per_pos", f"position={position}") == counted
    assert total("request_success", "finished_reason=length") + total("request_success", "finished_reason=stop") == 5
    assert total("request_success", "finished_reason=abort") == 0
    assert metrics["specctl:time_to_first_token_seconds_count"] == 5
    assert metrics["specctl:e2e_request_latency_seconds_count"] == 5
    assert metrics["specctl:time_per_output_token_seconds_count"] == 4  # an answer of one token has no such time
    # Decode-only steps: of length 0 those of the last request alone, all others of length 3.
    steps = {k: metrics[f"specctl:spec_decode_k_bucket{{le={float(k)}}}"] for k in (0, 2, 3, 16)}
    assert steps[0] == steps[2] == usages[3]["completion_tokens"] - 1
    assert steps[3] == steps[16] == metrics["specctl:spec_decode_k_count"]
    assert metrics["specctl:spec_decode_k_sum"] == 3 * (steps[3] - steps[2])
    phases = {name: value for name, value in metrics.items() if name.startswith("specctl:step_seconds_total{")}
    assert {"draft", "verify", "sample", "host"} <= {name[:-1].split("=")[1] for name in phases}
    assert sum(phases.values()) > 0
    assert metrics["specctl:num_requests_running"] == metrics["specctl:kv_cache_usage_perc"] == 0


def test_times_are_by_tokens_not_by_outputs(make: Make) -> None:
    """The draft is the target: nine tokens come in three outputs, and the time for one is an eighth of all after the
    first."""
    target = make(tiny.table, rows=tiny.chain("xABCDEFGH"))
    _, metrics = asked(local(target, target, k=3), {"prompt": "x", "max_tokens": 9})
    whole = metrics["specctl:e2e_request_latency_seconds_sum"]
    first = metrics["specctl:time_to_first_token_seconds_sum"]
    assert metrics["specctl:time_per_output_token_seconds_sum"] == pytest.approx((whole - first) / 8, rel=1e-6)


def test_whether_there_is_speculation(make: Make, open_near: Callable[..., Serving]) -> None:
    def shown(serving: Serving, name: str) -> float | None:
        return scrape(serving.worker.metrics.render().decode()).get(f"specctl:{name}")

    plain = local(make(tiny.llama, seed=1))
    assert (shown(plain, "speculation_enabled"), shown(plain, "speculation_lossy")) == (0, 0)
    assert shown(open_near(), "speculation_enabled") == 1
    assert shown(open_near(), "speculation_lossy") == 0
    assert shown(open_near(accept=Accept("typical")), "speculation_lossy") == 1
    assert shown(plain, "measured_speedup") is None
    assert "specctl:measured_speedup 1.25" in Metrics(plain.worker.engine, 1.25).render().decode()


def test_lossy_acceptance_is_said_in_every_answer(open_near: Callable[..., Serving]) -> None:
    (usage,), _ = asked(open_near(accept=Accept("typical")), {})
    assert (usage["speculation"]["accept"], usage["speculation"]["lossy"]) == ("typical", True)
    usages, _ = asked(open_near(), {}, {"temperature": 1}, {"temperature": 1, "seed": 5})
    assert [usage["speculation"]["accept"] for usage in usages] == ["exact", "exact", "coupled"]
    assert not any(usage["speculation"]["lossy"] for usage in usages)


def test_a_server_without_a_draft_has_no_speculation_to_tell_of(make: Make) -> None:
    (usage,), metrics = asked(local(make(tiny.llama, seed=1)), {})
    assert set(usage) == {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert metrics["specctl:spec_decode_num_drafts_total"] == 0
