"""Where every number of a tuning comes from, as rows of a name and what is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from specctl.schemas.base import Provenance
from specctl.schemas.profile import Profile
from specctl.tune.run import Tuning


def sources(tuning: Tuning) -> Iterator[tuple[str, str]]:
    profile, acceptance, asked = tuning.of, tuning.acceptance, tuning.asked
    here = Provenance.here()
    yield "profile", tuning.profile
    yield from _of_profile(profile)
    heat = "" if acceptance.temperature is None else f", temperature {acceptance.temperature:g}"
    yield "acceptance", acceptance.source + heat + (", i.i.d." if acceptance.iid else "")
    if acceptance.observed_k is not None:
        yield "extrapolated", f"survival beyond K = {acceptance.observed_k}, as if further tokens went on like the last"
    lengths = f", prompts of {asked.input_tokens}, answers of {asked.output_tokens}" if tuning.prefill else ""
    limits = "".join(
        f", {name} at most {value:g} ms"
        for name, value in (("a token", asked.max_tpot_ms), ("the first token", asked.max_ttft_ms))
        if value is not None
    )
    yield "settings", f"K up to {tuning.k_max}{lengths}{limits}"
    rule = tuning.policy.accept
    if rule.method in ("typical", "threshold"):
        low, high = rule.interval or [0.0, 0.0]
        yield (
            "acceptance rule",
            (f"{rule.method}, lossy: KL {rule.divergence_kl:.4g} nats a token measured ({low:.4g} - {high:.4g})"),
        )
    yield "command", here.command
    yield "made", f"{here.date}, specctl {here.specctl}"


def _of_profile(profile: Profile) -> Iterator[tuple[str, str]]:
    hardware, engine, model = profile.hardware, profile.engine, profile.model
    devices = "" if not hardware.devices else f", {hardware.devices} of them"
    yield "hardware", f"{hardware.name}{devices}"
    yield "engine", f"{engine.name} {engine.version or ''}".strip()
    yield "model", f"{model.name or 'not named'}, {model.dtype or 'dtype not told'}, tp {model.tp}, ep {model.ep}"
    draft = profile.drafter
    yield "draft", "none or not known" if draft is None else f"{draft.kind}"
    kinds = Counter(cell.source for cells in (profile.steps, profile.draft, profile.draft_follow) for cell in cells)
    spread = sorted(cell.spread / cell.ms for cell in profile.steps)
    said = ", ".join(f"{count} {source}" for source, count in kinds.most_common())
    shared = f", of which {profile.shared_spread:.1%} all alike" if profile.shared_spread else ""
    yield "step times", f"{said}; standard deviation {spread[len(spread) // 2]:.1%} of a step (median){shared}"
    if profile.provenance is not None:
        yield "profiled", f"{profile.provenance.date}, {profile.provenance.device}"
    for source in profile.sources:
        of = " ".join(part for part in (source.package, source.version, source.licence, source.url) if part)
        yield f"source of {source.numbers}", f"{source.what}{f' ({of})' if of else ''}"
    if profile.validated_against:
        errors = [abs(each.predicted_ms / each.measured_ms - 1) for each in profile.validated_against]
        yield (
            "validated",
            f"{len(errors)} measured points, mean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}",
        )
