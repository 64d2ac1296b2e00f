"""What is known of acceptance, whatever it was read from; and how it is read from a TRACE.json: which of its drafts
tell something about a length, and which were cut by a stop.

Drafts that ended early are of two kinds. Those that the context or a shorter length cut off could not reach k and are
left out there. Those that a confidence stop cut off were chosen for being bad: without them survival looks better than
it is, so such a trace tells only what happens under that stop or a stricter one, and that by its confidences alone.

Legend: R requests, N drafts, K draft lengths from 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from specctl.errors import UsageError
from specctl.sampling.params import Accept
from specctl.schemas.policy import Bound, BoundDraft
from specctl.schemas.trace import Trace, TraceClass
from specctl.tune.acceptance import Acceptance, Blocks

QUANTILES = np.arange(0.05, 0.96, 0.05)
"""Of all confidences: the stops that are looked at."""


@dataclass(frozen=True)
class Kind:
    """Acceptance on one kind of prompts. context: mean tokens before a draft; None: not known."""

    name: str
    context: float | None
    acceptance: Acceptance


@dataclass(frozen=True)
class Evidence:
    """notices: what the user should know about it. target, draft: whose it is, as far as that is known. accept: how
    tokens were accepted. kinds: by class of prompts, where there is more than one. by_context: at rising contexts,
    where the source tells them apart; acceptance is the first of them then."""

    acceptance: Acceptance
    notices: list[str]
    target: Bound | None = None
    draft: BoundDraft | None = None
    accept: str | None = None
    kinds: tuple[Kind, ...] = ()
    by_context: tuple[tuple[float, Acceptance], ...] = field(default=())


def from_trace(trace: Trace, where: str, classes: Iterable[str] = ()) -> Evidence:
    """Of these classes, all of them by default. Raises UsageError for a trace without drafts, with lossy acceptance, or
    censored without confidences."""
    if trace.accept is not None and Accept.parse(trace.accept).lossy:
        raise UsageError(
            f"{where}: was taken with --accept {trace.accept}, which is lossy; take one with exact acceptance"
        )
    trace = _only(trace, where, tuple(classes))
    notices: list[str] = []
    acceptance = _read(trace, where, notices)
    kinds: list[Kind] = []
    if len(trace.classes) > 1:
        for entry in trace.classes:
            alone = trace.model_copy(update={"classes": [entry]})
            if entry.num_drafts:
                kinds.append(Kind(entry.class_, entry.context, _read(alone, f"{where}, class {entry.class_}", [])))
    return Evidence(acceptance, notices, trace.target, trace.draft, trace.accept, tuple(kinds))


def _only(trace: Trace, where: str, names: tuple[str, ...]) -> Trace:
    if not names:
        return trace
    there = [entry.class_ for entry in trace.classes]
    for name in names:
        if name not in there:
            raise UsageError(f"{where}: has no class {name!r} (classes: {', '.join(there)})")
    return trace.model_copy(update={"classes": [entry for entry in trace.classes if entry.class_ in names]})


def _read(trace: Trace, where: str, notices: list[str]) -> Acceptance:
    counts = _Counts.of(trace)
    if not counts.num_drafts:
        raise UsageError(f"{where}: has no draft in it, so it tells nothing about acceptance")
    stop = _stop(trace, counts, where, notices)
    drafts = _Drafts.of(trace)
    if stop is None:
        stops = [_without_stop(counts)]
    elif drafts is not None:
        stops = [drafts.under(stop, counts)]
    else:
        stops = [_at_stop(counts, stop)]
    if drafts is not None:
        stops += [drafts.under(each, counts) for each in drafts.stops() if stop is None or each > stop]
    if counts.steps_R is None and (trace.draft is None or trace.draft.kind == "ngram"):
        notices.append(f"{where}: does not tell in how many steps nothing was proposed; every step is taken to draft")
    idle_R = np.zeros(len(counts.drafts_R)) if counts.steps_R is None else counts.steps_R - counts.drafts_R
    return Acceptance(
        source=f"{where}: {counts.num_drafts} drafts in {len(idle_R)} requests",
        temperature=trace.temperature,
        iid=False,
        drafts_R=counts.drafts_R,
        tokens_R=(counts.histogram_RJ * np.arange(1, trace.k + 2)).sum(1).astype(float),
        idle_R=idle_R,
        stops=tuple(stops),
    )


@dataclass(frozen=True)
class _Counts:
    """histogram_RJ: drafts by number of accepted tokens. reached_K: drafts of all requests with a k-th token."""

    histogram_RJ: np.ndarray
    reached_K: np.ndarray
    steps_R: np.ndarray | None

    @classmethod
    def of(cls, trace: Trace) -> _Counts:
        requests = [request for entry in trace.classes for request in entry.requests]
        reached = np.zeros(trace.k)
        for entry in trace.classes:
            reached[: len(entry.drafted_per_position)] += entry.drafted_per_position
        steps = [request.steps for request in requests]
        known = None if any(n is None for n in steps) else np.array(steps, dtype=float)
        histogram = np.array([request.histogram for request in requests], dtype=float).reshape(-1, trace.k + 1)
        return cls(histogram, reached, known)

    @property
    def drafts_R(self) -> np.ndarray:
        drafts: np.ndarray = self.histogram_RJ.sum(1)
        return drafts

    @property
    def accepted_RK(self) -> np.ndarray:
        accepted: np.ndarray = self.histogram_RJ[:, ::-1].cumsum(1)[:, ::-1][:, 1:]
        return accepted

    @property
    def num_drafts(self) -> int:
        return int(self.histogram_RJ.sum())

    @property
    def longest(self) -> int:
        """The longest draft there is, which may be shorter than the run's k."""
        return int((self.reached_K > 0).sum())

    @property
    def cut_short(self) -> int:
        """Drafts shorter than the longest."""
        return self.num_drafts - int(self.reached_K[self.longest - 1])


