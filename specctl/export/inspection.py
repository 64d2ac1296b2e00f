"""What `inspect` tells about an EAGLE-3 head: its layout, what it reads and says, and what each engine would misread.

Nothing about a directory raises here: it becomes a finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from specctl.checkpoint import Checkpoint
from specctl.dialects import eagle3 as layouts
from specctl.drafts.eagle3_checkpoint import Stored, check_fit, notices
from specctl.errors import CheckpointError, IncompatiblePair
from specctl.export.source import TargetFacts, known_target
from specctl.models import ModelConfig, Weights
from specctl.pair import stored_head
from specctl.schemas.draft import recorded

NORM_OUTPUT = (
    "norm_output is true: engines feed the state after the last norm back into the head; some trainers mean by it that "
    "this norm stands before the output head, and feed back what was before it"
)


class Finding(NamedTuple):
    severity: Literal["error", "warning", "note"]
    what: str
    remedy: str


@dataclass(frozen=True)
class Eagle3Facts:
    """taps: as this project counts them, None where the target's number of layers would tell. norms: those of the
    variants that it has. k: drafted tokens that the layout or the recipe names."""

    layout: str
    taps: tuple[int, ...] | None
    num_taps: int
    width: int
    target_hidden: int
    heads: int
    kv_heads: int
    vocab_size: int
    draft_vocab: int
    norms: dict[str, bool]
    own_embedding: bool
    context: int
    rope: str
    rope_theta: float
    k: int | None


def inspect_eagle3(checkpoint: Checkpoint) -> tuple[Eagle3Facts | None, list[Finding]]:
    """Facts are None for a head that cannot be read."""
    said = recorded(checkpoint.path)
    try:
        target = known_target(checkpoint)
        num_layers = None if target is None else target.num_layers
        found = layouts.read(checkpoint, None if said is None else said.taps, num_layers)
        told = [] if target is None else _beside(stored_head(found, num_layers), target)
        faults = [fault for name in found.view.tensors if (fault := Weights(checkpoint).fault(name))]
        misread = list(layouts.misreadings(found, num_layers, () if target is None else target.architectures))
    except (CheckpointError, IncompatiblePair) as error:
        return None, [Finding("error", str(error), "give config.json and tensors of one head, or export it anew")]
    findings = [Finding("error", fault, "use the head that was not quantised") for fault in faults[:3]]
    findings += [
        Finding("warning", note, "say it in config.json, or export the head anew") for note in found.view.notes
    ]
    findings += [Finding("warning", what, "train the head for the target's context and rotation") for what in told]
    if said is None and found.view.norms["norm_output"]:
        findings.append(Finding("note", NORM_OUTPUT, "compare its acceptance with training's"))
    remedy = "specctl export writes it as that engine reads it, where it can"
    findings += [Finding("warning", what, remedy) for what in misread]
    return _facts(found, found.k if said is None or said.depth is None else said.depth), findings


def _beside(stored: Stored, target: TargetFacts) -> list[str]:
    """What differs from its target without being wrong. Raises IncompatiblePair for another target."""
    check_fit(stored, target.sizes)
    config = target.model_config
    return [] if config is None else notices(stored.head, config, "the head")


def _facts(found: layouts.Stored, k: int | None) -> Eagle3Facts:
    view = found.view
    config = ModelConfig.read(view.layer, found.where)
    rope = config.rope
    scaled = "" if rope.kind == "default" else f" x {rope.factor:g} from {rope.original_length}"
    return Eagle3Facts(
        layout=found.layout,
        taps=view.taps,
        num_taps=view.num_taps,
        width=config.hidden_size,
        target_hidden=view.target_hidden,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        vocab_size=config.vocab_size,
        draft_vocab=view.draft_vocab,
        norms=dict(view.norms),
        own_embedding=view.own_embedding,
        context=config.max_length,
        rope=rope.kind + scaled,
        rope_theta=rope.theta,
        k=k,
    )
