"""`profile --engine` as a command: a running engine asked and timed, PROFILE.yaml written, a table of it shown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from specctl.errors import UsageError
from specctl.output import new_file, say
from specctl.profile.base import Base
from specctl.profile.merge import gaps, merge
from specctl.profile.places import usual_batches
from specctl.profile.render import as_yaml, check_name, show, whole_table
from specctl.profile.same import Identity
from specctl.profile.served.document import Said, document, identity, measured_prefill
from specctl.profile.served.engine import Served, open_engine
from specctl.profile.served.run import CONTEXTS, Plan, make_plan, measure_engine
from specctl.profile.served.wire import Wire
from specctl.profile.whole import whole
from specctl.schemas.profile import Profile

BATCHES = (1, 2, 4, 8)
REPEATS = 5
STEPS = 32


@dataclass(frozen=True)
class EngineWishes:
    """kind: of `served.engine.KINDS`. batches, contexts None: as in `profile.command.Wishes`. forced: the mean length
    that the engine was told to accept."""

    kind: str
    url: str
    output: Path
    said: Said
    model: str | None = None
    key_file: Path | None = None
    batches: tuple[int, ...] | None = None
    contexts: tuple[int, ...] | None = None
    repeats: int | None = None
    steps: int | None = None
    forced: float | None = None
    force: bool = False
    base: Base | None = None
    same_model: bool = False


def profile_engine(wishes: EngineWishes, *, as_json: bool) -> None:
    """Measure and write. The table (or with as_json the profile) goes to stdout, all else to stderr."""
    check_name(wishes.output)
    wire = Wire.to(wishes.url, _key(wishes.key_file))
    with new_file(wishes.output, force=wishes.force) as file:
        base = None if wishes.base is None else Base(whole(wishes.base.profile, wishes.base.where), wishes.base.where)
        served = open_engine(wishes.kind, wire, wishes.model)
        _say_who(served, wishes.kind)
        plan = _plan(served, wishes, base)
        of = identity(served, wishes.said, None if base is None else base.profile)
        if base is not None:
            base.check(of, wishes.same_model, [(spot.batch, spot.context) for spot in plan.spots])
        found, notices = _measured(served, plan, wishes, of, base)
        file.write_text(as_yaml(found), encoding="utf-8")
    show(found, whole_table(found), notices, wishes.output, as_json=as_json)


def _plan(served: Served, wishes: EngineWishes, base: Base | None) -> Plan:
    """A speculating engine's first tokens tell about the draft's pass only beside those of one that does not."""
    batches = wishes.batches or usual_batches(base, BATCHES)
    usual = CONTEXTS if base is None else base.contexts
    plan = make_plan(
        served, batches, wishes.contexts, wishes.repeats or REPEATS, wishes.steps or STEPS, wishes.forced, usual
    )
    if served.speculation is None:
        return plan
    known = measured_prefill(None if base is None else base.profile)
    return replace(plan, prompts=tuple(tokens for tokens in sorted(known) if tokens < served.max_length))


def _measured(
    served: Served, plan: Plan, wishes: EngineWishes, of: Identity, base: Base | None
) -> tuple[Profile, list[str]]:
    readings = measure_engine(served, plan, say)
    found = document(served, plan, readings, of, None if base is None else base.profile)
    if base is None:
        unnamed = [] if wishes.said.hardware else ["an engine does not tell its hardware; say it with --hardware"]
        return found, [*readings.notices, *unnamed, *gaps(found)]
    merged, notices = merge(base.profile, base.where, found, wishes.same_model)
    return merged, [*readings.notices, *notices]


def _say_who(served: Served, kind: str) -> None:
    version = f" {served.version}" if served.version else ""
    drafts = "does not speculate" if served.speculation is None else "speculates"
    say(f"{served.wire.url}: {served.engine}{version} serves {served.model} and {drafts}")
    if served.engine != kind:
        say(f"note: it speaks the API of {kind} and is {served.engine}, whose steps these are")


def _key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {file}: cannot be read: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"--api-key-file {file}: has no key in it; expected one a line")
    return keys[0]
