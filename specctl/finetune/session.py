"""Session: what happens between the steps of a run, from its first step, or the one it goes on with, to what it writes.

What one step does is specctl/train/loop.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specctl.checkpoint import Checkpoint
from specctl.errors import UsageError
from specctl.finetune.data import DataSet
from specctl.finetune.interrupt import Interrupted, Interrupts
from specctl.finetune.plan import Plan
from specctl.finetune.plots import draw
from specctl.finetune.progress import Bar
from specctl.finetune.result import Result
from specctl.finetune.start import Start
from specctl.finetune.validation import Measured, Validator, check_begun, claimed, in_a_row, score
from specctl.finetune.workspace import Metrics, Workspace
from specctl.output import new_directory
from specctl.schemas.draft import FACTS
from specctl.schemas.recipe import Recipe
from specctl.train import checkpoint
from specctl.train.checkpoint import Progress
from specctl.train.feed import Cursor
from specctl.train.loop import Step, Trainer
from specctl.train.sharding import gathered

Say = Callable[[str], None]


@dataclass(frozen=True)
class TrainingResult:
    """losses, lrs: of every step. best_step: whose weights were written, None for the last. acceptance: of what was
    written, empty where there was nothing to decode."""

    output: Path
    data: DataSet
    losses: list[float]
    lrs: list[float]
    best_step: int | None
    acceptance: list[Measured]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What to show, two columns."""
        first, last = (self.losses[:1], self.losses[-1:])
        steps = "".join(f", loss {a:.4f} at first and {b:.4f} at last" for a, b in zip(first, last, strict=True))
        return [
            ("output", str(self.output)),
            ("steps", f"{len(self.losses)}{steps}"),
            *((("weights", f"of step {self.best_step}"),) if self.best_step is not None else ()),
            *(row for each in self.acceptance for row in each.rows),
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "output": str(self.output),
            "steps": len(self.losses),
            "best_step": self.best_step,
            "acceptance": [each.as_dict() for each in self.acceptance],
        }


@dataclass(frozen=True)
class Work:
    """Everything a run is made of. validator: None where nothing is held out. first_look: who decodes then, once before
    the first step, with a draft that was trained before. identity: what has to be the same for a run to go on; config:
    of the checkpoints' weights. whole: the model that the leading process decodes with and writes; the trainer's own
    where its weights are not spread over several."""

    recipe: Recipe
    workspace: Workspace
    data: DataSet
    start: Start
    plan: Plan
    trainer: Trainer
    whole: nn.Module
    target: Checkpoint
    validator: Validator | None
    first_look: Validator | None
    identity: Mapping[str, Any]
    config: Mapping[str, Any]


