"""Which layout an EAGLE-3 head is in, told by its keys and tensors together, and the head that it is by that layout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from specctl.checkpoint import Checkpoint
from specctl.dialects.eagle3 import flat, original, sglang, speculators, vllm
from specctl.dialects.eagle3.flat import IDS, NESTED
from specctl.dialects.eagle3.view import View, differences, faults
from specctl.errors import CheckpointError
from specctl.heads.eagle3 import FUSE, LAYER, original_taps
from specctl.heads.vocabulary import D2T, T2D, read_ids
from specctl.shards import TensorInfo

Name = Literal["original", "vllm", "sglang", "speculators"]
NAMES: tuple[Name, ...] = ("vllm", "sglang", "speculators", "original")
# What other heads have and this kind has not.
_OTHERS = {
    "a Medusa head": ("medusa_heads.", "blocks.0.", "lm_heads."),
    "a P-EAGLE head, which drafts all tokens at once": ("mask_hidden",),
    "a DSpark draft": ("markov_head.", "main_proj."),
}


@dataclass(frozen=True)
class Stored:
    """A head in a directory. k: the number of drafted tokens that the layout names, if it does."""

    layout: Name
    view: View
    checkpoint: Checkpoint
    k: int | None = None

    @property
    def where(self) -> str:
        return str(self.checkpoint.path / "config.json")

    def ids(self) -> Tensor | None:
        """The target ids of the head's rows, int64 in order; None when these are the ids themselves."""
        if D2T not in self.checkpoint:
            return None
        vocab, t2d = int(self.view.layer["vocab_size"]), None
        if T2D in self.checkpoint:
            t2d = self.checkpoint.tensor(T2D)
        ids_D = read_ids(self.checkpoint.tensor(D2T), t2d, self.view.draft_vocab, vocab, str(self.checkpoint.path))
        return None if self.view.draft_vocab == vocab else ids_D


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """Whether a directory holds, or says it holds, a head of this kind or of a kin that is not supported: no model."""
    config, names = checkpoint.config, checkpoint.names()
    named = config.get("architectures")
    claimed = isinstance(named, list) and any(isinstance(name, str) and "Eagle" in name for name in named)
    claimed = claimed or isinstance(config.get(NESTED), Mapping) or any(mark in config for mark in speculators.MARKS)
    return claimed or FUSE in names or any(name.startswith(f"{LAYER}.") for name in names)


def read(checkpoint: Checkpoint, taps: tuple[int, ...] | None = None, num_layers: int | None = None) -> Stored:
    """The head in a directory, whichever layout it is in. taps: as its specctl.json records them; num_layers: of its
    target. Either may tell how ids are counted where the config does not.

    Raises CheckpointError naming key or tensor, with both numbers, where these contradict each other.
    """
    where, infos = str(checkpoint.path / "config.json"), tensors_of(checkpoint)
    if other := _foreign(checkpoint.config, infos):
        raise CheckpointError(f"{checkpoint.path}: holds {other}, which is not supported; expected an EAGLE-3 head")
    layout, notes = recognise(checkpoint.config, infos, taps, num_layers, where)
    k = None
    if layout == "speculators":
        view = speculators.claims(checkpoint.config, infos, layout, where)
        _, k = speculators.about(checkpoint.config, where)
    else:
        shift = sglang.SHIFT if layout == "sglang" else 0
        view = flat.claims(checkpoint.config, infos, shift, layout, where)
    for fault in faults(view, infos):
        raise CheckpointError(f"{checkpoint.path}: {fault}")
    stored = Stored(layout, replace(view, notes=(*view.notes, *notes)), checkpoint, k)
    _check_recorded(stored, taps, num_layers)
    stored.ids()
    return stored


def recognise(
    config: Mapping[str, Any],
    names: Collection[str],
    taps: tuple[int, ...] | None,
    num_layers: int | None,
    where: str,
) -> tuple[Name, tuple[str, ...]]:
    """The layout, and what people should know about how it was told."""
    if any(mark in config for mark in speculators.MARKS):
        return "speculators", ()
    top, below = flat.ids(config, where), flat.ids(flat.nested(config, where), f"{where}: {NESTED}")
    if below is None:
        plain = top is None and not any(flat.claimed_norms(config, where).values())
        return ("original" if plain and any(name.startswith(f"{LAYER}.") for name in names) else "vllm"), ()
    shifted = tuple(index + sglang.SHIFT for index in below)
    if top is not None:
        if top in (below, shifted):
            return ("vllm" if top == below else "sglang"), ()
        raise CheckpointError(
            f"{where}: {IDS} is {list(top)}, and {list(below)} in {NESTED}; expected the same, or one less there as "
            "SGLang counts"
        )
    return _by_numbers(below, shifted, taps, num_layers)


