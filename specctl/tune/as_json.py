"""A tuning as programs read it: every number, unrounded, with what it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from specctl.schemas.base import Provenance
from specctl.tune.choice import Decision
from specctl.tune.goodput import Candidate
from specctl.tune.load import Played, Steady
from specctl.tune.outputs.schedule import Engine
from specctl.tune.provenance import sources
from specctl.tune.render import pass_shares, verify_share
from specctl.tune.run import Tuning
from specctl.tune.study import Study
from specctl.tune.what_if import Answer
from specctl.tune.words import reason
from specctl.tune.worth import needed

SCHEMA = "specctl.tuning/1"


def as_json(
    tuning: Tuning, study: Study, engines: Sequence[Engine] = (), answer: Answer | None = None
) -> dict[str, Any]:
    acceptance, asked = tuning.acceptance, tuning.asked
    interval = acceptance.interval(400)
    return {
        "schema": SCHEMA,
        "provenance": Provenance.here().model_dump(),
        "effective": {
            "profile": tuning.profile,
            "acceptance": acceptance.source,
            "iid": acceptance.iid,
            "temperature": acceptance.temperature,
            "k_max": tuning.k_max,
            "observed_k": acceptance.observed_k,
            "input_tokens": asked.input_tokens,
            "output_tokens": asked.output_tokens,
            "max_tpot_ms": asked.max_tpot_ms,
            "max_ttft_ms": asked.max_ttft_ms,
            "accept": tuning.policy.accept.model_dump(),
        },
        "survival": [float(value) for value in acceptance.survival()],
        "survival_ci95": None if interval is None else [each.tolist() for each in interval],
        "places": [_place(tuning, decision) for decision in tuning.decisions],
        "ways": [asdict(way) for way in study.ways],
        "served": study.served.words,
        "load": None
        if study.load is None
        else {"words": study.load.words, "plain": _load(study.load.plain), "policy": _load(study.load.policy)},
        "kept": [asdict(each) for each in study.kept],
        "prefill": None
        if tuning.prefill is None
        else {"plain_ms": tuning.prefill.ms(drafts=False), "draft_ms": tuning.prefill.ms(drafts=True)},
        "kinds": [asdict(kind) for kind in study.kinds],
        "sensitivity": {
            "context": study.context,
            "batches": study.batches,
            "changes": [asdict(each) for each in study.sensitivity],
        },
        "engines": {engine.name: {"files": engine.files, "notes": list(engine.notes)} for engine in engines},
        "what_if": None if answer is None else _what_if(answer),
        "sources": dict(sources(tuning)),
        "policy": tuning.policy.model_dump(mode="json", by_alias=True),
        "notices": [*tuning.of.notes, *tuning.notices, *study.notices],
    }


def _place(tuning: Tuning, decision: Decision) -> dict[str, Any]:
    times, chosen = decision.times, decision.chosen
    c, u = pass_shares(tuning, decision) or (None, None)
    return {
        "batch": decision.batch,
        "context": decision.context,
        "plain_step_ms": float(times.plain_S[0]),
        "c": c,
        "u": u,
        "best_k": decision.best.k,
        **_candidate(tuning, decision, chosen),
        "next_pays_from": needed(decision, chosen.k),
        "reason": reason(decision),
        "candidates": [_candidate(tuning, decision, each) for each in decision.candidates],
    }


def _candidate(tuning: Tuning, decision: Decision, candidate: Candidate) -> dict[str, Any]:
    """accepted, drafted: tokens a step; acceptance_rate: of the drafted tokens, null when none is."""
    k, acceptance = candidate.k, tuning.chooser.by_context.at(decision.context)
    return {
        "k": k,
        "confidence": candidate.confidence,
        "extrapolated": acceptance.extrapolated(k),
        "survival": [float(value) for value in acceptance.survival()[:k]],
        "tokens_per_step": float(candidate.tokens_S[0]),
        "accepted": candidate.accepted,
        "drafted": candidate.drafted,
        "acceptance_rate": candidate.accepted / candidate.drafted if candidate.drafted else None,
        "v": verify_share(tuning, decision, k),
        "step_ms": float(candidate.step_S[0]),
        "tok_s": candidate.tok_s,
        "speedup": list(candidate.band),
    }


def _load(found: Steady | Played) -> dict[str, Any]:
    value = asdict(found)
    if isinstance(found, Played):
        value["tokens"] = {str(batch): share for batch, share in found.tokens.items()}
    return value


def _what_if(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.what_if.text,
        "places": [
            {
                "batch": place.batch,
                "context": place.context,
                "now": _brief(place.now),
                "then": None if place.then is None else _brief(place.then),
            }
            for place in answer.places
        ],
        "policy": answer.tuning.policy.model_dump(mode="json", by_alias=True),
    }


def _brief(decision: Decision) -> dict[str, Any]:
    chosen = decision.chosen
    return {"k": chosen.k, "speedup": list(chosen.band), "tpot_ms": chosen.tpot_ms}
