"""quickstart from a name (or none) to a directory with a report: a draft trained, its length tuned, gates run, and all
of it measured on prompts that nothing was chosen by. How each is done is the business of the commands of that name."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

from specctl.bench.command import first_fault
from specctl.bench.options import BenchOptions
from specctl.bench.render import aligned
from specctl.bench.run import measure
from specctl.errors import GateFailed, UsageError
from specctl.options import DecodingOptions, ModelOptions
from specctl.output import new_directory, say, to_json
from specctl.pair import OpenedDraft, Target, free_memory, open_draft, open_target
from specctl.prompts import Prompt
from specctl.quickstart import plan as planning
from specctl.quickstart.classes import TRAINING, VALIDATION
from specctl.quickstart.model import NAME, small_model
from specctl.quickstart.page import Commands, Facts, Findings, Measured, page
from specctl.quickstart.plan import Pace, Plan, Training
from specctl.quickstart.stages import Stages, span
from specctl.quickstart.training import DRAFT, RECIPE, VALIDATED, K, Trained, train
from specctl.quickstart.tuning import POLICY, PROFILE, TRACE, Tuned, check, tune
from specctl.quickstart.tuning import VALIDATION as VERDICTS
from specctl.quickstart.verdict import COLUMNS, Verdict, judge, table
from specctl.schemas.validation import Validation
from specctl.validate.render import verdict as gates_verdict

HTML, REPORT = "REPORT.html", "REPORT.json"
LENGTHS = (1, 2, 3, 5)
"""The draft lengths measured where nothing was trained."""

OTHER_SHARE = 0.25
"""Of the time left for measuring, for each set of prompts beside the domain's."""

RESERVE = 20.0
"""Seconds for what no stage plans for: models opened again, the page."""

NAMED = (f"{DRAFT}/specctl.json", RECIPE, PROFILE, TRACE, POLICY, VERDICTS)
"""Files that name the directory they were made in."""


@dataclass(frozen=True)
class Wishes:
    """What the user settles: where to, how many minutes for all, and if wished how many answers to train on (0: none),
    how long an answer is, how many prompts to measure on, and prompts to measure on besides."""

    output: Path
    force: bool = False
    minutes: float = 15.0
    answers: int | None = None
    max_tokens: int | None = None
    limit: int | None = None
    prompts: tuple[str, list[Prompt]] | None = None

    @property
    def longest(self) -> int:
        return self.max_tokens or planning.LONGEST


@dataclass
class _Run:
    """What is known so far."""

    target: Target
    name: str
    model: ModelOptions
    wishes: Wishes
    directory: Path
    stages: Stages
    measured: list[Measured] = field(default_factory=list)

    def training(self, pace: Pace) -> Training:
        prompts = self._fitting(TRAINING.prompts("train"))
        if self.wishes.answers is not None and self.wishes.answers > len(prompts):
            raise UsageError(f"--answers {self.wishes.answers}: there are {len(prompts)} prompts that fit this model")
        length = planning.mean_length(prompts[: planning.TOGETHER], self.target)
        chosen = planning.choose_training(pace, length, self.stages.seconds, self.wishes.longest, self.wishes.answers)
        if not chosen.answers:
            slow = "the answers to learn from take too long here; --answers N trains one all the same"
            say(f"      no draft is trained: {'--answers 0' if self.wishes.answers == 0 else slow}")
        return chosen

    def train(self, training: Training) -> Trained:
        prompts = self._fitting(TRAINING.prompts("train"))[: training.answers]
        validation = self._fitting(VALIDATION.prompts("validation"))
        return train(self.target, prompts, validation, self.wishes.longest, self.model, self.directory, _indented)

    def tune(self, draft: OpenedDraft) -> Tuned | None:
        validation = self._fitting(VALIDATION.prompts("validation"))
        return tune(self.target, draft, validation, self.wishes.longest, self.directory, _indented)

    def check(self, draft: OpenedDraft, length: float) -> Validation:
        prompts = self._fitting(VALIDATION.prompts("validation"))[:VALIDATED]
        return check(self.target, draft, length, K, prompts, self.wishes.longest, self.directory)

    def measure(
        self,
        what: str,
        file: str,
        drafts: list[OpenedDraft],
        lengths: tuple[int, ...],
        plan: Plan,
    ) -> Measured:
        baselines = ("plain", "transformers") if plan.transformers else ("plain",)
        options = BenchOptions(baselines, repeats=plan.repeats, sweep_k=lengths, assisted=False)
        decoding = DecodingOptions(drafts=tuple(draft.name for draft in drafts), max_tokens=plan.max_tokens)
        found = measure(self.target, drafts, plan.prompts, options, decoding, _indented)
        done = Measured(what, file, plan.prompts, found.report)
        self.measured.append(done)
        return done

    def _fitting(self, prompts: list[Prompt]) -> list[Prompt]:
        return planning.fitting(prompts, self.target, self.wishes.longest)