@dataclass(frozen=True)
class _Drafts:
    """Every draft by itself. confidence_NK: -1 where it has no such token."""

    request_N: np.ndarray
    accepted_N: np.ndarray
    confidence_NK: np.ndarray

    @classmethod
    def of(cls, trace: Trace) -> _Drafts | None:
        """None where the trace does not tell confidence and fate of each."""
        per_request, accepted, confidence = [], list[int](), list[list[float]]()
        for entry in trace.classes:
            fates = _accepted(entry, trace.temperature)
            if fates is None or (entry.num_drafts and not entry.confidence):
                return None
            per_request += [sum(request.histogram) for request in entry.requests]
            accepted += fates
            confidence += entry.confidence
        padded = np.full((len(confidence), trace.k), -1.0)
        for n, values in enumerate(confidence):
            padded[n, : len(values)] = values
        return cls(np.repeat(np.arange(len(per_request)), per_request), np.array(accepted), padded)

    def stops(self) -> list[float]:
        known = self.confidence_NK[self.confidence_NK >= 0]
        return sorted({round(float(value), 3) for value in np.quantile(known, QUANTILES)})

    def under(self, stop: float, counts: _Counts) -> Blocks:
        """What these drafts would have been with this stop."""
        length_N = (self.confidence_NK >= stop).cumprod(1).sum(1)
        shape = counts.accepted_RK.shape
        reached_RK, accepted_RK = np.zeros(shape), np.zeros(shape)
        for k in range(1, shape[1] + 1):
            np.add.at(reached_RK[:, k - 1], self.request_N, length_N >= k)
            np.add.at(accepted_RK[:, k - 1], self.request_N, np.minimum(length_N, self.accepted_N) >= k)
        return Blocks(stop, reached_RK, accepted_RK)


def _accepted(entry: TraceClass, temperature: float) -> list[int] | None:
    """Of how many tokens, draft by draft; at temperature 0 that is how many in a row were the target's own choice."""
    if entry.accepted or not entry.num_drafts:
        return entry.accepted
    if temperature > 0 or not entry.rank:
        return None
    return [next((i for i, place in enumerate(ranks) if place > 1), len(ranks)) for ranks in entry.rank]


def _stop(trace: Trace, counts: _Counts, where: str, notices: list[str]) -> float | None:
    """The confidence stop that the trace was taken under, None for none.

    A trace that does not say is taken to have none when no more drafts are short than the end of the context can
    explain, k - 1 a request.
    """
    if trace.min_confidence == 0 or not counts.cut_short:
        return None
    if trace.min_confidence is None and counts.cut_short <= (trace.k - 1) * len(counts.drafts_R):
        notices.append(f"{where}: {counts.cut_short} short drafts are taken to have met the end of the context")
        return None
    confidences = [value for entry in trace.classes for values in entry.confidence for value in values]
    if not confidences:
        raise UsageError(
            f"{where}: {counts.cut_short} of {counts.num_drafts} drafts were stopped early, and it has no confidences "
            "to tell why, so survival cannot be read from it; trace a run without a confidence stop"
        )
    stop = trace.min_confidence if trace.min_confidence is not None else min(confidences)
    notices.append(
        f"{where}: was taken with a confidence stop at {stop:g}; only that stop and stricter ones are looked at"
    )
    return stop


def _without_stop(counts: _Counts) -> Blocks:
    """As if every draft had its full length: those that could not reach k are left out at k."""
    longest = counts.longest
    drafts_R1 = counts.drafts_R[:, None]
    could_K = counts.num_drafts / counts.reached_K[:longest]
    accepted_RK = np.minimum(counts.accepted_RK[:, :longest] * could_K, drafts_R1)
    return Blocks(None, np.repeat(drafts_R1, longest, axis=1), np.minimum.accumulate(accepted_RK, axis=1))


def _at_stop(counts: _Counts, stop: float) -> Blocks:
    """Under the stop it was taken with, lengths as they were over all requests."""
    share_K = counts.reached_K / counts.num_drafts
    return Blocks(stop, counts.drafts_R[:, None] * share_K, counts.accepted_RK)
