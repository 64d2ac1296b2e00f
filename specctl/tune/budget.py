"""--quality-budget: the fastest policy among lossless acceptance and the rules whose measured change stays within
it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specctl.errors import UsageError
from specctl.schemas.divergence import Divergence, read_divergence
from specctl.tune.lossy import Budget, read_scores, rules_within
from specctl.tune.run import Tuning, run_tune
from specctl.tune.study import Workload, gain_of
from specctl.tune.wishes import Wishes


@dataclass(frozen=True)
class Lossy:
    """measures: the divergence is still to be measured. where: it is from."""

    budget: Budget
    scores: dict[str, list[float]] | None
    divergence: Divergence | None
    where: str

    @property
    def measures(self) -> bool:
        return self.divergence is None

    @classmethod
    def read(cls, wishes: Wishes, *, measures: bool) -> Lossy:
        """Raises UsageError where nothing is measured and nothing is going to be."""
        assert wishes.quality_budget is not None
        budget = Budget.parse(wishes.quality_budget)
        if wishes.divergence is None and not measures:
            raise UsageError(
                f"--quality-budget {wishes.quality_budget}: nothing tells how far lossy acceptance moves this pair; "
                "give --divergence FILE, or measure with --target, --draft and --prompts at a --temperature above 0"
            )
        divergence = None if wishes.divergence is None else read_divergence(wishes.divergence)
        scores = None if wishes.scores is None else read_scores(wishes.scores)
        return cls(budget, scores, divergence, "measured here" if divergence is None else str(wishes.divergence))

    def measured(self, divergence: Divergence) -> Lossy:
        return replace(self, divergence=divergence)


def within_budget(exact: Tuning, workload: Workload, lossy: Lossy) -> Tuning:
    """The lossless tuning, where no rule within the budget is faster over what is served."""
    assert lossy.divergence is not None
    _check_temperature(exact, lossy.divergence, lossy.where)
    rules, refused = rules_within(lossy.divergence, lossy.where, lossy.budget, lossy.scores)
    best, best_gain, name = exact, gain_of(exact, workload), "exact"
    for rule in rules:
        k_max = rule.k if exact.asked.k_max is None else min(rule.k, exact.asked.k_max)
        asked = replace(exact.asked, k_max=min(k_max, exact.k_max), rule=rule.accept, extrapolate=False)
        other = run_tune(exact.of, exact.profile, rule.evidence, lossy.where, None, asked)
        gain = gain_of(other, workload)
        if gain > best_gain * (1 + 1e-9):
            best, best_gain, name = other, gain, rule.name
    words = f"--quality-budget {lossy.budget.words()}"
    outside = f"; outside it: {'; '.join(refused)}" if refused else ""
    if best is exact:
        why = "no rule stays within it" if not rules else "no rule within it is faster"
        best.notices.append(f"{words}: {why}, so acceptance stays lossless{outside}")
        return best
    accept = best.policy.accept
    assert accept.divergence_kl is not None
    assert accept.interval is not None
    best.notices.append(
        f"{words}: LOSSY acceptance {name} is used, {best_gain:.3f} x in place of {gain_of(exact, workload):.3f} x; it "
        f"moves {accept.divergence_kl:.4g} nats a token ({accept.interval[0]:.4g} - {accept.interval[1]:.4g})"
        f"{outside}"
    )
    return best


def _check_temperature(exact: Tuning, divergence: Divergence, where: str) -> None:
    heat = exact.acceptance.temperature
    if heat is not None and abs(heat - divergence.temperature) > 1e-9:
        raise UsageError(
            f"{where}: divergence was measured at temperature {divergence.temperature:g}, acceptance at {heat:g}; they "
            "are compared, so measure both at one"
        )
