"""Pairs of every family for tests that hold for all: a Llama with a second model that drafts, and a DeepSeek whose
MTP layer does. Their text is random, or that of an exact table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tiny
import tiny_mtp
from decoding import llama_draft, model, mtp_draft
from fixtures import Make

from specctl.drafts import Drafter
from specctl.drafts.llama import LlamaDrafter
from specctl.drafts.mtp import Mtp, mtp_drafter

FAMILIES = ("llama", "deepseek_v3", "deepseek_v2")


@dataclass(frozen=True)
class Pair:
    """plain: the target without anything that drafts, as transformers loads it. drafter: a new one at every call."""

    target: Path
    plain: Path
    drafter: Callable[[], Drafter]


def table(make: Make, family: str, rows: tiny.Rows, **more: Any) -> Path:
    if family == "llama":
        return make(tiny.table, rows=rows, **more)
    return make(tiny.deepseek_table, rows=rows, model_type=family, **more)


def tables(make: Make, family: str, rows: tiny.Rows, draft: tiny.Rows, **more: Any) -> Pair:
    """A target that says what `rows` say, and what drafts says what `draft` says. more: of the tables."""
    target, other = (table(make, family, each, **more) for each in (rows, draft))
    if family == "llama":
        vocab = more.get("vocab", tiny.VOCAB)
        return Pair(target, target, lambda: LlamaDrafter(model(other), vocab))
    both = make(tiny_mtp.table, of=target, draft=other)
    return Pair(both, target, lambda: mtp_drafter(_layer(both)))


def texts(make: Make, family: str, **config: Any) -> Pair:
    """A random target and what is sometimes right about it. config: of the target."""
    if family == "llama":
        target = make(tiny.llama, seed=1, **config)
        return Pair(target, target, lambda: llama_draft(make(tiny.near, of=target)))
    more = {"model_type": family, "num_hidden_layers": 1, "first_k_dense_replace": 0, "rope_scaling": None} | config
    plain = make(tiny.deepseek, seed=1, **more)
    both = make(tiny_mtp.mtp, of=plain)
    return Pair(both, plain, lambda: mtp_drafter(_layer(both)))


@cache
def _layer(path: Path) -> Mtp:
    layer = mtp_draft(path).model
    assert isinstance(layer, Mtp)
    return layer
