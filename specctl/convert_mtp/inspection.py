"""What `inspect` tells about MTP weights: whose they are, how many layers are claimed and found, and what is wrong.

Nothing about a checkpoint raises here: it becomes a finding.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from specctl.checkpoint import Checkpoint
from specctl.convert_mtp.families import SUPPORTED, by_label, by_tensors
from specctl.convert_mtp.files import Files
from specctl.convert_mtp.inventory import Inventory, take_inventory
from specctl.convert_mtp.shared import compare, find_originals, same_bits
from specctl.convert_mtp.source import Source, locate_layers, marked_layers, tensors_by_layer
from specctl.dialects.sglang import is_export
from specctl.drafts.mtp_checkpoint import check_whole, find_mtp, is_nextn, read_vocabulary
from specctl.errors import CheckpointError, IncompatiblePair
from specctl.heads.mtp import EMBEDDING, HEAD, SHARED, claimed_layers
from specctl.heads.quantisation import Scheme
from specctl.keys import Keys
from specctl.models import ARCHITECTURES

SHOWN = 3
MARK = "eh_proj"

Role = Literal["target with MTP", "target", "MTP head"]


class Finding(NamedTuple):
    severity: Literal["error", "warning", "note"]
    what: str
    remedy: str


@dataclass(frozen=True)
class LayerFacts:
    """dtypes: number of tensors by dtype. copies: of the target's tensors, to what they are (shared.State)."""

    number: int
    tensors: int
    bytes: int
    dtypes: dict[str, int]
    copies: dict[str, str]
    whole: bool


@dataclass(frozen=True)
class MtpFacts:
    """role: a target with or without MTP, or a head by itself. dialect: the layout, where it is one of ours. claimed:
    by config.json. found: numbers of the layers that have MTP tensors."""

    family: str
    role: Role
    dialect: str | None
    claimed: int
    found: tuple[int, ...]
    quantisation: str | None
    layers: tuple[LayerFacts, ...] = ()
    findings: tuple[Finding, ...] = field(default=())

    @property
    def whole(self) -> bool:
        """Whether there are MTP layers that draft."""
        return bool(self.layers) and all(finding.severity != "error" for finding in self.findings)

    @property
    def convertible(self) -> bool:
        """Whether `convert-mtp` takes it."""
        return self.whole and self.family == SUPPORTED


def inspect_mtp(checkpoint: Checkpoint, index: dict[str, str] | None = None) -> MtpFacts | None:
    """None for a checkpoint without MTP weights that claims none. index: of a checkpoint whose files are not all here;
    what is in the others is then known by name."""
    names, config = checkpoint.names() if index is None else sorted(index), checkpoint.config
    family = by_tensors(names) or (by_label(config) if any("mtp" in name or MARK in name for name in names) else None)
    if family is not None:
        remedy = "convert-mtp takes DeepSeek-V3, R1 and V3.1 only"
        finding = Finding("note", f"MTP or drafting weights of {family}", remedy)
        return MtpFacts(family, "target with MTP", None, 0, (), None, (), (finding,))
    if config.get("model_type") != SUPPORTED:
        return _of_another(checkpoint, names)
    findings: list[Finding] = []
    claimed, found = _layers(checkpoint, names, findings)
    layers: tuple[LayerFacts, ...] = ()
    if claimed and not findings:
        try:
            source = locate_layers(Files(str(checkpoint.path), checkpoint.path, index), config, names)
            if not (absent := [name for name in source.needed or () if not source.files.is_here(name)]):
                layers = _inspect_layers(source, checkpoint, findings)
            for name in absent:
                what = f"a part of MTP layer {source.layers[0].number} is in {name}, which is not here"
                findings.append(Finding("error", what, "fetch that file"))
        except CheckpointError as error:
            remedy = "use the original checkpoint, or put its own config.json beside its weights"
            findings.append(Finding("error", str(error), remedy))
    role = _role(names, found)
    if role == "MTP head":
        findings += _vocabulary(checkpoint)
    return MtpFacts(
        family=SUPPORTED,
        role=role,
        dialect=("sglang" if is_export(config) else "deepseek") if found else None,
        claimed=claimed,
        found=tuple(found),
        quantisation=_quantisation(checkpoint),
        layers=layers,
        findings=tuple(findings),
    )


def _of_another(checkpoint: Checkpoint, names: list[str]) -> MtpFacts | None:
    """An MTP layer in a checkpoint whose family has none as it is published. It drafts here; convert-mtp does not take
    it. None where there is none and none is claimed."""
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        return None
    findings: list[Finding] = []
    claimed, found = _layers(checkpoint, names, findings)
    if not claimed and not found and not findings:
        return None
    layers: list[LayerFacts] = []
    nextn = is_nextn(checkpoint.config)
    if claimed and not findings:
        try:
            place = find_mtp(checkpoint)
            check_whole(place)
            layers = [_plain_layer(checkpoint, place.number + index) for index in range(place.count)]
        except (CheckpointError, IncompatiblePair) as error:
            findings.append(Finding("error", str(error), "use the original checkpoint, or its own config.json"))
    role, dialect = _role(names, found), ("sglang" if nextn else "deepseek") if found else None
    if role == "MTP head":
        findings += _vocabulary(checkpoint)
    return MtpFacts(model_type, role, dialect, claimed, tuple(found), None, tuple(layers), tuple(findings))