def _by_numbers(
    below: tuple[int, ...], shifted: tuple[int, ...], taps: tuple[int, ...] | None, num_layers: int | None
) -> tuple[Name, tuple[str, ...]]:
    """For ids in eagle_config alone, which vLLM and SGLang count in two ways."""
    if taps is not None and taps in (below, shifted):
        return ("vllm" if taps == below else "sglang"), ()
    original = None if num_layers is None else original_taps(num_layers)
    if original in (below, shifted):
        return ("vllm" if original == below else "sglang"), ()
    said = ", ".join(map(str, below))
    note = (
        f"nothing says how the ids {said} in {NESTED} are counted: they are taken as vLLM counts them (the residual "
        f"that enters a layer); for SGLang they would be taps {', '.join(map(str, shifted))}. Write {IDS} at the top "
        "level, as vLLM counts, to settle it"
    )
    return "vllm", (note,)


def readers(stored: Stored, layout: Name, architectures: Sequence[str] = ()) -> list[View]:
    """What the readers of a layout make of a directory. architectures: of the target, as far as they are known."""
    config, infos, where = stored.checkpoint.config, tensors_of(stored.checkpoint), stored.where
    if layout == "speculators":
        return [speculators.view(config, infos, where, architectures)]
    return [_FLAT_READERS[layout](config, infos, where, architectures)]


def misreadings(stored: Stored, num_layers: int | None, architectures: Sequence[str] = ()) -> Iterator[str]:
    """In what every engine would run another head than the one that is stored, one sentence each. num_layers,
    architectures: of the target, as far as they are known."""
    if stored.layout == "speculators":
        found = readers(stored, "speculators", architectures)
        yield f"{sglang.READER} does not load it: config.json names no model_type"
    else:
        found = [view for layout in ("vllm", "sglang") for view in readers(stored, layout, architectures)]
    for view in found:
        yield from view.notes
        yield from differences(stored.view, view, num_layers)


def named_target(config: Mapping[str, Any]) -> str | None:
    """The target that a config names, in a layout that has a place for it."""
    about = config.get(speculators.ABOUT)
    verifier = about.get("verifier") if isinstance(about, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return name if isinstance(name, str) and name else None


_FLAT_READERS = {"vllm": vllm.view, "sglang": sglang.view, "original": original.view}


def tensors_of(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    return {name: checkpoint.info(name) for name in checkpoint.names()}


def _check_recorded(stored: Stored, taps: tuple[int, ...] | None, num_layers: int | None) -> None:
    ours = stored.view.taps
    if ours is None and num_layers is not None:
        ours = stored.view.head(num_layers).taps
    if taps is not None and ours is not None and taps != ours:
        raise CheckpointError(
            f"{stored.where}: comes to taps {', '.join(map(str, ours))}, and specctl.json beside it records "
            f"{', '.join(map(str, taps))}; one of them is of another head"
        )


def _foreign(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """What the directory holds instead, where that can be told."""
    for what, prefixes in _OTHERS.items():
        if any(name.startswith(prefixes) for name in names):
            return what
    decoder = any(name.startswith((f"{LAYER}.", "layers.0.")) for name in names)
    hidden_norm = any(name.endswith(".hidden_norm.weight") for name in names)
    if "hidden_norm.weight" in names and decoder:
        return "a DFlash draft"
    if FUSE in names and decoder and not hidden_norm and "lm_head.weight" not in names:
        return "an EAGLE-1 or EAGLE-2 head"
    if any(".self_attn.kv_a_proj" in name or ".self_attn.q_a_proj" in name for name in names):
        return "an EAGLE-3 head with latent attention"
    if any(".mlp.experts." in name for name in names):
        return "an EAGLE-3 head with experts"
    return None
