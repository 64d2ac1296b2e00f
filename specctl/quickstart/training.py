"""The draft of quickstart: a head that reads what the target leaves on its way and scores a part of its vocabulary,
trained on the target's own answers to the prompts of the domain.

What it runs is `finetune` with a recipe that is kept beside the draft, to be used again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specctl.checkpoint import Checkpoint
from specctl.finetune.options import RunOptions
from specctl.finetune.run import run
from specctl.heads.vocabulary import D2T, T2D
from specctl.options import ModelOptions
from specctl.output import to_json
from specctl.pair import Target
from specctl.prompts import Prompt
from specctl.quickstart.plan import EPOCHS, TOGETHER
from specctl.schemas.recipe import SCHEMA, Recipe

DRAFT, RECIPE, TRAINING, VALIDATION = "draft", "recipe.yaml", "training.jsonl", "validation.jsonl"
PICTURE = "training.png"

VOCABULARY = 4096
"""Tokens that the head can say: those of a narrow domain, at a fraction of the cost of scoring them all."""

VALIDATED = 8  # prompts: as many as validation decodes at once
K = 3


@dataclass(frozen=True)
class Trained:
    """words: what the draft is. parameters: of it; answers, labels: how many, and their tokens, that it learned from;
    steps: of the optimiser. length: mean acceptance length at K on the prompts of validation."""

    words: str
    parameters: int
    answers: int
    labels: int
    steps: int
    length: float


def train(
    target: Target,
    prompts: list[Prompt],
    validation: list[Prompt],
    max_tokens: int,
    model: ModelOptions,
    directory: Path,
    say: Callable[[str], None],
) -> Trained:
    """Leave the draft, and all that it was made from, in the directory."""
    (directory / TRAINING).write_text(_jsonl(prompts), encoding="utf-8")
    (directory / VALIDATION).write_text(_jsonl(validation), encoding="utf-8")
    recipe = _recipe(target, max_tokens, directory)
    values = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
    (directory / RECIPE).write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    result = run(recipe, RunOptions(model=model), say)
    assert result is not None, "one process trains"
    workspace = directory / f"{DRAFT}.run"
    (workspace / PICTURE).replace(directory / PICTURE)
    shutil.rmtree(workspace)
    draft = Checkpoint(directory / DRAFT)
    return Trained(
        words=f"an EAGLE-3 head of one layer that can say {recipe.draft.vocab_size:,} tokens",
        parameters=sum(draft.info(name).num_parameters for name in draft.names() if name not in (D2T, T2D)),
        answers=len(result.data.train),
        labels=result.data.label_tokens,
        steps=len(result.losses),
        length=result.acceptance[0].length,
    )


def _recipe(target: Target, max_tokens: int, directory: Path) -> Recipe:
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "eagle3",
        "target": target.name,
        "output": str(directory / DRAFT),
        "epochs": EPOCHS,
        "data": {
            "train": str(directory / TRAINING),
            "held_out": str(directory / VALIDATION),
            "completions": "chat" if target.tokenizer is not None and target.tokenizer.has_chat_template else "plain",
            "regenerate": {"temperature": 0.0, "max_tokens": max_tokens, "batch": TOGETHER},
        },
        "draft": {"vocab_size": min(VOCABULARY, target.model.config.vocab_size)},
        "loss": {"steps": K},
        "optimiser": {"lr": 1e-3, "warmup_steps": 15, "weight_decay": 0.1, "tokens_per_batch": 1024},
        "validation": {
            "every_steps": 1000,  # at the end: what is decoded in between is lost for training
            "prompts": VALIDATED,
            "k": K,
            "max_tokens": max_tokens,
            "temperatures": [0.0],
        },
    }
    return Recipe.model_validate(values)


def _jsonl(prompts: list[Prompt]) -> str:
    lines = []
    for prompt in prompts:
        asked: dict[str, Any] = {"id": prompt.id}
        if prompt.messages is not None:
            asked["messages"] = [message.as_dict() for message in prompt.messages]
        else:
            asked["prompt"] = prompt.prompt
        lines.append(to_json(asked, indent=None) + "\n")
    return "".join(lines)
