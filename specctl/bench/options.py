"""What a benchmark is told besides how to run models and decode: frozen values, no torch."""

from __future__ import annotations

from dataclasses import dataclass

BASELINES = ("plain", "transformers")


@dataclass(frozen=True)
class BenchOptions:
    """baselines: "plain" is measured anyway. sweep_k: the draft lengths to measure, in place of one. anatomy, trace:
    also find out where a step's time goes, and what became of every draft. passes: time bare passes, for c, v and u.
    assisted: let transformers use the drafts as well."""

    baselines: tuple[str, ...] = ("plain",)
    repeats: int = 3
    sweep_k: tuple[int, ...] = ()
    anatomy: bool = False
    trace: bool = False
    passes: bool = True
    assisted: bool = True