def quickstart(target_name: str | None, model: ModelOptions, wishes: Wishes, *, as_json: bool) -> None:
    """Do everything and write the report. The closing tables (or with as_json one object) go to stdout, all else to
    stderr.

    Raises UsageError before any work when the output is there, and GateFailed, after everything is written, when a gate
    failed or answers differ that have to be the same.
    """
    stages = Stages(8, 60 * wishes.minutes, say)
    with new_directory(wishes.output, force=wishes.force) as directory:
        with stages.stage("model: " + (target_name or f"{NAME}, from its package")):
            path = target_name or str(small_model(say))
            target = open_target(path, model)
        run = _Run(target, target_name or NAME, model, wishes, directory, stages)
        found = _work(run)
        with stages.stage("writing the report"):
            _write(run, found)
    _show(run, found, as_json)
    if faults := list(_faults(run, found)):
        raise GateFailed(f"{wishes.output}: {faults[0]}")


def _work(run: _Run) -> Findings:
    stages, wishes = run.stages, run.wishes
    with stages.stage("trial: a few plain answers, to see what fits into the time"):
        held_out = planning.held_out_prompts(run.target, wishes.longest)
        pace = planning.trial(run.target, held_out)
        say(
            f"      {1000 * pace.token:.0f} ms a token, {1000 * pace.together:.1f} when {planning.TOGETHER} texts are "
            f"decoded at once, {1000 * pace.prompt:.1f} a token of a prompt"
        )
        training = run.training(pace)
    drafts, trained, validation = [open_draft("ngram", run.target)], None, None
    if training.answers:
        about = f"training a draft: {training.answers} answers by the target, then {planning.EPOCHS} passes over them"
        with stages.stage(about, training.seconds):
            trained = run.train(training)
        drafts.append(open_draft(str(run.directory / DRAFT), run.target))
    with stages.stage("profiling this machine, and choosing the draft length", _tuning_budget(run)):
        tuned = run.tune(drafts[-1])
    if trained is not None:
        with stages.stage("gates: whether the pair is what it should be", _tuning_budget(run)):
            validation = run.check(drafts[-1], trained.length)
    stages.total = len(stages.done) + 3
    lengths = LENGTHS if trained is None else tuple(sorted({K, (tuned.k if tuned else 0) or 1}))
    verdict = _measure(run, pace, held_out, drafts, lengths)
    return Findings(trained, tuned, validation, verdict, _commands(run, verdict, tuned))


def _tuning_budget(run: _Run) -> float:
    return planning.TUNING_SHARE / 2 * run.stages.seconds


def _measure(
    run: _Run, pace: Pace, held_out: list[Prompt], drafts: list[OpenedDraft], lengths: tuple[int, ...]
) -> Verdict:
    """The domain's prompts first; what came out best there then on others."""
    wishes, stages = run.wishes, run.stages
    sets = [("general prompts", "GENERAL.json", planning.general_prompts(run.target, wishes.longest))]
    if wishes.prompts is not None:
        name, prompts = wishes.prompts
        sets.append((name, "PROMPTS.json", planning.fitting(prompts, run.target, wishes.longest)))
    left, runs = max(0.0, stages.left - RESERVE), len(drafts) * len(lengths)
    plan = planning.choose(
        held_out,
        pace,
        left * (1 - OTHER_SHARE * len(sets)),
        runs=runs,
        max_tokens=wishes.longest,
        transformers=_fits_twice(run.target),
        limit=wishes.limit,
    )
    with stages.stage(f"measuring on {len(plan.prompts)} held-out prompts of the domain", plan.seconds):
        if not plan.transformers:
            say("      transformers is left out: there is no memory for a second copy of the model")
        domain = run.measure("held-out classes", REPORT, drafts, lengths, plan)
    verdict = judge(domain.report, run.name)
    plans = [
        planning.choose(
            prompts,
            pace,
            left * OTHER_SHARE,
            runs=len(drafts),
            max_tokens=wishes.longest,
            transformers=False,
            limit=None if wishes.limit is None else min(wishes.limit, len(prompts)),
        )
        for _, _, prompts in sets
    ]
    number = sum(len(plan.prompts) for plan in plans)
    with stages.stage(f"measuring on {number} other prompts", sum(plan.seconds for plan in plans)):
        for (what, file, _), plan in zip(sets, plans, strict=True):
            run.measure(what, file, drafts, (verdict.k,), plan)
    return verdict


