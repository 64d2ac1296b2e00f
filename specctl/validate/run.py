"""A validation from names or a report to a result for every gate. It prints and writes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specctl.errors import IncompatiblePair, UsageError
from specctl.schemas.base import Provenance
from specctl.schemas.gates import NEED_A_MODEL, GatesFile
from specctl.schemas.validation import GateResult, Measurement, Source, Validation
from specctl.validate import judges
from specctl.validate.evidence import Evidence
from specctl.validate.record import Record, read_record
from specctl.validate.regression import regression
from specctl.validate.verdicts import absent, result

if TYPE_CHECKING:
    from specctl.options import DecodingOptions
    from specctl.pair import OpenedDraft, Target
    from specctl.prompts import Prompt

Progress = Callable[[str], None]
Baseline = tuple[Evidence, Source]


@dataclass(frozen=True)
class Asked:
    """gates: what must hold. baseline: what `regression` compares with; it is there when the gate is."""

    gates: GatesFile
    baseline: Baseline | None

    def __post_init__(self) -> None:
        assert self.gates.regression is None or self.baseline is not None


def validate_results(asked: Asked, evidence: Evidence, source: Source) -> Validation:
    """Judge a report. Raises UsageError naming a gate that needs a model."""
    if needing := [name for name in asked.gates.names if name in NEED_A_MODEL]:
        raise UsageError(
            f"the gate {needing[0]} needs a model, and {source.file} is a report; give --target, --draft and "
            "--prompts, or gates over figures alone (--gates gates-results)"
        )
    length = asked.gates.acceptance_length
    if length is not None and length.min is None:
        raise UsageError(
            f"the gate acceptance_length without min holds a draft against its specctl.json, and {source.file} is a "
            "report; give it min"
        )
    return _validation(asked, _judged(asked, evidence, None), evidence, source, Provenance.here())


def validate_pair(
    asked: Asked,
    target: Target,
    draft_name: str,
    prompts: list[Prompt],
    decoding: DecodingOptions,
    progress: Progress = lambda sentence: None,
) -> Validation:
    """Measure a loaded target with a draft, and judge. A pair that does not fit fails `compatible` and is not run;
    without that gate it raises IncompatiblePair."""
    from specctl.bench.work import read_work
    from specctl.validate.pair import open_pair, scores_are_numbers

    requests = read_work(target, prompts, decoding)
    opened = open_pair(target, draft_name, decoding)
    checks = [*opened.checks, scores_are_numbers(target, requests[0])] if opened.draft is not None else opened.checks
    fault = next((check.says for check in checks if check.status != "pass"), None)
    if fault is not None and asked.gates.compatible is None:
        raise IncompatiblePair(fault)
    results = {"compatible": result("compatible", checks)}
    evidence = None
    if fault is None and opened.draft is not None:
        evidence, measured = _measured(asked, target, opened.draft, prompts, decoding, progress)
        results |= measured
    gates = [results[name] if name in results else _not_run(name) for name in asked.gates.names]
    provenance = Provenance.here(str(target.device), target.num_threads)
    return _validation(asked, gates, evidence or Evidence("this run"), None, provenance)


def _measured(
    asked: Asked,
    target: Target,
    draft: OpenedDraft,
    prompts: list[Prompt],
    decoding: DecodingOptions,
    progress: Progress,
) -> tuple[Evidence | None, dict[str, GateResult]]:
    from dataclasses import replace

    from specctl.bench.work import read_work
    from specctl.pair import open_policy
    from specctl.validate.distribution import Sampler
    from specctl.validate.draft_cache import draft_cache
    from specctl.validate.measure import Bench

    gates = asked.gates
    for notice in draft.notices:
        progress(f"note: {notice}")
    evidence = Bench(target, draft, prompts, decoding, progress).measure(gates)
    own = draft.checkpoint
    record = None if own is None or own is target.checkpoint else read_record(own.path, draft.drafter.kind)
    results = {} if evidence is None else {gate.name: gate for gate in _judged(asked, evidence, record)}
    requests = read_work(target, prompts, decoding)
    policy, accept = open_policy(decoding, target, replace(draft, notices=[]))
    if gates.distribution is not None:
        sampler = Sampler(target, draft, requests, decoding, policy, progress)
        results["distribution"] = sampler.judge(gates.distribution, accept)
    if gates.draft_cache is not None:
        results["draft_cache"] = draft_cache(gates.draft_cache, target, draft, requests, decoding, policy, progress)
    return evidence, results


def _judged(asked: Asked, evidence: Evidence, record: Record | None) -> list[GateResult]:
    """The gates over figures. record: the draft's own."""
    gates, found = asked.gates, []
    if gates.greedy_exact is not None:
        found.append(judges.greedy_exact(gates.greedy_exact, evidence))
    if gates.acceptance_length is not None:
        found.append(judges.acceptance_length(gates.acceptance_length, evidence, record))
    if gates.acceptance_rate is not None:
        found.append(judges.acceptance_rate(gates.acceptance_rate, evidence))
    if gates.latency is not None:
        found.append(judges.latency(gates.latency, evidence))
    if gates.speedup is not None:
        found.append(judges.speedup(gates.speedup, evidence))
    if gates.regression is not None and asked.baseline is not None:
        found.append(regression(gates.regression, gates, evidence, asked.baseline[0]))
    return found


def _not_run(name: str) -> GateResult:
    found = result(name, [absent(name, "not run: the pair is not compatible")])
    return found.model_copy(update={"remedy": "see the gate compatible"})


def _validation(
    asked: Asked, gates: list[GateResult], evidence: Evidence, source: Source | None, provenance: Provenance
) -> Validation:
    parts = _parts(evidence)
    return Validation(
        provenance=provenance,
        passed=all(gate.status == "pass" for gate in gates),
        gates=gates,
        results=source,
        baseline=None if asked.baseline is None else asked.baseline[1],
        work=parts.work,
        runs=parts.runs,
        comparisons=parts.comparisons,
        also=[_parts(more) for more in evidence.also],
    )


def _parts(evidence: Evidence) -> Measurement:
    return Measurement(
        work=_finite(dict(evidence.work)) or None,
        runs=[_finite(dict(run)) for run in evidence.runs],
        comparisons=[_finite(dict(comparison)) for comparison in evidence.comparisons],
    )


def _finite(value: Any) -> Any:
    """The same without NaN and infinities, which JSON cannot say: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list) else value
