"""The report as one HTML page that carries its pictures and its style, and asks nothing of a network."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2

from specctl.bench.plots import draw
from specctl.pair import Target
from specctl.prompts import Prompt
from specctl.quickstart.plan import by_class
from specctl.quickstart.stages import Stages, span
from specctl.quickstart.training import PICTURE, K, Trained
from specctl.quickstart.tuning import Tuned
from specctl.quickstart.verdict import COLUMNS, Row, Verdict, table
from specctl.schemas.report import Report
from specctl.schemas.validation import Validation
from specctl.tune.words import reason

TEMPLATE = Path(__file__).with_name("report.html.jinja")

CAPTIONS = {
    "speedup": "Tokens a second over those of plain decoding, for each draft length K, on the domain's prompts. The "
    "dotted line is what the passes and the acceptance would give if every step had a draft.",
    "acceptance": "How often a draft was right up to its first, second, ... token. It can only fall: a token counts "
    "only when all before it were accepted.",
    "step": "A speculative step costs more than a plain one (bars) and brings more than one token (diamonds). It pays "
    "when the diamond lies to the right of the bar's end.",
}
TRAINING_CAPTION = "Training: the loss of every step, and what the engine accepted of the draft on held-out prompts."


@dataclass(frozen=True)
class Facts:
    """What was run. model: what to call it. parameters: in all its tensors."""

    model: str
    parameters: int
    layers: int
    dtype: str

    @classmethod
    def of(cls, target: Target, model: str) -> Facts:
        checkpoint = target.checkpoint
        return cls(
            model=model,
            parameters=sum(checkpoint.info(name).num_parameters for name in checkpoint.names()),
            layers=target.model.config.num_layers,
            dtype=str(target.dtype).removeprefix("torch."),
        )


@dataclass(frozen=True)
class Commands:
    """The lines to go on with."""

    serve: str
    bench: str


@dataclass(frozen=True)
class Measured:
    """One set of prompts and what was measured on it. file: of the report."""

    what: str
    file: str
    prompts: list[Prompt]
    report: Report


@dataclass(frozen=True)
class Findings:
    """What it all came to. trained, validation: None where no draft was trained; tuned: where nothing was drafted."""

    trained: Trained | None
    tuned: Tuned | None
    validation: Validation | None
    verdict: Verdict
    commands: Commands


@dataclass(frozen=True)
class _Table:
    """The rows of one set of prompts."""

    what: str
    kinds: list[tuple[str, int]]
    rows: list[Row]


def page(measured: list[Measured], found: Findings, facts: Facts, stages: Stages, directory: Path) -> str:
    """The HTML text. measured: the domain first, which the verdict is about. directory: where training left its
    picture."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    best = found.verdict.run or "plain"
    return template.render(
        report=measured[0].report,
        found=found,
        verdict=found.verdict,
        facts=facts,
        columns=COLUMNS,
        tables=[
            _Table(each.what, list(by_class(each.prompts)), table(each.report, best if not i else None))
            for i, each in enumerate(measured)
        ],
        decisions=list(_decisions(found.tuned)),
        k_trained=K,
        stages=[(s.name, "" if s.budget is None else span(s.budget), span(s.seconds)) for s in stages.done],
        commands=found.commands,
        pictures=_pictures(measured[0].report),
        training_picture=_embedded(directory / PICTURE) if found.trained is not None else None,
        training_caption=TRAINING_CAPTION,
        files=[each.file for each in measured],
    )


def _decisions(tuned: Tuned | None) -> Iterator[tuple[str, ...]]:
    """What tune chose, by batch."""
    for decision in [] if tuned is None else tuned.tuning.decisions:
        chosen = decision.chosen
        low, middle, high = chosen.band
        gain = f"{middle:.2f} ({low:.2f} - {high:.2f})" if chosen.k else "1"
        yield str(decision.batch), str(chosen.k), gain, reason(decision)


def _pictures(report: Report) -> list[tuple[str, str]]:
    """Pictures as data addresses, with their captions."""
    with tempfile.TemporaryDirectory() as directory:
        return [(_embedded(path), CAPTIONS[path.stem]) for path in draw(report, Path(directory))]


def _embedded(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
