"""A tuning as pictures: speed-up over batch, K over batch and context, the crossover at which speculation stops paying,
where a step's time goes, and how much depends on acceptance. Each is a PNG, or None where there is nothing to draw."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specctl.finetune.plots import COLOURS
from specctl.tune.choice import Decision
from specctl.tune.costs import StepTimes
from specctl.tune.places import bands, column, known, nearest
from specctl.tune.run import Tuning
from specctl.tune.study import Study
from specctl.tune.worth import crossover

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#777777"
WIDTH = 7.2
MOST_LINES = 4
MOST_BARS = 9
MOST_COLUMNS = 16
WHOLE = (
    " Steps were timed from outside the engine, as wholes: how much longer one with a draft takes is known, and not "
    "how target, draft and engine share it."
)


def pictures(tuning: Tuning, study: Study) -> list[tuple[str, bytes, str]]:
    """(name, PNG, what it shows), in the order in which they should be looked at."""
    drawn: list[tuple[str, Callable[[Axes], None], float, str]] = [
        (
            "speedup",
            lambda axes: _draw_speedup(axes, tuning),
            4.2,
            "Decoding speed under the policy over plain decoding, by the number of texts at a time. The bands are what "
            "the measured requests and the spread of the profile leave open, 95 %. Where a line lies at 1 the policy "
            "does not speculate.",
        ),
        (
            "crossover",
            lambda axes: _draw_crossover(axes, tuning, study.context),
            4.2,
            "Why it ends. With few texts a step waits for the weights to be read, and checking more tokens costs "
            "little; with many it waits for arithmetic, and every token checked costs its share. Speculation pays "
            "where a step brings more tokens (dashed) than it costs in plain steps (solid).",
        ),
    ]
    if len(tuning.grid.contexts) > 1:
        drawn.append(
            (
                "lengths",
                lambda axes: _draw_lengths(axes, tuning),
                1.6 + 0.5 * len(tuning.grid.contexts),
                "How many tokens to draft, by texts at a time and tokens of context. 0: do not speculate. Grey: the "
                "caches do not fit or nothing is known.",
            )
        )
    drawn += [
        (
            "time",
            lambda axes: _draw_time(axes, tuning, study.context),
            4.6,
            "Where the milliseconds of a step go with the length chosen, per token that it brings. Plain decoding "
            "beside it for comparison (hatched)." + (WHOLE if tuning.of.whole_steps else ""),
        ),
        (
            "sensitivity",
            lambda axes: _draw_sensitivity(axes, study),
            4.2,
            "The best speed-up if every token were accepted this much more or less often than measured, with the best "
            "K at each point.",
        ),
    ]
    return [(name, _png(fill, height), caption) for name, fill, height, caption in drawn]


def _png(fill: Callable[[Axes], None], height: float) -> bytes:
    # Not pyplot: that would keep figures, and choose a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    fill(axes)
    data = io.BytesIO()
    figure.savefig(data, dpi=150, format="png")
    return data.getvalue()


def _powers(values: Sequence[int], most: int) -> list[int]:
    """Powers of two, where there are some of them: people read those best."""
    powers = [value for value in values if value & (value - 1) == 0]
    return _spread(powers if len(powers) > 3 else values, most)


def _spread(values: Sequence[int], most: int) -> list[int]:
    """At most so many of them, evenly, ends included."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _batch_axis(axes: Axes, batches: Sequence[int]) -> None:
    from matplotlib.ticker import NullLocator

    top = max(batches)
    axes.set_xscale("log", base=2)
    ticks = [2**n for n in range(top.bit_length()) if 2**n <= top]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(0.92, top * 1.08)
    axes.set_xlabel("texts at a time")


