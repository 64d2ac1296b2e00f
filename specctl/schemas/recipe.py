"""RECIPE.yaml: everything that decides what a fine-tuning run makes. It knows nothing about the machine it runs on.

Each flag of `finetune` that belongs to the result is a key here; `--set a.b=value` reaches every key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from specctl.errors import UsageError
from specctl.schemas.base import Checked, Document, Number, explain, read_mapping

SCHEMA = "specctl.recipe/1"
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Ratio = Annotated[Number, Field(ge=0, le=1)]
Betas = Annotated[list[Annotated[Number, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]
Temperatures = Annotated[list[NotNegative], Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]
Kind = Literal["llama", "mtp", "eagle3"]
CHAIN = 3  # steps
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class Regenerate(Checked):
    """Answers of the target in place of the data's own. batch: sequences decoded at a time."""

    temperature: NotNegative = 0.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    max_tokens: Count = 512
    batch: Count = 16


class Data(Checked):
    """train: a file (jsonl, json, parquet), a hub data set `org/name[:split]`, or a list of them. held_out: the same,
    for validation. held_out_fraction: of the training rows when held_out names nothing; null: 0.05 from 100 rows on,
    and none of fewer. max_length: longest example in tokens; on_long: what becomes of a longer one. completions:
    whether a prompt and its completion are a user's turn and the answer by the chat template, where there is one, or
    plain text."""

    train: Name | Annotated[list[Name], Field(min_length=1)]
    held_out: Name | None = None
    held_out_fraction: Annotated[Number, Field(ge=0, lt=1)] | None = None
    max_length: Annotated[int, Field(ge=2)] = 2048
    on_long: Literal["trim", "skip"] = "trim"
    completions: Literal["chat", "plain"] = "chat"
    regenerate: Regenerate | None = None

    @property
    def sources(self) -> list[str]:
        return [self.train] if isinstance(self.train, str) else list(self.train)


class Draft(Checked):
    """Where the draft's weights come from, and for a head what it is.

    llama: init, a checkpoint; or layers, chosen ones of the target (from 0); or width and depth (and heads,
    intermediate), from scratch; none of them: a quarter of the target's layers, the first and the last among them. tie:
    whether embedding and head are one; null: as the start has it. The vocabulary is the target's.

    mtp, eagle3: init, a head; else random weights. vocab_size: the tokens it can say, the most frequent labels, null:
    all of the target's. mtp: layers, one of the target's whose weights its decoder layer begins with. eagle3: heads and
    intermediate in place of the target's; taps, the residuals it reads (tap k enters layer k), null: the published
    three; norm_before_residual, norm_before_fc, fc_norm, norm_output: variants that not every engine reads.
    """

    init: Name | None = None
    layers: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    width: Count | None = None
    depth: Count | None = None
    heads: Count | None = None
    intermediate: Count | None = None
    tie: bool | None = None
    vocab_size: Count | None = None
    taps: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def check(self, kind: Kind) -> None:
        """Raises ValueError naming a key that means nothing for a draft of this kind."""
        foreign = {
            "llama": ("vocab_size", "taps", *VARIANTS),
            "mtp": ("width", "depth", "heads", "intermediate", "tie", "taps", *VARIANTS),
            "eagle3": ("layers", "width", "depth", "tie"),
        }[kind]
        given = [key for key in foreign if key in self.model_fields_set and getattr(self, key) not in (None, False)]
        if given:
            raise ValueError(f"draft.{given[0]} means nothing for a draft of kind {kind}; leave it out")
        if kind == "llama":
            self._check_start()
        elif kind == "mtp" and self.layers is not None and len(self.layers) > 1:
            raise ValueError(f"draft.layers names {len(self.layers)} layers, an MTP draft has one")
        if self.taps is not None and sorted(set(self.taps)) != self.taps:
            raise ValueError(f"draft.taps is {self.taps}, expected rising numbers")

    def _check_start(self) -> None:
        scratch = [key for key in ("width", "depth", "heads", "intermediate") if getattr(self, key) is not None]
        starts = [key for key in ("init", "layers") if getattr(self, key) is not None] + scratch[:1]
        if len(starts) > 1:
            raise ValueError(
                f"draft has {' and '.join(starts)}; a draft starts from one of init, layers, and width and depth"
            )
        if scratch and (self.width is None or self.depth is None):
            raise ValueError(f"draft has {scratch[0]}; a draft from scratch needs both width and depth")


class Loss(Checked):
    """Weights of cross-entropy to the data, forward KL to the target, and total variation from it; temperature of both
    distributions in the last two; chunk: tokens whose logits are held at a time. average: over all labels of a step, or
    over its examples, each of which then counts the same. steps: of a head's chain (3 where it is not said), each
    weighted by decay against the one before. feature: of a head, weight of the smooth L1 distance between what it gives
    its output head and what the target gives its own for the same token."""

    ce: NotNegative = 1.0
    kl: NotNegative = 0.0
    tv: NotNegative = 0.0
    feature: NotNegative = 0.0
    temperature: Positive = 1.0
    chunk: Count = 1024
    average: Literal["labels", "examples"] = "labels"
    steps: Annotated[int, Field(ge=1, le=16)] = 1
    decay: Annotated[Number, Field(gt=0, le=1)] = 0.8

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.ce + self.kl + self.tv + self.feature == 0:
            raise ValueError("ce, kl, tv and feature are all 0; at least one has to be above")
        return self


