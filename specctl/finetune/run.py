"""A fine-tuning run: from a recipe to a draft's directory, interrupted and gone on with wherever it may be.

Here the parts are put together; what happens then is specctl/finetune/session.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from specctl.checkpoint import Checkpoint
from specctl.digest import tensors_sha
from specctl.dist import ALONE, World, in_turn
from specctl.drafts import Trainable
from specctl.errors import UsageError
from specctl.finetune.data import DataSet, load_examples
from specctl.finetune.interrupt import Interrupts
from specctl.finetune.kinds import plan_start
from specctl.finetune.memory import anonymous
from specctl.finetune.options import RunOptions
from specctl.finetune.plan import chain_of, make_feed, make_plan, needs_states, training_dtype
from specctl.finetune.plan import plan as foresee
from specctl.finetune.regenerate import Regenerator
from specctl.finetune.result import target_identity
from specctl.finetune.session import Session, TrainingResult, Work
from specctl.finetune.start import Start
from specctl.finetune.states import States
from specctl.finetune.validation import Validator
from specctl.finetune.workspace import Workspace
from specctl.hub import locate
from specctl.pair import Target, has_tokenizer, open_target, resolve_device
from specctl.schemas.recipe import Recipe
from specctl.text.tokenizer import Tokenizer
from specctl.train.loop import Teacher, Trainer
from specctl.train.losses import Objective
from specctl.train.optimiser import Optimiser, Schedule
from specctl.train.sharding import ShardedDraft

Say = Callable[[str], None]
LOSSES = ("ce", "kl", "tv", "feature", "temperature", "chunk")  # keys of a recipe's loss that are the objective's


def run(recipe: Recipe, options: RunOptions, say: Say, world: World = ALONE) -> TrainingResult | None:
    """Train and write. world: whoever trains together; None is what others have than the leading process. Raises
    KeyboardInterrupt when interrupted, everything saved; SpecctlError as its parts do."""
    if recipe.output is None:
        raise UsageError("the recipe names no output; give output, or --output DIR")
    if options.model.threads is not None:
        torch.set_num_threads(options.model.threads)
    workspace = Workspace(Path(recipe.output))
    say = say if world.leads else _silent
    begun = workspace.begin(resume=options.resume, force=options.force) if world.leads else nullcontext()
    with begun:
        world.wait()  # until the place is ready
        _see_that_all_share(workspace.path, world)
        work = _prepare(recipe, options, workspace, say, world)
        interrupts = Interrupts(world)
        with interrupts.caught(say):
            session = Session(work, interrupts, say)
            session.train()
        return session.write(force=options.force)


def _see_that_all_share(directory: Path, world: World) -> None:
    """Answers, states and checkpoints are found by others than who made them. Raises UsageError in all processes where
    one does not see what another has written."""
    if world.size == 1:
        return
    mark = directory / ".shared"
    token = world.tell(secrets.token_hex(8))
    if world.leads:
        mark.write_text(token, encoding="utf-8")
    world.wait()
    apart = not mark.is_file() or mark.read_text(encoding="utf-8") != token
    apart = world.any(apart)
    if world.leads:
        mark.unlink()
    if apart:
        raise UsageError(
            f"{directory}: is not the same directory to all processes; name an --output on a disk that all nodes share"
        )


def _silent(sentence: str) -> None:
    """Of several processes one speaks."""


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


def _prepare(recipe: Recipe, options: RunOptions, workspace: Workspace, say: Say, world: World) -> Work:
    """Read the data, see that the machine can hold the run, and build what is trained. What is made once (answers, kept
    states) the leading process makes, and the others find it."""
    models = _Models(recipe, options)
    base = anonymous()
    start = plan_start(recipe, models.checkpoint, models.tokenizer, None)  # what is wrong is said before the work
    if recipe.data.regenerate is not None and not options.resume:
        foresee(recipe, options, load_examples(recipe, models.tokenizer))  # so is what would not fit
    states = States(recipe, start, workspace.hidden, models.identity, say) if needs_states(recipe) else None
    data = in_turn(world, lambda: _load(recipe, models, states, workspace, say, world))
    start = plan_start(recipe, models.checkpoint, models.tokenizer, data)
    plan = make_plan(recipe, options, data, start, models.checkpoint, base)
    plan.check()
    _check_ids(data, start)
    say(f"draft: {start.words}, {plan.parameters / 1e6:,.1f} M parameters; {plan.steps} steps, {plan.labels} labels")
    for note in start.notes:
        say(note)
    validator, first_look = _validators(recipe, models, data, say)
    teacher = None
    if states is not None:
        keep = "hidden states" in plan.disk
        teacher = in_turn(world, lambda: states.teacher(models.target, data, keep))
    trainer, whole = _trainer(recipe, options, models, data, start, plan.steps, teacher, world)
    return Work(
        recipe=recipe,
        workspace=workspace,
        data=data,
        start=start,
        plan=plan,
        trainer=trainer,
        whole=whole,
        target=models.checkpoint,
        validator=validator,
        first_look=first_look,
        identity=_identity(recipe, options, data, start, models.identity),
        config=start.config | {"dtype": str(training_dtype(options)).removeprefix("torch.")},
    )


def _validators(recipe: Recipe, models: _Models, data: DataSet, say: Say) -> tuple[Validator | None, Validator | None]:
    """Who decodes on the way; and where nothing is held out, who looks once at what a run begins with. The leading
    process does it, but it is due in all."""
    if data.held_out:
        validator = Validator.of(models.target, data.held_out, recipe.validation, recipe.seed, say)
        if validator is not None:
            return validator, None
    say("nothing is held out: there is no validation, and the last state is the one that is written")
    if recipe.draft.init is None:
        return None, None
    first_look = Validator.over_training(models.target, data.train, recipe.validation, recipe.seed)
    if first_look is None:
        say(f"{recipe.draft.init} is not decoded with before the first step: no prompt leaves room for an answer")
    return None, first_look


def _load(
    recipe: Recipe, models: _Models, states: States | None, workspace: Workspace, say: Say, world: World
) -> DataSet:
    """The data, answered by the target if that is asked for. The process that answers keeps its states on the way."""
    settings = recipe.data.regenerate
    if settings is None:
        return load_examples(recipe, models.tokenizer, say=say)
    harvest = states.harvest(models.target) if states is not None and world.leads else None
    answer = Regenerator(models.target, settings, workspace.answers, models.identity, recipe.seed, say, harvest)
    return load_examples(recipe, models.tokenizer, answer, say)


def _trainer(
    recipe: Recipe,
    options: RunOptions,
    models: _Models,
    data: DataSet,
    start: Start,
    steps: int,
    teacher: Teacher | None,
    world: World,
) -> tuple[Trainer, nn.Module]:
    """Before its first step; and the model with all its weights in one place."""
    device = resolve_device(options.model.device)
    settings = recipe.optimiser
    target = models.target.model if needs_states(recipe) else None
    model = start.build(recipe.seed, training_dtype(options), device, target)
    learner = start.learner(model, settings.checkpointing, in_place=world.size == 1)
    whole, drafter = model, cast(Trainable, learner)
    if world.size > 1:
        whole = start.build(recipe.seed, training_dtype(options), device, target) if world.leads else model
        drafter = ShardedDraft(model, learner, world)
    objective = Objective(**recipe.loss.model_dump(include=set(LOSSES)))
    if teacher is not None:
        rows_VE = start.scored_rows(models.target.dtype) if objective.compares else None
        objective = replace(
            objective,
            teacher_head=models.target.model.logits,
            teacher_rows=None if rows_VE is None else rows_VE.to(device),
        )
    betas = (settings.betas[0], settings.betas[1])
    trainer = Trainer(
        model=model,
        drafter=drafter,
        objective=objective,
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
        chain=chain_of(recipe),
        teacher=teacher,
        autocast=torch.bfloat16 if settings.autocast else None,
        world=world,
    )
    return trainer, whole


def _check_ids(data: DataSet, start: Start) -> None:
    for example in data.train:
        if example.ids and max(example.ids) >= start.vocab_size:
            raise UsageError(
                f"example {example.id} has token {max(example.ids)}, draft and target share {start.vocab_size} ids; "
                "start from a draft with the target's vocabulary, and give the target the tokenizer that belongs to it "
                "(its config.json's vocab_size is more than every id of that one)"
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