def _draw_speedup(axes: Axes, tuning: Tuning) -> None:
    contexts = _spread(tuning.grid.contexts, MOST_LINES)
    for context, colour in zip(contexts, COLOURS, strict=False):
        batches, band_N3 = bands(tuning, context)
        axes.fill_between(batches, band_N3[:, 0], band_N3[:, 2], color=colour, alpha=0.15, linewidth=0)
        axes.plot(batches, band_N3[:, 1], color=colour, linewidth=2, label=f"context {context:,}")
        if len(contexts) == 1:
            _label_lengths(axes, tuning, context, batches, band_N3[:, 1].tolist())
    axes.axhline(1, color=GREY, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_title("Speed-up under the policy" + (", with its K" if len(contexts) == 1 else ""), loc="left")
    _batch_axis(axes, tuning.grid.batches)
    if len(contexts) > 1:
        axes.legend(frameon=False, fontsize=8)


def _label_lengths(axes: Axes, tuning: Tuning, context: int, batches: Sequence[int], heights: Sequence[float]) -> None:
    """K where it changes, as far as there is room for it on a logarithmic axis."""
    last_k, last_at = -1, 0.0
    for batch, height in zip(batches, heights, strict=True):
        k, at = tuning.policy.lookup(batch, context).k, float(np.log2(batch))
        if k != last_k and (last_k < 0 or at - last_at > 0.45):
            style: dict[str, Any] = {"color": COLOURS[0], "fontsize": 9, "ha": "left", "va": "bottom"}
            axes.annotate(f"K = {k}", (batch, height), (2, 3), textcoords="offset points", **style)
            last_k, last_at = k, at


def _draw_crossover(axes: Axes, tuning: Tuning, context: int) -> None:
    """What a step costs and what it brings, of the length that is best alone."""
    at = nearest(tuning, context)
    decisions = column(tuning, at)
    k = max(1, decisions[0].best.k)
    batches = [decision.batch for decision in decisions]
    cost = [float(d.candidates[k].step_S[0] / d.times.plain_S[0]) for d in decisions]
    brings = [float(d.candidates[k].tokens_S[0]) for d in decisions]
    axes.plot(batches, brings, color=COLOURS[2], linestyle="--", linewidth=2, label=f"tokens a step brings, K = {k}")
    axes.plot(batches, cost, color=COLOURS[1], linewidth=2, label="what it costs, in plain steps")
    pays = np.array(brings) > np.array(cost)
    axes.fill_between(batches, cost, brings, where=pays.tolist(), color=COLOURS[2], alpha=0.12, linewidth=0)
    axes.fill_between(batches, cost, brings, where=(~pays).tolist(), color=COLOURS[1], alpha=0.12, linewidth=0)
    if not tuning.of.whole_steps:
        verify = [float(d.times.target_SQ[0, k] / d.times.target_SQ[0, 0]) for d in decisions]
        axes.plot(
            batches, verify, color=COLOURS[1], linestyle=":", linewidth=1.5, label="of that: the pass that checks"
        )
    where = crossover(decisions, k)
    if where is not None and where > batches[0]:
        axes.axvline(where, color=GREY, linewidth=1)
        style: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "color": GREY, "fontsize": 8, "ha": "right"}
        axes.text(where, 0.02, f"stops paying at {where}  ", **style)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("plain steps, tokens")
    axes.set_title(f"Cost and gain of a step with K = {k}, context {at:,}", loc="left")
    _batch_axis(axes, batches)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0.0, 0.9))


