"""The report as one HTML page that carries its pictures and its style, and asks nothing of a network."""

from __future__ import annotations

import base64
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jinja2

from specctl.bench.plots import draw
from specctl.pair import Target
from specctl.prompts import Prompt
from specctl.quickstart.verdict import COLUMNS, Row, Verdict
from specctl.schemas.report import Report
from specctl.schemas.trace import Trace, TraceClass

TEMPLATE = Path(__file__).with_name("report.html.jinja")

CLASSES = {
    "rewrite": "rewrite a text that is given",
    "extract": "pick something out of a text that is given",
    "code": "change or translate a piece of code",
    "chat": "talk, explain, tell a story",
    "math": "work out a small sum",
}
CAPTIONS = {
    "speedup": "Tokens a second over those of plain decoding, for each draft length K. The dotted line is what the "
    "passes and the acceptance would give if every step had a draft.",
    "acceptance": "How often a draft was right up to its first, second, ... token. It can only fall: a token counts "
    "only when all before it were accepted.",
    "step": "A speculative step costs more than a plain one (bars) and brings more than one token (diamonds). It pays "
    "when the diamond lies to the right of the bar's end.",
}


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
class Class:
    """Acceptance of one class of prompts. rate: of the drafted tokens, None when nothing was drafted."""

    name: str
    what: str
    prompts: int
    drafts: int
    rate: float | None
    length: float | None


@dataclass(frozen=True)
class Commands:
    """The lines to go on with."""

    serve: str
    bench: str


def page(
    report: Report,
    trace: Trace,
    prompts: list[Prompt],
    facts: Facts,
    verdict: Verdict,
    rows: list[Row],
    commands: Commands,
) -> str:
    """The HTML text."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        report=report,
        trace=trace,
        classes=[_class(each) for each in trace.classes],
        kinds=Counter(prompt.class_ for prompt in prompts),
        facts=facts,
        verdict=verdict,
        columns=COLUMNS,
        rows=rows,
        commands=commands,
        pictures=_pictures(report),
    )


def _class(trace: TraceClass) -> Class:
    drafted, accepted = sum(trace.drafted_per_position), sum(trace.accepted_per_position)
    return Class(
        name=trace.class_,
        what=CLASSES.get(trace.class_, ""),
        prompts=len(trace.requests),
        drafts=trace.num_drafts,
        rate=accepted / drafted if drafted else None,
        length=1 + accepted / trace.num_drafts if trace.num_drafts else None,
    )


def _pictures(report: Report) -> list[tuple[str, str]]:
    """Pictures as data addresses, with their captions."""
    with tempfile.TemporaryDirectory() as directory:
        return [
            ("data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii"), CAPTIONS[path.stem])
            for path in draw(report, Path(directory))
        ]
