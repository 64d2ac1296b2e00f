"""Where a recipe's draft begins: one table of kinds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from specctl.checkpoint import Checkpoint
from specctl.errors import UsageError
from specctl.finetune.data import DataSet
from specctl.finetune.start import Start
from specctl.finetune.start_heads import plan_eagle3, plan_mtp
from specctl.finetune.start_llama import plan_llama
from specctl.finetune.vocabulary import DraftVocabulary, choose
from specctl.models import CommonConfig, read_config
from specctl.schemas.recipe import Recipe
from specctl.text.tokenizer import Tokenizer, eos_ids


def plan_start(recipe: Recipe, target: Checkpoint, tokenizer: Tokenizer | None, data: DataSet | None) -> Start:
    """What a recipe's `draft` comes to; no weights are read. tokenizer: the target's. data: None when it is not read
    yet; a reduced vocabulary is then of the right size only.

    Raises UsageError naming the key, CheckpointError and IncompatiblePair for an init that cannot be used.
    """
    if recipe.kind == "llama":
        return plan_llama(recipe.draft, target, tokenizer)
    vocabulary = _vocabulary(recipe, target, tokenizer, data)
    ids_V = None if vocabulary is None else vocabulary.ids_V
    start = (plan_mtp if recipe.kind == "mtp" else plan_eagle3)(recipe.draft, target, ids_V)
    if vocabulary is not None:
        start = replace(start, notes=(vocabulary.words,))
    if recipe.loss.feature > 0:
        _check_width(recipe, start.skeleton().width, _config(target).hidden_size)
    return start


def _vocabulary(
    recipe: Recipe, target: Checkpoint, tokenizer: Tokenizer | None, data: DataSet | None
) -> DraftVocabulary | None:
    """The tokens that the draft can say; None when these are all of the target's."""
    if recipe.draft.init is not None:  # it has one of its own
        return None
    size, rows = recipe.draft.vocab_size, _config(target).vocab_size
    if size is None or size == rows:
        return None
    if size > rows:
        raise UsageError(f"draft.vocab_size is {size}, {recipe.target} has {rows} tokens; expected at most that")
    ends = eos_ids(target.config, target.generation_config, None if tokenizer is None else tokenizer.eos_id)
    added = () if tokenizer is None else tokenizer.added_ids
    return choose([] if data is None else data.train, size, rows, _within(ends, rows), _within(added, rows))


def _config(target: Checkpoint) -> CommonConfig:
    return read_config(target.config, str(target.path / "config.json"))


def _check_width(recipe: Recipe, width: int, target: int) -> None:
    if width != target:
        raise UsageError(
            f"loss.feature compares hidden states number by number, those of {recipe.draft.init} have {width} numbers "
            f"and those of {recipe.target} {target}; leave it out"
        )


def _within(ids: Collection[int], rows: int) -> list[int]:
    return sorted(index for index in ids if index < rows)