def _draw_lengths(axes: Axes, tuning: Tuning) -> None:
    contexts = tuning.grid.contexts
    batches = _powers(sorted({cell.batch for cell in tuning.of.steps}), MOST_COLUMNS)
    tops = known(tuning)
    top = max(1, tuning.k_max)
    table = np.full((len(contexts), len(batches)), np.nan)
    for row, context in enumerate(contexts):
        for at, batch in enumerate(batches):
            if batch <= tops[context]:
                table[row, at] = tuning.policy.lookup(batch, context).k
    from matplotlib import colormaps

    colours = colormaps["viridis_r"].with_extremes(bad="#dddddd")
    axes.imshow(table, aspect="auto", cmap=colours, vmin=0, vmax=top, origin="lower")
    for (row, at), k in np.ndenumerate(table):
        if not np.isnan(k):
            axes.text(at, row, f"{k:.0f}", ha="center", va="center", color="white" if k > top / 2 else "black")
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_yticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks(np.arange(len(batches) - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(len(contexts) - 1) + 0.5, minor=True)
    axes.tick_params(which="minor", length=0)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.set_xlabel("texts at a time")
    axes.set_ylabel("tokens of context")
    axes.set_title("Tokens to draft", loc="left")


def parts(decision: Decision, k: int, whole: bool) -> dict[str, float]:
    """Milliseconds of a full step of length k, by what they are for; per token that a step brings. whole: steps were
    timed with all in them, and all that is known is by how much a plain one is shorter."""
    times, here = decision.times, decision.candidates[k]
    found = _of_whole(times, k) if whole else _of_parts(times, k)
    scale = float(here.step_S[0]) / sum(found.values())  # steps without a block are cheaper
    return {name: value * scale / float(here.tokens_S[0]) for name, value in found.items()}


def _of_parts(times: StepTimes, k: int) -> dict[str, float]:
    passes = float(times.drafts_S(k, k)[0]) if k else 0.0
    follow = float(times.without_S[0] - times.plain_S[0]) if not k else 0.0
    return {
        "target's pass": float(times.target_SQ[0, k]),
        "draft's passes": passes - k * times.per_draft_step + follow,
        "engine": k * times.per_draft_step + times.spec if k else times.base,
    }


def _of_whole(times: StepTimes, k: int) -> dict[str, float]:
    plain, all_of_it = float(times.plain_S[0]), float((times.drafting_S(k, k) if k else times.without_S)[0])
    return {
        "as long as a plain step": min(plain, all_of_it),
        "longer, for drafting and checking": max(0.0, all_of_it - plain),
    }


def _draw_time(axes: Axes, tuning: Tuning, context: int) -> None:
    decisions = column(tuning, nearest(tuning, context))
    wanted = _powers(sorted({cell.batch for cell in tuning.of.steps} & {d.batch for d in decisions}), MOST_BARS)
    chosen = [decision for decision in decisions if decision.batch in wanted]
    for at, decision in enumerate(chosen):
        for side, k in ((-0.21, 0), (0.21, tuning.policy.lookup(decision.batch, decision.context).k)):
            bottom = 0.0
            for (name, value), colour in zip(parts(decision, k, tuning.of.whole_steps).items(), COLOURS, strict=False):
                label = name if at == 0 and side > 0 else None
                hatch = "////" if side < 0 else None
                axes.bar(
                    at + side,
                    value,
                    0.38,
                    bottom,
                    color=colour,
                    label=label,
                    hatch=hatch,
                    edgecolor="white",
                    linewidth=0,
                )
                bottom += value
            if side > 0:
                axes.annotate(f"K={k}", (at + side, bottom), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(chosen)), [str(decision.batch) for decision in chosen])
    axes.set_xlabel("texts at a time")
    axes.set_ylabel("milliseconds a token of a text")
    axes.set_title("Where the time goes: plain (hatched) and under the policy", loc="left")
    axes.legend(framealpha=0.9, edgecolor="none", fontsize=8, loc="upper left")  # bars may stand behind it


def _draw_sensitivity(axes: Axes, study: Study) -> None:
    shown = _powers(study.batches, MOST_LINES)
    changes = [100 * each.change for each in study.sensitivity]
    for batch, colour in zip(shown, COLOURS, strict=False):
        at = study.batches.index(batch)
        speeds = [each.speedups[at] for each in study.sensitivity]
        axes.plot(changes, speeds, color=colour, marker="o", markersize=4, linewidth=2, label=f"{batch} at a time")
        for change, speed, each in zip(changes, speeds, study.sensitivity, strict=True):
            style: dict[str, Any] = {"color": colour, "fontsize": 8, "ha": "center", "textcoords": "offset points"}
            axes.annotate(f"{each.ks[at]}", (change, speed), (0, 5), **style)
    axes.axhline(1, color=GREY, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_xticks(changes, [f"{change:+.0f} %" if change else "as measured" for change in changes])
    axes.set_xlabel("chance that a token is accepted")
    axes.set_ylabel("best speed-up")
    axes.set_title(f"If acceptance were different, context {study.context:,}", loc="left")
    axes.legend(frameon=False, fontsize=8)
