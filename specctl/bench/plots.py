"""The report as pictures: speed-up over K, acceptance by position, where a step's time goes. None without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.bench.anatomy import Anatomy
from specctl.bench.steps import step_costs
from specctl.engine.stats import PHASES
from specctl.schemas.report import Comparison, Report, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart by every kind of eye (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
MARKERS = "osD^vP*"
GREY = "#777777"
WIDTH = 7.2


def draw(report: Report, directory: Path, anatomy: Anatomy | None = None) -> list[Path]:
    """Draw what there is into the directory; the files, in the order in which they should be looked at."""
    drawn = []
    pictures: list[tuple[str, Callable[[Axes], bool]]] = [
        ("speedup", lambda axes: _draw_speedup(axes, report)),
        ("acceptance", lambda axes: _draw_acceptance(axes, report)),
        ("step", lambda axes: _draw_step(axes, report)),
        ("phases", lambda axes: anatomy is not None and _draw_phases(axes, anatomy)),
    ]
    for name, fill in pictures:
        path = directory / f"{name}.png"
        if _picture(path, fill):
            drawn.append(path)
    return drawn


def _picture(path: Path, fill: Callable[[Axes], bool]) -> bool:
    """One picture, if `fill` finds something to draw."""
    # Not pyplot: that would keep figures, and choose a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    if not fill(axes):
        return False
    figure.savefig(path, dpi=150)
    return True


def _draw_speedup(axes: Axes, report: Report) -> bool:
    """Speed-up against plain decoding over K, a line for each draft; policies and transformers as levels across."""
    series: dict[str, list[tuple[int, Comparison]]] = {}
    levels: list[tuple[str, float]] = []
    for comparison in report.comparisons:
        if comparison.against != "plain":
            continue
        run = report.run(comparison.run)
        if run.k is None:
            levels.append((run.name, comparison.speedup))
        else:
            series.setdefault(_draft(run), []).append((run.k, comparison))
    plain = report.run("plain").tok_s
    levels += [(run.name, run.tok_s / plain) for run in report.runs if run.name.startswith("transformers")]
    if not series and not levels:
        return False
    looks = _looks(report)
    handles: list[Any] = [axes.axhline(1, color=GREY, linewidth=1, label="plain")]
    for name, points in series.items():
        handles += _speedup_line(axes, name, points, *looks[name])
    for (name, level), style in zip(levels, ("--", "-.", (0, (1, 3)), (0, (5, 1))) * 9, strict=False):
        handles.append(axes.axhline(level, color="#444444", linestyle=style, linewidth=1.2, label=name))
    axes.set_xlabel("K, tokens drafted at a time")
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_xticks(sorted({k for points in series.values() for k, _ in points}))
    axes.set_ylim(bottom=0)
    axes.set_title("Speed-up, with 95 % intervals", loc="left")
    _legend_beside(axes, handles)
    return True


def _speedup_line(
    axes: Axes, name: str, points: list[tuple[int, Comparison]], colour: str, marker: str
) -> Iterator[Any]:
    """What was measured, with its intervals, and what the passes imply; what was drawn, for the legend."""
    points = sorted(points, key=lambda point: point[0])
    bars = [
        [max(0.0, c.speedup - (c.ci95 or [c.speedup])[0]) for _, c in points],
        [max(0.0, (c.ci95 or [c.speedup])[-1] - c.speedup) for _, c in points],
    ]
    ks, heights = [k for k, _ in points], [c.speedup for _, c in points]
    yield axes.errorbar(ks, heights, yerr=bars, color=colour, marker=marker, capsize=4, linewidth=2, label=name)
    implied = [(k, c.implied) for k, c in points if c.implied is not None]
    if implied:
        look: dict[str, Any] = {"color": colour, "marker": marker, "markerfacecolor": "white", "linestyle": ":"}
        yield from axes.plot(*zip(*implied, strict=True), label=f"{name}, implied by its passes", **look)


def _draw_acceptance(axes: Axes, report: Report) -> bool:
    """Of the drafts with a k-th token, how many had their first k accepted; the longest run of each draft."""
    longest: dict[str, Run] = {}
    for run in report.runs:
        if run.speculation is not None and run.speculation.num_drafts:
            known = longest.get(_draft(run))
            if known is None or _positions(run) > _positions(known):
                longest[_draft(run)] = run
    if not longest:
        return False
    most = max(map(_positions, longest.values()))
    width = 0.8 / len(longest)
    looks = _looks(report)
    for index, (name, run) in enumerate(longest.items()):
        assert run.speculation is not None
        pairs = zip(run.speculation.accepted_per_position, run.speculation.drafted_per_position, strict=True)
        heights = [100 * accepted / drafted for accepted, drafted in pairs]
        places = [k + (index - (len(longest) - 1) / 2) * width for k in range(1, len(heights) + 1)]
        bars = axes.bar(places, heights, width=0.92 * width, color=looks[name][0], label=run.name)
        axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
    axes.set_xticks(range(1, most + 1))
    axes.set_ylim(0, 105)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted up to here, % of drafts this long")
    axes.set_title("Acceptance by position", loc="left")
    axes.legend(frameon=False, fontsize=8)
    return True


def _draw_step(axes: Axes, report: Report) -> bool:
    """What a step costs in plain steps, part by part, beside the tokens it brings: the speed-up is their ratio."""
    steps = step_costs(report)
    if not steps:
        return False
    names = [step.run for step in steps]
    parts = {
        "verify pass": [step.verify for step in steps],
        "draft passes": [step.draft for step in steps],
        "catch-up pass": [step.catch_up for step in steps],
        "everything else": [max(0.0, step.rest) for step in steps],
    }
    _stack(axes, names, parts)
    axes.plot(
        [step.tokens for step in steps],
        names,
        linestyle="none",
        marker="D",
        color="black",
        markersize=6,
        label="tokens a step brings",
    )
    axes.axvline(1, color=GREY, linewidth=1)
    axes.set_xlim(0, 1.05 * max(max(step.tokens, step.passes + max(0.0, step.rest)) for step in steps))
    axes.set_xlabel("plain steps (bars), tokens (diamonds)")
    axes.set_title("What a step costs and what it brings", loc="left")
    _legend_beside(axes)
    return True


def _draw_phases(axes: Axes, anatomy: Anatomy) -> bool:
    names = list(anatomy.phases)
    parts = {phase.replace("_", " "): [anatomy.phases[name][phase] for name in names] for phase in PHASES}
    _stack(axes, names, parts)
    axes.set_xlim(0, 1.05 * max(sum(phases.values()) for phases in anatomy.phases.values()))
    axes.set_xlabel("milliseconds a token")
    axes.set_title("Where the engine's time goes", loc="left")
    _legend_beside(axes)
    return True


def _stack(axes: Axes, names: list[str], parts: dict[str, list[float]]) -> None:
    """Bars across, the first name at the top; the picture as high as their number needs."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.set_size_inches(WIDTH, 1.6 + 0.4 * len(names))
    left = [0.0] * len(names)
    for (part, widths), colour in zip(parts.items(), COLOURS, strict=False):
        if not any(widths):
            continue
        axes.barh(names, widths, left=left, color=colour, height=0.6, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()


def _legend_beside(axes: Axes, handles: list[Any] | None = None) -> None:
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _looks(report: Report) -> dict[str, tuple[str, str]]:
    """Colour and marker of each draft, the same in every picture."""
    labels = dict.fromkeys(_draft(run) for run in report.runs if run.speculation is not None)
    return {label: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, label in enumerate(labels)}


def _positions(run: Run) -> int:
    return 0 if run.speculation is None else len(run.speculation.drafted_per_position)


def _draft(run: Run) -> str:
    """The draft's label, which the names of its runs begin with."""
    return run.name.rpartition(" k=")[0] or run.name.removesuffix(" policy")
