"""What a report says, in words and tables, before it is HTML or markdown: the answer first, then what it rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specctl.schemas.policy import Cell
from specctl.tune.choice import Decision
from specctl.tune.load import Played, Steady
from specctl.tune.outputs.schedule import Engine
from specctl.tune.places import column, nearest, ruled
from specctl.tune.provenance import sources
from specctl.tune.run import Tuning
from specctl.tune.study import Load, Study
from specctl.tune.words import of_cells, of_range, reason
from specctl.tune.worth import crossover, needed

MOST_ROWS = 10


@dataclass(frozen=True)
class Table:
    title: str
    lead: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Page:
    """figure: the one number. pays: whether to speculate at all. because: sentences under the headline."""

    title: str
    figure: str
    under: str
    pays: bool
    headline: str
    because: list[str]
    tables: list[Table]
    provenance: list[tuple[str, str]]
    notices: list[str]


def page(tuning: Tuning, study: Study, engines: Sequence[Engine]) -> Page:
    gain = next(way.gain for way in study.ways if way.name == "this policy")
    pays = any(cell.k for cell in tuning.policy.k)
    model = tuning.of.model.name or "the model"
    tables = [_policy(tuning), _batches(tuning, study), _ways(study)]
    if study.load is not None:
        tables.append(_load(study.load))
    tables.append(_survival(tuning))
    if study.kinds:
        tables.append(_kinds(study))
    tables.append(_sensitivity(study))
    if engines:
        tables.append(_engines(engines))
    return Page(
        title=f"Draft lengths for {model} on {tuning.of.hardware.name}",
        figure=f"{gain:.2f}",
        under=f"predicted over {study.served.words}",
        pays=pays,
        headline=_headline(tuning),
        because=list(_because(tuning, study)),
        tables=tables,
        provenance=list(sources(tuning)),
        notices=[*tuning.of.notes, *tuning.notices, *study.notices],
    )


def _headline(tuning: Tuning) -> str:
    if not any(cell.k for cell in tuning.policy.k):
        return "Do not speculate: no draft length is predicted to be faster, at any number of texts and any context."
    ks = sorted({cell.k for cell in tuning.policy.k if cell.k})
    lengths = f"{ks[0]} to {ks[-1]} tokens" if len(ks) > 1 else f"{ks[0]} token{'s' if ks[0] > 1 else ''}"
    off = [cell for cell in tuning.policy.k if cell.k == 0]
    where = f"; off at {of_cells(off)}" if off else ""
    if len(ks) == 1:
        return f"Draft {lengths}{where}." if off else f"Draft {lengths} everywhere."
    return f"Draft {lengths}, as the texts at a time and their context ask for{where}."


def _because(tuning: Tuning, study: Study) -> Iterator[str]:
    decisions = column(tuning, nearest(tuning, study.context))
    first, last = decisions[0], decisions[-1]
    alone = "Alone a text" if first.batch == 1 else f"Of {first.batch} at a time each"
    yield (
        f"{alone} is predicted to decode {_band(tuning, first)}, of {last.batch} at a time each {_band(tuning, last)}; "
        f"context {first.context:,}, 95 % of what the inputs leave open."
    )
    k = max(1, first.best.k)
    where = crossover(decisions, k)
    if where is None:
        yield f"A step of K = {k} brings more than it costs up to the largest batch profiled, {last.batch}."
    elif where > first.batch:
        what = "such a step" if tuning.of.whole_steps else "the pass that checks it"
        yield f"A step of K = {k} stops paying at {where} texts at a time: there {what} is dear."
    prefill = tuning.prefill
    if prefill is not None:
        share = prefill.share(float(first.times.plain_S[0]), first.batch)
        whole = prefill.gain(ruled(tuning, first).speedup, float(first.times.plain_S[0]), first.batch)
        yield (
            f"Prompts of {prefill.input_tokens} tokens are {share:.0%} of a busy machine's time at {first.batch} text "
            f"at a time, so everything together gains {whole:.2f} x; the first token comes after "
            f"{prefill.ms(drafts=False):.1f} ms, {prefill.ms(drafts=True):.1f} with the draft's own pass."
        )


def _band(tuning: Tuning, decision: Decision) -> str:
    here = ruled(tuning, decision)
    low, middle, high = here.band
    return f"{middle:.2f} x as fast ({low:.2f} - {high:.2f}) with K = {here.k}" if here.k else "as fast as plain"


def _policy(tuning: Tuning) -> Table:
    rows = []
    for cell in tuning.policy.k:
        stop = "" if cell.confidence is None else f"{cell.confidence:g}"
        rows.append([of_range(cell.batch), of_range(cell.context), _k(tuning, cell.k), stop, _gain(cell)])
    return Table("The policy", "", ["texts at a time", "context", "K", "stop below", "speed-up (95 %)"], rows)


def _k(tuning: Tuning, k: int) -> str:
    return f"{k}*" if tuning.acceptance.extrapolated(k) else f"{k}"


def _gain(cell: Cell) -> str:
    low, middle, high = cell.speedup or [1.0, 1.0, 1.0]
    return f"{middle:.2f} ({low:.2f} - {high:.2f})" if cell.k else "1"


def _batches(tuning: Tuning, study: Study) -> Table:
    context = nearest(tuning, study.context)
    decisions = column(tuning, context)
    wanted = _some([d.batch for d in decisions if d.batch in study.batches])
    rows = []
    for decision in (d for d in decisions if d.batch in wanted):
        chosen = ruled(tuning, decision)
        need = needed(decision, chosen.k)
        rows.append(
            [
                f"{decision.batch}",
                _k(tuning, chosen.k),
                f"{float(decision.times.plain_S[0]):.2f}",
                f"{float(chosen.step_S[0]):.2f}",
                f"{float(chosen.tokens_S[0]):.2f}",
                f"{chosen.tpot_ms:.2f}",
                "" if need is None else ("never" if need > 1 else f"{need:.0%}"),
                reason(decision, chosen),
            ]
        )
    columns = ["texts", "K", "plain ms", "step ms", "tokens", "ms a token", "next pays from", "why"]
    lead = (
        f"At context {context:,}. Next pays from: the chance that one token more would have to be accepted with, all "
        "before it included, for its slot to be worth what it costs."
    )
    return Table("By texts at a time", lead, columns, rows)


def _ways(study: Study) -> Table:
    rows = []
    for way in study.ways:
        ks = sorted(set(way.ks))
        shown = f"{ks[0]}" if len(ks) == 1 else f"{ks[0]} - {ks[-1]}"
        rows.append([way.name, shown, f"{way.gain:.3f}", f"{way.loss:.1%}"])
    lead = (
        f"Over {study.served.words}. All are judged by the same predictions, with acceptance by position: what a "
        "choice costs if these are right. The i.i.d. formula takes the first token's rate for all."
    )
    return Table("Other ways of choosing", lead, ["way", "K", "speed-up", "worst loss"], rows)


def _load(load: Load) -> Table:
    rows = []
    for name, found in (("without a draft", load.plain), ("under the policy", load.policy)):
        if isinstance(found, Steady):
            batch = f"{found.batch:.1f}" + (" (saturated)" if found.saturated else "")
        else:
            batch = f"{sum(b * share for b, share in found.tokens.items()):.1f}"
        rows.append([name, batch, f"{found.tpot_ms:.2f}", f"{found.ttft_ms:.1f}", _pace(found)])
    lead = (
        f"{load.words}, context {load.context:,}. Faster decoding ends texts sooner, so fewer run at a time, which "
        "makes it faster still."
    )
    return Table("Under load", lead, ["", "texts at a time", "ms a token", "ms to the first", "served"], rows)


def _pace(found: Steady | Played) -> str:
    return f"up to {found.most:.3g} a second" if isinstance(found, Steady) else f"all in {found.seconds:.1f} s"


def _survival(tuning: Tuning) -> Table:
    acceptance = tuning.acceptance
    survival, interval = acceptance.survival(), acceptance.interval(400)
    before, rows = 1.0, []
    for k, value in enumerate(survival.tolist(), start=1):
        bounds = "not known" if interval is None else f"{interval[0][k - 1]:.3f} - {interval[1][k - 1]:.3f}"
        mark = "*" if acceptance.extrapolated(k) else ""
        rows.append([f"{k}{mark}", f"{value:.3f}", bounds, f"{value / before:.3f}" if before > 0 else ""])
        before = value
    lead = acceptance.source + (" (* extrapolated)" if acceptance.extrapolated(acceptance.max_k) else "")
    how = "requests drawn again" if acceptance.by_requests else "binomial" if acceptance.uncertain else "unknown"
    how = f"95 % ({how})"
    columns = ["position", "accepted up to here", how, "given those before"]
    return Table("Acceptance", lead, columns, rows)


def _kinds(study: Study) -> Table:
    wanted = _some(study.batches, 4)
    at = [study.batches.index(batch) for batch in wanted]
    rows = []
    for kind in study.kinds:
        context = "" if kind.context is None else f"{kind.context:,.0f}"
        first = f"{kind.survival[0]:.3f}"
        if kind.interval is not None:
            first += f" ({kind.interval[0][0]:.3f} - {kind.interval[1][0]:.3f})"
        cells = [f"K = {kind.ks[n]}, {kind.speedups[n]:.2f}" for n in at]
        rows.append([kind.name, context, first, f"{1 + sum(kind.survival):.2f}", *cells])
    columns = ["kind", "context", "first token (95 %)", "longest length", *(f"best at {batch}" for batch in wanted)]
    lead = "Each kind by itself: what it would want. A policy cannot tell them apart."
    return Table("By kind of prompt", lead, columns, rows)


def _sensitivity(study: Study) -> Table:
    wanted = _some(study.batches, 5)
    at = [study.batches.index(batch) for batch in wanted]
    rows = [
        [
            f"{each.change:+.0%}" if each.change else "as measured",
            *(f"K = {each.ks[n]}, {each.speedups[n]:.2f}" for n in at),
        ]
        for each in study.sensitivity
    ]
    lead = (
        "The best K by prediction, and its speed-up, were every token accepted so much more or less often; context "
        f"{study.context:,}."
    )
    return Table(
        "If acceptance were different", lead, ["acceptance", *(f"{batch} at a time" for batch in wanted)], rows
    )


def _engines(engines: Sequence[Engine]) -> Table:
    rows = [[e.name, ", ".join(e.files) or "none", "; ".join(e.notes)] for e in engines]
    return Table("For other engines", "", ["engine", "files", "what they do not say, or do otherwise"], rows)


def _some(values: Sequence[int], most: int = MOST_ROWS) -> list[int]:
    """Powers of two first, then evenly: people read those best."""
    powers = [value for value in values if value & (value - 1) == 0]
    kept = powers if len(powers) >= min(most, len(values)) // 2 + 1 else list(values)
    if len(kept) <= most:
        return kept
    return [kept[round(i * (len(kept) - 1) / (most - 1))] for i in range(most)]