def _fits_twice(target: Target) -> bool:
    """Whether transformers can load the model once more beside ours."""
    weights = sum(target.checkpoint.info(name).num_parameters for name in target.checkpoint.names())
    return free_memory(target.device) > 1.2 * weights * target.dtype.itemsize


def _commands(run: _Run, verdict: Verdict, tuned: Tuned | None) -> Commands:
    """The lines to go on with, with whatever was said here on how to run the model."""
    changed = [f for f in fields(ModelOptions) if getattr(run.model, f.name) != f.default]
    flags = [word for f in changed for word in (f"--{f.name.replace('_', '-')}", str(getattr(run.model, f.name)))]
    learned = verdict.label != "ngram"
    draft = str(run.wishes.output / DRAFT) if learned else "ngram"
    target = run.target.name
    serve = ["specctl", "serve", "--target", target]
    if (
        verdict.pays and learned and tuned is not None and tuned.k == verdict.k
    ):  # what was predicted came true: it holds under load as well
        serve += ["--draft", draft, "--policy", str(run.wishes.output / POLICY)]
    elif verdict.pays:
        serve += ["--draft", draft, "--k", str(verdict.k)]
    bench = ["specctl", "bench", "--target", target, "--draft", draft, "--sweep-k", ",".join(map(str, LENGTHS))]
    return Commands(
        shlex.join([*serve, *flags]),
        shlex.join([*bench, *flags, "--prompts", "mine.jsonl", "--output", "mine.json"]),
    )


def _write(run: _Run, found: Findings) -> None:
    for measured in run.measured:
        value = measured.report.model_dump(mode="json", by_alias=True)
        (run.directory / measured.file).write_text(to_json(value) + "\n", encoding="utf-8")
    for name in NAMED:
        path = run.directory / name
        if path.exists():
            text = path.read_text(encoding="utf-8")
            path.write_text(_named(run, text), encoding="utf-8")
    facts = Facts.of(run.target, run.name)
    text = page(run.measured, found, facts, run.stages, run.directory)
    (run.directory / HTML).write_text(_named(run, text), encoding="utf-8")


def _named(run: _Run, text: str) -> str:
    """With the place where everything will be in place of the one where it was made."""
    return text.replace(str(run.directory), str(run.wishes.output))


def _show(run: _Run, found: Findings, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(to_json(_as_json(run, found)) + "\n")
    else:
        sys.stdout.write("\n".join(_lines(run, found)) + "\n")


def _as_json(run: _Run, found: Findings) -> dict[str, object]:
    verdict = found.verdict
    return {
        "output": str(run.wishes.output),
        "run": verdict.run,
        "k": verdict.k if verdict.pays else 0,
        "verdict": verdict.headline,
        "serve": found.commands.serve,
        "gates_passed": None if found.validation is None else found.validation.passed,
        "stages": [{"name": s.name, "budget_s": s.budget, "seconds": s.seconds} for s in run.stages.done],
        "reports": {m.file: m.report.model_dump(mode="json", by_alias=True) for m in run.measured},
    }


def _lines(run: _Run, found: Findings) -> Iterator[str]:
    verdict = found.verdict
    yield ""
    yield aligned(
        [
            ["stage", "budget", "took"],
            *(
                [s.name.split(":")[0], "" if s.budget is None else span(s.budget), span(s.seconds)]
                for s in run.stages.done
            ),
        ]
    )
    for measured in run.measured:
        yield f"\n{measured.what}, {len(measured.prompts)} prompts"
        best = (verdict.run or "plain") if measured is run.measured[0] else None
        yield aligned([list(COLUMNS), *(list(row.cells) for row in table(measured.report, best))])
    yield ""
    for sentence in (verdict.headline, *verdict.because, verdict.text, *_more(found)):
        yield textwrap.fill(sentence, 100)
    yield f"\nreport:  {run.wishes.output / HTML}\ngo on:   {found.commands.serve}"


def _more(found: Findings) -> Iterator[str]:
    """What training, tuning and gates came to."""
    tuned = found.tuned
    if tuned is not None:
        predicted = f"{tuned.predicted:.2f} for K = {tuned.k}" if tuned.k else "that no draft length pays"
        yield f"tune predicted {predicted}, from the profile of this machine and the acceptance on other prompts."
    if found.validation is not None:
        yield f"Gates: {gates_verdict(found.validation)}."


def _faults(run: _Run, found: Findings) -> Iterator[str]:
    for measured in run.measured:
        if fault := first_fault(measured.report):
            yield f"{measured.file}: {fault}"
    if found.validation is not None and not found.validation.passed:
        yield f"{VERDICTS}: {gates_verdict(found.validation)}"


def _indented(sentence: str) -> None:
    say(f"      {sentence}")
