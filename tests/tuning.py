"""What the tests of tune share: the command on values in place of files, and what it told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import Run
from handmade import profile, write_json, write_yaml

from specctl.checkpoint import Checkpoint
from specctl.digest import tensors_sha
from specctl.schemas.profile import Profile
from specctl.schemas.trace import Trace
from specctl.tune.acceptance import Acceptance
from specctl.tune.costs import StepCosts
from specctl.tune.evidence import from_trace

# Case TU1's profile: verification is nearly free alone and dear in company.
TU1 = profile({1: [10.0, 10.2, 10.4, 10.6, 10.8], 32: [14.0, 24, 33, 42, 51]}, {1: 1.0, 32: 4.0})

FREE = profile({1: [10, 10.2, 10.4, 10.6, 10.8, 11.0]}, {1: 0.5})

Tune = Callable[..., Any]
Ask = Callable[..., Any]


def tuner(run: Run, tmp_path: Path) -> Tune:
    """tune(profile, trace or number, ...) is `specctl tune` on files of these."""

    def command(profile: dict[str, Any], acceptance: object, *more: object) -> Any:
        file = write_yaml(tmp_path / "P.yaml", profile)
        if isinstance(acceptance, dict):
            acceptance = write_json(tmp_path / "T.json", acceptance)
        return run("tune", "--profile", file, "--acceptance", acceptance, "--output", tmp_path / "Y.yaml", *more)

    return command


def asker(run: Run, tmp_path: Path) -> Ask:
    """ask(text or value, flags) is `specctl tune` on a file with that in it."""

    def tuned(given: object, *more: object, name: str = "A") -> Any:
        file = tmp_path / name
        file.write_text(given if isinstance(given, str) else json.dumps(given), encoding="utf-8")
        path = write_yaml(tmp_path / "P.yaml", FREE)
        out = tmp_path / "Y.yaml"
        return run("tune", "--profile", path, "--acceptance", file, "--output", out, "--json", "--force", *more)

    return tuned


def told(ran: Any) -> dict[str, Any]:
    assert ran.code == 0, ran.err
    value: dict[str, Any] = json.loads(ran.out)
    return value


def places(value: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What was decided, by batch."""
    return {place["batch"]: place for place in value["places"]}


def by_k(place: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {candidate["k"]: candidate for candidate in place["candidates"]}


def costs(value: dict[str, Any]) -> StepCosts:
    return StepCosts(Profile.model_validate(value), "P.yaml")


def acceptance_of(value: dict[str, Any]) -> Acceptance:
    return from_trace(Trace.model_validate(value), "T.json").acceptance


def of_pair(model: Path, draft: Path | None, **more: Any) -> dict[str, Any]:
    """The profile of a real pair with times by hand: verification is free, so that drafting pays."""
    drafter = {"kind": "ngram", "digest": None, "max_k": None}
    if draft is not None:
        drafter = {"kind": "llama", "digest": tensors_sha(Checkpoint(draft)), "max_k": None}
    return profile(
        {1: [10.0] * 5, 4: [10.0] * 5},
        None if draft is None else {1: 0.01, 4: 0.01},
        model={"name": "t", "digest": tensors_sha(Checkpoint(model))},
        drafter=drafter,
        **more,
    )
