"""vLLM's rules for an EAGLE-3 head in a directory of its own (read in the version that ../readers.py names), and
the layout that all of them fit.

Taps are the residuals entering the layers whose numbers are given, in rising order and each once. Both runners read the
key at the top level; inside eagle_config only the older one finds it, so it is written in both places. Without any id
the taps are (2, n // 2, n - 3). fc joins as many as num_aux_hidden_states says, else as many ids as eagle_config has,
else three. norm_before_fc is looked for in eagle_config first, the other norms at the top level only.

A tensor is called midlayer.* or layers.0.*; names that fit nothing end the load, but a bias or an input_norm without
its flag is passed over, and what no tensor fills stays as memory was. t2d is not read. d2t is what is added to a row's
number; without it, rows are taken for the ids 0, 1, 2, ... With as many rows as the target has ids it must not be
there. Embedding and output head are the target's where the directory has none. A shorter context is raised to the
target's.

Of a DeepSeek target tap 0, the embedding, is not to be had: what enters a layer is the sum of two there, of which the
first layer has one, and the first pass fails. Of a Llama it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specctl.dialects.eagle3 import flat
from specctl.dialects.eagle3.flat import COUNT, IDS, NESTED, ORIGINAL_COUNT, PREFIXES, USES_TAPS, is_deepseek
from specctl.dialects.eagle3.layer import whole
from specctl.dialects.eagle3.view import NORMS, View, sort_names
from specctl.heads.eagle3 import Eagle3Head
from specctl.heads.vocabulary import D2T
from specctl.keys import Keys
from specctl.shards import TensorInfo

READER = "vLLM"
NO_EMBEDDING = (
    "tap 0, the embedding, has no residual beside it yet when a DeepSeek target's first layer is entered; train a head "
    "whose taps begin at 1 or later"
)
ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}


def view(
    config: Mapping[str, Any], infos: Mapping[str, TensorInfo], where: str, architectures: Sequence[str] = ()
) -> View:
    """What vLLM makes of a flat config.json and its tensors. architectures: of the target, as far as they are known."""
    inner, outer = flat.nested(config, where), Keys(config, where)
    norms = {norm: outer.boolean(norm, False) for norm in NORMS}
    norms["norm_before_fc"] = Keys(inner, f"{where}: {NESTED}").boolean("norm_before_fc", norms["norm_before_fc"])
    return seen(config, infos, norms, where, architectures)


def seen(
    config: Mapping[str, Any],
    infos: Mapping[str, TensorInfo],
    norms: Mapping[str, bool],
    where: str,
    architectures: Sequence[str],
) -> View:
    """The same for a config whose norms are known."""
    keys, inner = Keys(config, where), flat.nested(config, where)
    top, below = flat.ids(config, where), flat.ids(inner, f"{where}: {NESTED}")
    layer, taps = whole(config, where), top or below
    count = keys.integer(COUNT, len(below or ()) or ORIGINAL_COUNT)
    draft_vocab = keys.integer("draft_vocab_size", layer["vocab_size"])
    tensors, dropped = sort_names(infos, PREFIXES, flat.parameter_names(layer, norms, count))
    loud = _loud(config, infos, taps, count, dropped, draft_vocab == layer["vocab_size"], where)
    if taps is not None and 0 in taps and is_deepseek(architectures):
        loud.append(NO_EMBEDDING)
    return View(
        reader=READER,
        layer=layer,
        taps=None if taps is None else tuple(sorted(set(taps))),
        num_taps=count,
        norms=norms,
        target_hidden=keys.integer("target_hidden_size", layer["hidden_size"]),
        draft_vocab=draft_vocab,
        tensors=tensors,
        dropped=dropped,
        loud=tuple(loud),
        notes=_notes(top, below),
    )


def _loud(
    config: Mapping[str, Any],
    infos: Mapping[str, TensorInfo],
    taps: tuple[int, ...] | None,
    count: int,
    dropped: tuple[str, ...],
    full: bool,
    where: str,
) -> list[str]:
    found = []
    if not Keys(flat.nested(config, where), where).boolean(USES_TAPS, True):
        found.append(f"{USES_TAPS} is false, so it has no fc")
    if taps is not None and len(set(taps)) != count:
        found.append(f"it builds fc for {count} taps ({COUNT} or the ids in {NESTED}), and {IDS} names {len(taps)}")
    if full and D2T in infos:
        found.append(f"{D2T} is there though the head has a row for every token id, and has no parameter then")
    unknown = [name for name in dropped if not name.endswith(".bias") and not name.startswith("input_norm.")]
    if unknown:
        found.append(f"it has no parameter for tensor {unknown[0]}")
    return found


def _notes(top: tuple[int, ...] | None, below: tuple[int, ...] | None) -> tuple[str, ...]:
    if top is None and below is not None:
        return (
            f"{READER}'s newer runner looks for {IDS} at the top level, not in {NESTED}, and takes the original three",
        )
    return ()


def refusals(head: Eagle3Head, architectures: Sequence[str]) -> list[str]:
    """Why vLLM cannot run this head, which the layout can say in any case. architectures: of the target."""
    return [f"{READER} does not run it: {NO_EMBEDDING}"] if 0 in head.taps and is_deepseek(architectures) else []


def config(head: Eagle3Head) -> dict[str, Any]:
    """config.json of the layout."""
    norms, taps = {norm: getattr(head, norm) for norm in NORMS}, list(head.taps)
    return {
        "architectures": [ARCHITECTURES[head.layer["model_type"]]],
        **whole(head.layer, "the head"),
        "draft_vocab_size": head.draft_vocab,
        "target_hidden_size": head.target_hidden,
        **norms,
        IDS: taps,
        COUNT: len(taps),
        NESTED: {IDS: list(taps), USES_TAPS: True, **norms},
    }
