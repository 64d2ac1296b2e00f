"""The gate `compatible`: the pair opens, its weights are numbers, and draft and policy were made for each other.

Faults of the pair become checks that failed. What is no pair at all (no such directory, a target that cannot be read)
is an error as in every other command.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from specctl.bench.passes import BareModel
from specctl.bench.work import Request
from specctl.checkpoint import Checkpoint
from specctl.convert_mtp.facts import config_sha
from specctl.convert_mtp.source import FACTS
from specctl.digest import tensors_sha
from specctl.errors import CheckpointError, IncompatiblePair, UsageError
from specctl.hub import locate
from specctl.options import DecodingOptions
from specctl.pair import OpenedDraft, Target, open_draft, open_policy
from specctl.schemas.base import read_document
from specctl.schemas.draft import DraftFile
from specctl.schemas.policy import check_bound, read_policy
from specctl.schemas.validation import Check, GateResult
from specctl.validate.verdicts import held, result

WITHOUT_WEIGHTS = ("ngram", "mtp")


@dataclass(frozen=True)
class Opened:
    """draft: None when it does not fit the target, as `checks` say."""

    draft: OpenedDraft | None
    checks: list[Check]

    @property
    def gate(self) -> GateResult:
        return result("compatible", self.checks)


def open_pair(target: Target, name: str, decoding: DecodingOptions) -> Opened:
    """Everything that can be told before a prompt is read. Raises CheckpointError when there is no such draft,
    UsageError for a policy that cannot be read."""
    if name not in WITHOUT_WEIGHTS:
        locate(name)
    if decoding.policy is not None:
        read_policy(decoding.policy)
    try:
        draft = open_draft(name, target)
    except (IncompatiblePair, CheckpointError) as error:
        return Opened(None, [held("opens", None, False, str(error))])
    says = f"{name} ({draft.drafter.kind}) drafts for {target.name}" + "".join(f"; {note}" for note in draft.notices)
    checks = [held("opens", None, True, says), _finite("target weights", target.checkpoint, target.dtype)]
    if draft.checkpoint is not None and draft.checkpoint is not target.checkpoint:
        checks.append(_finite("draft weights", draft.checkpoint, target.dtype))
        checks += _made_for(target, draft.checkpoint)
    checks += _policy(target, draft, decoding)
    return Opened(draft if all(check.status == "pass" for check in checks) else None, checks)


def scores_are_numbers(target: Target, request: Request) -> Check:
    """After the first prompt; weights that are numbers can still overflow."""
    text = request.token_ids
    found = bool(torch.isfinite(BareModel.of_target(target, len(text)).logits_after(text)).all())
    state = "numbers" if found else f"not all numbers: try another --dtype than {str(target.dtype).split('.')[-1]}"
    return held("scores", None, found, f"the target's scores after prompt {request.id} are {state}")


def _finite(what: str, checkpoint: Checkpoint, dtype: torch.dtype) -> Check:
    bad = list(_not_numbers(checkpoint, dtype))
    count = len(checkpoint.names())
    says = f"all {count} tensors of {checkpoint.path} are numbers"
    if bad:
        says = f"tensor {bad[0]} of {checkpoint.path} holds NaN or infinity ({len(bad)} of {count} tensors do)"
    return held(what, None, not bad, says)


def _not_numbers(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[str]:
    """Tensors with a value that `dtype` cannot hold."""
    most = torch.finfo(dtype).max
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        if tensor.is_floating_point() and tensor.numel():
            ends = [float(end) for end in torch.aminmax(tensor)]
            if not all(math.isfinite(end) and abs(end) <= most for end in ends):
                yield name


def _made_for(target: Target, draft: Checkpoint) -> Iterator[Check]:
    """What the draft's specctl.json says of its target, if it says anything."""
    path = draft.path / FACTS
    if not path.exists():
        return
    try:
        said = read_document(path, DraftFile).target
    except UsageError as error:
        yield held(FACTS, None, False, str(error))
        return
    if said is None:
        return
    name = said.name or "a target"
    for what, recorded, found in (
        ("tensors_sha", said.tensors_sha, tensors_sha(target.checkpoint) if said.tensors_sha else None),
        ("config_sha", None if said.tensors_sha else said.config_sha, config_sha(target.checkpoint.path)),
    ):
        if recorded is not None and found is not None:
            same = recorded == found
            says = f"{path} names {name} with {what} {recorded[:12]}, {target.name} has {found[:12]}"
            yield held(what, None, same, says)


def _policy(target: Target, draft: OpenedDraft, decoding: DecodingOptions) -> Iterator[Check]:
    if decoding.policy is None:
        open_policy(decoding, target, draft)
        return
    policy = read_policy(decoding.policy)
    shas = [None if c is None else tensors_sha(c) for c in (draft.checkpoint, target.checkpoint)]
    try:
        notices = check_bound(policy, decoding.policy, draft.drafter.kind, *shas)
        open_policy(decoding, target, draft)
    except UsageError as error:
        yield held("policy", None, False, str(error))
        return
    yield held("policy", None, True, "; ".join(notices) or f"{decoding.policy} was made for this draft and target")