@dataclass
class Session:
    """A run between its first step, or the one it goes on with, and its last."""

    work: Work
    interrupts: Interrupts
    say: Say
    progress: Progress = field(default_factory=Progress)
    saved: int = -1
    last: Step | None = None

    def __post_init__(self) -> None:
        self._trainer, self._world = self.work.trainer, self.work.trainer.world
        place = self.work.workspace
        found = checkpoint.latest(place.checkpoints)
        if found is not None:
            self._restore(found)
        self._world.wait()
        self._metrics = Metrics(place.metrics, self.progress.metrics_bytes) if self._world.leads else None

    def train(self) -> None:
        """To the last step, or until acceptance does not rise any more."""
        work, trainer = self.work, self._trainer
        try:
            with Bar("training", work.plan.steps, "steps", done=trainer.step, quiet=not self._world.leads) as bar:
                self._between(bar)
                while not self._over:
                    step = trainer.run_step()
                    self._note(step, bar)
                    self._between(bar)
        except Interrupted:
            if trainer.step != self.saved:
                self._save()
            self.say(f"saved after step {trainer.step} in {work.workspace.path}; go on with --resume")
            raise

    def write(self, *, force: bool) -> TrainingResult | None:
        """The best weights, or the last where none were compared, into the output; None where another process did."""
        work, best = self.work, self.progress.best_step
        self._gather()
        if not self._world.leads:
            self._world.wait()
            return None
        if best is not None and best != self._trainer.step:
            self.say(f"the weights of step {best} are written: acceptance was best there")
            checkpoint.load_model(work.workspace.best / checkpoint.step_name(best), work.whole)
        self._trainer.release()
        threads = torch.get_num_threads()
        device = next(work.whole.parameters()).device
        result = Result(work.recipe, work.start, work.whole, work.target, work.data.sha, str(device), threads)
        with new_directory(work.workspace.output, force=force) as path:
            measured = result.write(path, work.validator)
        assert self._metrics is not None
        lines = self._metrics.read()
        draw(lines, work.workspace.picture)
        work.workspace.finish()
        self._world.wait()
        steps = [line for line in lines if "loss" in line]
        return TrainingResult(
            work.workspace.output,
            work.data,
            [line["loss"] for line in steps],
            [line["lr"] for line in steps],
            best,
            measured,
        )

    @property
    def _over(self) -> bool:
        patience = self.work.recipe.validation.patience
        stale = patience is not None and self.progress.stale >= patience
        return stale or self._trainer.step >= self.work.plan.steps

    def _note(self, step: Step, bar: Bar) -> None:
        self.last = step
        bar.add(1, step.tokens, f"loss {step.loss:.4f}")
        self._add(step.as_dict() | {"time": round(time.time(), 3)})

    def _add(self, line: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.add(line)

    def _gather(self) -> None:
        """Bring weights that are spread over processes together in `whole`."""
        if self._world.size > 1:
            weights = gathered(self._trainer.model.named_parameters(), self._world)
            own = dict(self.work.whole.named_parameters())
            with torch.no_grad():
                for name, weight in weights.items():
                    own[name].copy_(weight)

    def _between(self, bar: Bar) -> None:
        """After a step, or before the first: validate and save when it is time. Raises Interrupted."""
        self.interrupts.check()
        step, recipe = self._trainer.step, self.work.recipe
        decode = self._due()
        if decode is not None and self.progress.validated != step:
            self._gather()
            if self._world.leads:
                decode(bar)
                self.progress = replace(self.progress, validated=step)
            self.progress = self._world.tell(self.progress)
        if step % recipe.checkpoint.every_steps == 0 and step != self.saved and step:
            self._save()

    def _due(self) -> Callable[[Bar], None] | None:
        """What is to be decoded after this step, if anything is."""
        step, work = self._trainer.step, self.work
        if work.validator is None:
            return self._look if work.first_look is not None and step == 0 else None
        due = step % work.recipe.validation.every_steps == 0 or step == work.plan.steps
        return self._validate if due else None

    def _look(self, bar: Bar) -> None:
        """At what the run begins with."""
        assert self.work.first_look is not None
        count = len(self.work.first_look.work)
        self._measure(self.work.first_look, "first_look", f", over {count} training prompts: nothing is held out", bar)

    def _validate(self, bar: Bar) -> None:
        assert self.work.validator is not None
        step = self._trainer.step
        length = score(self._measure(self.work.validator, "validation", "", bar))
        before = self.progress.best_length
        if before is None or length >= before:
            self._keep_best()
            stale = 0 if before is None or length > before else self.progress.stale + 1
            self.progress = replace(self.progress, best_step=step, best_length=length, stale=stale)
        else:
            self.progress = replace(self.progress, stale=self.progress.stale + 1)

    def _measure(self, validator: Validator, key: str, over: str, bar: Bar) -> list[Measured]:
        """Decode with the draft as it is now, say what came of it, and note it under `key`. over: which prompts, in
        words."""
        step, begun = self._trainer.step, self._begun
        drafter = self.work.start.drafter(self.work.whole)
        measured = validator.measure(drafter, self.interrupts.check_alone)
        self._add({"step": step, key: [each.as_line() for each in measured]})
        words = ", ".join(f"{each.length:.3f} at T = {each.temperature:g}{_claim(each, begun)}" for each in measured)
        bar.note(f"step {step}: mean acceptance length {words} (bonus counted, K = {measured[0].k}{over})")
        if begun is not None:
            check_begun(measured, begun)
        for each in measured:
            if each.token_by_token is not None:
                name, shares = each.token_by_token
                bar.note(f"step {step}: {name.strip()}: {shares}{_accuracy(self.last)}")
            if each.parted is not None:
                bar.note(f"step {step}: {each.parted}")
        return measured

    @property
    def _begun(self) -> Path | None:
        """Where the draft was trained that is being decoded with; None once it is another."""
        source = self.work.start.source
        first = self._trainer.step == 0 and self.work.recipe.draft.init is not None
        return source.path if first and source is not None else None

    def _keep_best(self) -> None:
        path = self.work.workspace.best / checkpoint.step_name(self._trainer.step)
        if not path.exists():  # a run that goes on comes to the same weights again
            with checkpoint.new_directory(path) as temporary:
                checkpoint.save_model(temporary, dict(self.work.whole.named_parameters()), self.work.config)

    def _save(self) -> None:
        trainer, place = self._trainer, self.work.workspace
        cursor = trainer.cursor
        self.progress = replace(
            self.progress,
            step=trainer.step,
            epoch=cursor.epoch,
            index=cursor.index,
            metrics_bytes=0 if self._metrics is None else self._metrics.length,
        )
        keep = self.work.recipe.checkpoint.keep
        checkpoint.save(
            place.checkpoints,
            trainer.model,
            self.work.config,
            trainer.optimiser,
            self.progress,
            keep,
            self.work.identity,
            self._world,
        )
        self.saved = trainer.step
        if not self._world.leads:
            return
        # Best weights that no checkpoint speaks of will not be gone back to.
        named = {each.best_step for each in checkpoint.all_progress(place.checkpoints)} | {self.progress.best_step}
        checkpoint.prune(place.best, {step for step in named if step is not None})

    def _restore(self, path: Path) -> None:
        _, identity = checkpoint.read_state(path)
        ours = dict(self.work.identity)
        for key in ours:
            if identity.get(key) != ours[key]:
                raise UsageError(
                    f"--resume: {key} differs: {_brief(ours[key])} now, {_brief(identity.get(key))} before; set it "
                    "back, or begin anew with --force"
                )
        self.progress = checkpoint.load(path, self._trainer.model, self._trainer.optimiser)
        self._trainer.step = self.saved = self.progress.step
        self._trainer.cursor = Cursor(self.progress.epoch, self.progress.index)
        self.say(f"going on after step {self.progress.step}")


def _claim(measured: Measured, source: Path | None) -> str:
    said = None if source is None else claimed(measured, source)
    return "" if said is None else f" ({FACTS}: {said:.3f})"


def _accuracy(last: Step | None) -> str:
    """Of the last step of training, at every step of the chain."""
    return "" if last is None else f"; each by itself in the last batch: {in_a_row(last.accuracy)}"


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
