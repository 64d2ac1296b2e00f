"""A fine-tuning run: from a recipe to a draft's directory, interrupted and gone on with wherever it may be.

Here the parts are put together; what happens then is specctl/finetune/session.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from specctl.attention.dense import DenseAttention
from specctl.checkpoint import Checkpoint
from specctl.digest import tensors_sha
from specctl.drafts.llama import LlamaDrafter
from specctl.errors import UsageError
from specctl.finetune.data import DataSet, load_examples
from specctl.finetune.interrupt import Interrupts
from specctl.finetune.memory import anonymous
from specctl.finetune.options import RunOptions
from specctl.finetune.plan import keeps_hidden, make_feed, make_plan, training_dtype
from specctl.finetune.regenerate import Regenerator
from specctl.finetune.result import target_identity
from specctl.finetune.session import Session, TrainingResult, Work
from specctl.finetune.start import Start, build, plan_start
from specctl.finetune.validation import Validator
from specctl.finetune.workspace import Workspace
from specctl.hub import locate
from specctl.pair import Target, has_tokenizer, open_target, resolve_device
from specctl.schemas.recipe import Recipe
from specctl.text.tokenizer import Tokenizer
from specctl.train.gradients import trainable
from specctl.train.hidden_store import HiddenStates, HiddenStore
from specctl.train.loop import Trainer
from specctl.train.losses import Objective
from specctl.train.optimiser import Optimiser, Schedule

Say = Callable[[str], None]


def run(recipe: Recipe, options: RunOptions, say: Say) -> TrainingResult:
    """Train and write. Raises KeyboardInterrupt when interrupted, everything saved; SpecctlError as its parts do."""
    if recipe.output is None:
        raise UsageError("the recipe names no output; give output, or --output DIR")
    if options.model.threads is not None:
        torch.set_num_threads(options.model.threads)
    workspace = Workspace(Path(recipe.output))
    with workspace.begin(resume=options.resume, force=options.force):
        work = _prepare(recipe, options, workspace, say)
        interrupts = Interrupts()
        with interrupts.caught(say):
            session = Session(work, interrupts, say)
            session.train()
        return session.write(force=options.force)


class _Models:
    """The recipe's target: its files, and its weights once somebody needs them."""

    def __init__(self, recipe: Recipe, options: RunOptions) -> None:
        self._recipe = recipe
        self._options = options
        self.checkpoint = Checkpoint(locate(recipe.target))
        path = self.checkpoint.path
        self.tokenizer = Tokenizer(path) if has_tokenizer(path) else None

    @cached_property
    def target(self) -> Target:
        return open_target(self._recipe.target, self._options.model)

    @cached_property
    def identity(self) -> str:
        return target_identity(self.checkpoint) or str(self.checkpoint.path)


def _prepare(recipe: Recipe, options: RunOptions, workspace: Workspace, say: Say) -> Work:
    """Read the data, see that the machine can hold the run, and build what is trained."""
    models = _Models(recipe, options)
    base = anonymous()
    regenerator = None
    if recipe.data.regenerate is not None:
        regenerator = Regenerator(
            models.target, recipe.data.regenerate, workspace.answers, models.identity, recipe.seed, say
        )
    data = load_examples(recipe, models.tokenizer, regenerator, say)
    start = plan_start(recipe.draft, models.checkpoint, models.tokenizer)
    plan = make_plan(recipe, options, data, start, models.checkpoint, base)
    plan.check()
    _check_ids(data, start)
    say(f"draft: {start.words}, {plan.parameters / 1e6:,.1f} M parameters; {plan.steps} steps, {plan.labels} labels")
    validator = None
    if data.held_out:
        validator = Validator.of(models.target, data.held_out, recipe.validation, recipe.seed, say)
    if validator is None:
        say("nothing is held out: there is no validation, and the last state is the one that is written")
    teacher = _teacher(recipe, models, data, workspace, plan.epochs)
    return Work(
        recipe=recipe,
        workspace=workspace,
        data=data,
        start=start,
        plan=plan,
        trainer=_trainer(recipe, options, models, data, start, plan.steps, teacher),
        target=models.checkpoint,
        validator=validator,
        store=teacher if isinstance(teacher, HiddenStore) else None,
        identity=_identity(recipe, options, data, start, models.identity),
        config=start.config | {"dtype": str(training_dtype(options)).removeprefix("torch.")},
    )


def _trainer(
    recipe: Recipe,
    options: RunOptions,
    models: _Models,
    data: DataSet,
    start: Start,
    steps: int,
    teacher: HiddenStates | None,
) -> Trainer:
    """Before its first step."""
    device = resolve_device(options.model.device)
    settings = recipe.optimiser
    model = trainable(build(start, recipe.seed, training_dtype(options), device), settings.checkpointing)
    drafter = LlamaDrafter(model, start.vocab_size)
    drafter.attn = DenseAttention()
    head = None if teacher is None else models.target.model.logits
    betas = (settings.betas[0], settings.betas[1])
    return Trainer(
        model=model,
        drafter=drafter,
        objective=Objective(**recipe.loss.model_dump(), teacher_head=head),
        optimiser=Optimiser(
            model, betas=betas, eps=settings.eps, weight_decay=settings.weight_decay, clip=settings.clip
        ),
        schedule=Schedule(
            settings.lr,
            steps,
            settings.schedule,
            settings.warmup_steps,
            settings.decay_fraction,
            settings.min_lr_ratio,
        ),
        feed=make_feed(recipe, data),
        teacher=teacher,
        autocast=torch.bfloat16 if settings.autocast else None,
    )


def _teacher(recipe: Recipe, models: _Models, data: DataSet, workspace: Workspace, epochs: int) -> HiddenStates | None:
    if recipe.loss.kl == 0 and recipe.loss.tv == 0:
        return None
    if keeps_hidden(recipe, epochs):
        return HiddenStore(models.target.model, data.train, workspace.hidden, models.identity)
    return HiddenStates(models.target.model, data.train)


def _check_ids(data: DataSet, start: Start) -> None:
    for example in data.train:
        if example.ids and max(example.ids) >= start.vocab_size:
            raise UsageError(
                f"example {example.id} has token {max(example.ids)}, draft and target share {start.vocab_size} ids; "
                "start from a draft with the target's vocabulary"
            )


def _identity(recipe: Recipe, options: RunOptions, data: DataSet, start: Start, target: str) -> dict[str, Any]:
    """What has to be the same for a run to go on as if nothing had happened, by name."""
    values = recipe.model_dump(mode="json", exclude={"schema_", "provenance", "output", "checkpoint", "target"})
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= {f"{key}.{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {key: value}
    started = None if start.source is None else tensors_sha(start.source)
    more = {
        "target": target,
        "data": data.sha,
        "the draft's start": started,
        "--dtype": options.model.dtype,
    }
    return flat | more
