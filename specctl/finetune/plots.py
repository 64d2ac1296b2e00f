"""A run as a picture: its losses and learning rate, its acceptance on held-out prompts, and of a head what is right
token by token, in training and decoded, one below the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart by every kind of eye (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
NAMES = {
    "ce": "cross-entropy",
    "kl": "KL to the target",
    "tv": "total variation",
    "feature": "distance of hidden states",
}

Lines = Sequence[Mapping[str, Any]]
FOUND, DECODED = "found_in_training", "found_in_decoding"


def draw(metrics: Lines, file: Path) -> None:
    """Draw what metrics.jsonl holds; nothing when it holds no step."""
    figure = make_figure(metrics)
    if figure is not None:
        figure.savefig(file, dpi=120)


def make_figure(metrics: Lines) -> Figure | None:
    # Not pyplot: that would keep figures, and choose a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [line for line in metrics if "loss" in line]
    validations = [line for line in metrics if "validation" in line]
    panels: list[Callable[[Axes], None]] = []
    if steps:
        panels += [lambda axes: _draw_loss(axes, steps), lambda axes: _draw_lr(axes, steps)]
    if validations:
        panels.append(lambda axes: _draw_acceptance(axes, validations))
    if compared := [(line["step"], each) for line in validations for each in line["validation"] if DECODED in each]:
        panels.append(lambda axes: _draw_tokens(axes, steps, compared))
    if not panels:
        return None
    figure = Figure(figsize=(7.2, 3.0 * len(panels)))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.1, right=0.97, top=0.95, bottom=0.16 / len(panels), hspace=0.4)
    for axes, fill in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        fill(axes)
    axes.set_xlabel("optimiser step")
    return figure


def _draw_loss(axes: Axes, steps: Lines) -> None:
    x = [line["step"] for line in steps]
    for (key, name), colour in zip(NAMES.items(), COLOURS, strict=False):
        values = [line[key] for line in steps]
        if any(values):
            axes.plot(x, values, color=colour, label=name, linewidth=1.5, marker="." if len(x) < 30 else "")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("a token")
    axes.set_title("Losses", loc="left")
    axes.legend(frameon=False, fontsize=8)


def _draw_lr(axes: Axes, steps: Lines) -> None:
    axes.plot([line["step"] for line in steps], [line["lr"] for line in steps], color=COLOURS[0])
    axes.set_ylim(bottom=0)
    axes.set_title("Learning rate", loc="left")


def _draw_acceptance(axes: Axes, validations: Lines) -> None:
    """Mean acceptance length over steps, a line for each temperature."""
    x = [line["step"] for line in validations]
    for index, measured in enumerate(validations[0]["validation"]):
        lengths = [line["validation"][index]["mean_acceptance_length"] for line in validations]
        label = f"T = {measured['temperature']:g}, K = {measured['k']}"
        axes.plot(x, lengths, color=COLOURS[index % len(COLOURS)], marker="o", label=label)
    axes.set_ylim(bottom=1)
    axes.set_ylabel("mean acceptance length")
    axes.set_title("Acceptance on held-out prompts, bonus counted", loc="left")
    axes.legend(frameon=False, fontsize=8)


def _draw_tokens(axes: Axes, steps: Lines, compared: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    """A colour for each token: what decoding accepts up to it, what training's own pass finds at the same places, and
    how often it is right by itself in the batches that are trained on. Where the first two part, it is said."""
    x = [step for step, _ in compared]
    for slot in range(compared[0][1]["k"]):
        colour = COLOURS[slot % len(COLOURS)]
        batches = [(line["step"], line["accuracy"][slot]) for line in steps if slot < len(line["accuracy"])]
        if batches:
            axes.plot(*zip(*batches, strict=True), color=colour, linewidth=0.8, alpha=0.5)
        decoded, found = ([each[key][slot] for _, each in compared] for key in (DECODED, FOUND))
        axes.plot(x, decoded, color=colour, marker="o", label=f"token {slot + 1}")
        axes.plot(x, found, color=colour, marker="x", linestyle="--")
    parted = next(((step, each["parted_from"]) for step, each in compared if each["parted_from"] is not None), None)
    if parted is not None:
        axes.axvline(parted[0], color=COLOURS[-1], linestyle=":", label=f"they part from token {parted[1]} on")
    axes.set_ylim(0, 1)
    axes.set_ylabel("share that is right")
    axes.set_title("Up to each token: decoded (o), by training's pass (x); thin: in its batches", loc="left")
    axes.legend(frameon=False, fontsize=8)
