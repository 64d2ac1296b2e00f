"""What the command line of `tune` asks for, and which wishes contradict each other. Plain values; nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specctl.errors import UsageError
from specctl.options import Offer

NO_OFFER = Offer()


@dataclass(frozen=True)
class Wishes:
    """profile: a file or a shipped name. acceptance: a file or a number, None when it is measured; only: KEY=VALUE, the
    part of it that counts. offer: of a profile of constants. output: the policy; None only with what_if. reports: HTML
    or markdown. engine_config: a directory; draft_model: what to call the draft in it, data_parallel: engines side by
    side. mix, or arrival_rate a second: the load. quality_budget: how much lossy acceptance may change."""

    profile: str
    output: Path | None = None
    acceptance: str | None = None
    only: tuple[str, ...] = ()
    extrapolate: bool = False
    k_max: int | None = None
    mix: Path | None = None
    arrival_rate: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    max_tpot_ms: float | None = None
    max_ttft_ms: float | None = None
    quality_budget: str | None = None
    divergence: Path | None = None
    scores: Path | None = None
    save_divergence: Path | None = None
    what_if: str | None = None
    reports: tuple[Path, ...] = ()
    engine_config: Path | None = None
    draft_model: str | None = None
    data_parallel: int | None = None
    force: bool = False
    offer: Offer = NO_OFFER

    def check(self) -> None:
        """Raises UsageError for wishes that do not go together."""
        if self.output is None and self.what_if is None:
            raise UsageError("--output is missing: the POLICY.yaml to write; only --what-if goes without")
        if self.output is not None and self.output.suffix not in (".yaml", ".yml"):
            raise UsageError(f"--output {self.output}: expected a name that ends in .yaml")
        for sentence in self._contradictions():
            raise UsageError(sentence)
        files = [path.resolve() for path in (self.output, *self.reports, self.save_divergence) if path is not None]
        if len(set(files)) < len(files):
            raise UsageError("--output, --report and --save-divergence name one file twice")

    def _contradictions(self) -> Iterator[str]:
        yield from self._about_load()
        if self.acceptance is None and self.only:
            yield "--only is given without --acceptance: acceptance is measured, so there is nothing to choose from"
        if self.acceptance is None and self.extrapolate:
            yield "--extrapolate is given without --acceptance: it is measured as far as --k-max"
        if self.save_divergence is not None and (self.quality_budget is None or self.acceptance is not None):
            yield "--save-divergence is for what --quality-budget measures, with --target, --draft and --prompts"
        for flag, value in (("--divergence", self.divergence), ("--scores", self.scores)):
            if value is not None and self.quality_budget is None:
                yield f"{flag} is given without --quality-budget, which says how much may change"
        for flag, given in (("--draft-model", self.draft_model), ("--data-parallel", self.data_parallel)):
            if given is not None and self.engine_config is None:
                yield f"{flag} is given without --engine-config, which alone it concerns"

    def _about_load(self) -> Iterator[str]:
        if self.mix is not None and self.arrival_rate is not None:
            yield "--mix and --arrival-rate are both given, and each says what the load is; leave one out"
        if (self.input_tokens is None) != (self.output_tokens is None):
            yield "--input-tokens and --output-tokens belong together: give both or none"
        if self.arrival_rate is not None and self.input_tokens is None:
            yield "--arrival-rate needs --input-tokens and --output-tokens: how long a request stays decides"