def _plain_layer(checkpoint: Checkpoint, number: int) -> LayerFacts:
    prefix = f"model.layers.{number}."
    infos = {name: checkpoint.info(name) for name in checkpoint.names() if name.startswith(prefix)}
    dtypes = Counter(str(info.dtype).removeprefix("torch.") for info in infos.values())
    copies: dict[str, str] = {}
    for copy, original in SHARED.items():
        if prefix + copy not in infos:
            copies[copy] = "absent"
        elif original not in checkpoint:
            copies[copy] = "unknown"
        else:
            same = same_bits(checkpoint.tensor(prefix + copy), checkpoint.tensor(original))
            copies[copy] = "equal" if same else "differs"
    total = sum(info.num_bytes for info in infos.values())
    return LayerFacts(number, len(infos), total, dict(dtypes), copies, whole=True)


def _vocabulary(checkpoint: Checkpoint) -> list[Finding]:
    """What there is to say about an MTP layer that scores a part of the target's ids."""
    try:
        ids_V = read_vocabulary(checkpoint)
    except CheckpointError as error:
        return [Finding("error", str(error), "write d2t as what is added to a row's number, ids rising")]
    if ids_V is None:
        return []
    what = f"it scores {len(ids_V)} of {checkpoint.config['vocab_size']} token ids (d2t)"
    return [Finding("note", what, "drafts so with specctl; engines have no such choice and score all of them")]


def _role(names: list[str], found: list[int]) -> Role:
    if not any(_is_of_target(name) for name in names):
        return "MTP head"
    return "target with MTP" if found else "target"


def _layers(checkpoint: Checkpoint, names: list[str], findings: list[Finding]) -> tuple[int, list[int]]:
    """How many layers the config claims, and which there are; with findings when these do not agree."""
    where = str(checkpoint.path / "config.json")
    try:
        claimed = claimed_layers(Keys(checkpoint.config, where))
        found = marked_layers(tensors_by_layer(names, str(checkpoint.path)))
    except CheckpointError as error:
        findings.append(Finding("error", str(error), "set it right, or keep one of the two tensors"))
        return 0, []
    if claimed and not found:
        what = f"config.json claims {claimed} MTP layer{'s' if claimed > 1 else ''}, and no tensor of any is there"
        remedy = (
            "saving has lost it: put it back (convert-mtp ORIGINAL --attach-to), or set num_nextn_predict_layers to 0 "
            "(convert-mtp --strip)"
        )
        findings.append(Finding("error", what, remedy))
    if found and not claimed:
        what = f"layer {found[0]} is an MTP layer, but num_nextn_predict_layers is 0 or absent"
        findings.append(Finding("error", what, f"set it to {len(found)}"))
    return claimed, found


def _inspect_layers(source: Source, checkpoint: Checkpoint, findings: list[Finding]) -> tuple[LayerFacts, ...]:
    originals = find_originals(checkpoint, source.shared)
    facts = []
    for layer, inventory in zip(source.layers, take_inventory(source, checkpoint), strict=True):
        copies: dict[str, str] = dict.fromkeys(SHARED, "unknown")
        if not inventory.faults:
            copies = dict(compare(checkpoint, inventory, originals, quick=True))
        infos = [checkpoint.info(name) for name in layer.names.values()]
        dtypes = Counter(str(info.dtype).removeprefix("torch.") for info in infos)
        total = sum(info.num_bytes for info in infos)
        facts.append(LayerFacts(layer.number, len(infos), total, dict(dtypes), copies, whole=not inventory.faults))
        findings += _layer_findings(inventory, copies)
    for number, count in sorted(source.strays.items()):
        what = f"{count} tensors of layer {number} belong to no layer of the config"
        findings.append(Finding("warning", what, "set num_hidden_layers and num_nextn_predict_layers right"))
    return tuple(facts)


def _layer_findings(inventory: Inventory, copies: dict[str, str]) -> list[Finding]:
    found = []
    if inventory.faults:
        shown = "; ".join(inventory.faults[:SHOWN]) + ("; ..." if len(inventory.faults) > SHOWN else "")
        what = f"layer {inventory.number} is not whole ({len(inventory.faults)} faults): {shown}"
        found.append(Finding("error", what, "use the original checkpoint: engines load such a layer without a word"))
    for name in (EMBEDDING, HEAD):
        if copies[name] == "differs":
            what = f"layer {inventory.number}: {name} differs from the target's own"
            remedy = "vLLM and SGLang put the target's in its place; acceptance is lower if it was trained"
            found.append(Finding("warning", what, remedy))
    return found


def _quantisation(checkpoint: Checkpoint) -> str | None:
    try:
        scheme = Scheme.read(checkpoint.config, str(checkpoint.path / "config.json"))
    except CheckpointError as error:
        return f"not supported: {error}"
    if scheme is None:
        return None
    if (fp8 := scheme.fp8) is None:
        return f"{scheme.method}, {len(scheme.ignored)} entries for modules left out"
    return f"fp8 in blocks of {fp8.block.rows} x {fp8.block.columns}" + (", scales ue8m0" if fp8.powers_of_two else "")


def _is_of_target(name: str) -> bool:
    return name.removeprefix("model.") in ("norm.weight", "embed_tokens.weight") or name == "lm_head.weight"