class Hidden(Checked):
    """What the target leaves in the rows that are trained on. keep: on the disk, computed once; null: where it is asked
    for more than once and takes no more than 8 GiB. directory: for other runs to find again; null: the run's own, which
    goes with it. format: float8 has a scale for every row."""

    keep: bool | None = None
    directory: Name | None = None
    format: Literal["target", "bfloat16", "float8"] = "target"

    @model_validator(mode="after")
    def _kept(self) -> Self:
        if self.keep is False and (self.directory is not None or self.format != "target"):
            raise ValueError("keep is false, so nothing has a directory or a format; leave these out")
        return self


class Optimiser(Checked):
    """AdamW. schedule: of the learning rate, by optimiser steps: after warmup_steps it falls to min_lr_ratio as a
    cosine or linearly, or (wsd) stays and falls linearly over the last decay_fraction. tokens_per_batch: room of a
    packed row, null: 2048 or max_length, whichever is more; accumulate: packed rows a step. clip: largest norm of the
    gradient."""

    lr: Positive = 1e-4
    betas: Betas = Field(default_factory=lambda: [0.9, 0.95])
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.01
    schedule: Literal["cosine", "wsd", "linear"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    decay_fraction: Annotated[Number, Field(gt=0, le=1)] = 0.2
    min_lr_ratio: Ratio = 0.1
    tokens_per_batch: Annotated[int, Field(ge=2)] | None = None
    accumulate: Count = 1
    clip: Positive | None = 1.0
    checkpointing: bool = False
    autocast: Literal["bfloat16"] | None = None


class Validation(Checked):
    """The engine decodes `prompts` held-out prompts with k drafted tokens, at each of the temperatures, every
    `every_steps` steps and at the end. patience: validations without a better acceptance before training stops; null:
    it never does."""

    every_steps: Count = 100
    prompts: Count = 16
    k: Count = 3
    max_tokens: Count = 64
    temperatures: Temperatures = Field(default_factory=lambda: [0.0, 1.0])
    patience: Count | None = None


class Saving(Checked):
    """A checkpoint to resume from every so many optimiser steps, of which the last `keep` stay."""

    every_steps: Count = 100
    keep: Count = 2


class Recipe(Document):
    """kind: of the draft. output: the directory to write. epochs, max_steps: training ends with the first that is
    reached; neither given: one epoch; max_steps alone: as many epochs as it takes."""

    schema_: Literal["specctl.recipe/1"] = Field(alias="schema", default="specctl.recipe/1")
    kind: Kind
    target: Name
    output: Name | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    epochs: Count | None = None
    max_steps: Count | None = None
    data: Data
    draft: Draft = Draft()
    loss: Loss = Loss()
    hidden: Hidden = Hidden()
    optimiser: Optimiser = Optimiser()
    validation: Validation = Validation()
    checkpoint: Saving = Saving()

    @model_validator(mode="before")
    @classmethod
    def _chain(cls, values: Any) -> Any:
        """A head whose recipe says nothing is trained for as many steps as are drafted by default."""
        if not isinstance(values, dict) or values.get("kind") not in ("mtp", "eagle3"):
            return values
        loss = values.get("loss", {})
        return values | {"loss": {"steps": CHAIN} | loss} if isinstance(loss, dict) else values

    @model_validator(mode="after")
    def _keys_of_the_kind(self) -> Self:
        self.draft.check(self.kind)
        if self.kind == "llama" and self.loss.steps > 1:
            raise ValueError("loss.steps means nothing for a draft of kind llama, which has no chain; leave it out")
        if self.kind == "llama" and self.loss.feature > 0:
            raise ValueError(
                "loss.feature means nothing for a draft of kind llama, whose hidden states are its own; leave it out"
            )
        return self

    @property
    def reads_hidden(self) -> bool:
        """Whether the draft reads what the target leaves, not only its tokens."""
        return self.kind != "llama"

    @property
    def num_epochs(self) -> int | None:
        """None: as many as max_steps takes."""
        return 1 if self.epochs is None and self.max_steps is None else self.epochs

    @property
    def tokens_per_batch(self) -> int:
        given = self.optimiser.tokens_per_batch
        return max(2048, self.data.max_length) if given is None else given


def read_recipe(path: Path | None, flags: Mapping[str, Any], settings: Iterable[str] = ()) -> Recipe:
    """A recipe from a file, if one is named, the flags over it ({"data.train": value}, None for one not given), and
    `--set` values ("optimiser.lr=3e-4", the value as YAML) over both.

    Raises UsageError naming the file, the flag or the key that is wrong.
    """
    values = {} if path is None else deepcopy(read_mapping(path))
    for key, value in flags.items():
        if value is not None:
            _put(values, key, value, str(path))
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not all(key.split(".")):
            raise UsageError(f"--set {setting}: expected key=value, like optimiser.lr=3e-4")
        _put(values, key, _value(setting, text), f"--set {setting}")
    try:
        # A section whose keys are all commented out is null to YAML, and a default to whoever wrote it.
        return Recipe.model_validate({key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        where = "the recipe of these flags" if path is None else str(path)
        raise UsageError(f"{where}: {explain(error, Recipe)}") from None


def _put(values: dict[str, Any], key: str, value: Any, where: str) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        inner = values.get(parent)
        if inner is None:  # a key that is null, or not there: what is set under it makes it a mapping
            inner = values[parent] = {}
        if not isinstance(inner, dict):
            raise UsageError(f"{where}: {parent} is {inner!r}, which has no key {key.rpartition('.')[2]}")
        values = inner
    values[last] = value


def _value(setting: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {setting}: the value cannot be parsed: {' '.join(str(error).split())}") from None
