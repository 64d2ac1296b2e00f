"""The layout that EAGLE-3 was published in, and its own program's rules for it.

A flat Llama config with draft_vocab_size, tensors midlayer.*, d2t and t2d where the vocabulary is reduced. The taps are
always (2, n // 2, n - 3) of the target's n layers, and of the norms there is none but hidden_norm, so a head that needs
more said cannot be written this way. Names that fit nothing are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specctl.dialects.eagle3 import flat
from specctl.dialects.eagle3.flat import ORIGINAL_COUNT
from specctl.dialects.eagle3.layer import whole
from specctl.dialects.eagle3.view import NORMS, View, sort_names
from specctl.heads.eagle3 import LAYER, Eagle3Head, original_taps
from specctl.keys import Keys
from specctl.shards import TensorInfo

READER = "the original EAGLE-3 program"
ARCHITECTURE = "LlamaForCausalLMEagle3"


def view(
    config: Mapping[str, Any], infos: Mapping[str, TensorInfo], where: str, architectures: Sequence[str] = ()
) -> View:
    """What the published program makes of a flat config.json and its tensors, whatever the target's architectures."""
    keys = Keys(config, where)
    layer = whole(config, where) | {"attention_bias": False, "mlp_bias": False, "model_type": "llama"}
    norms = dict.fromkeys(NORMS, False)
    tensors, dropped = sort_names(infos, (LAYER,), flat.parameter_names(layer, norms, ORIGINAL_COUNT))
    return View(
        reader=READER,
        layer=layer,
        taps=None,
        num_taps=ORIGINAL_COUNT,
        norms=norms,
        target_hidden=keys.integer("target_hidden_size", layer["hidden_size"]),
        draft_vocab=keys.integer("draft_vocab_size", layer["vocab_size"]),
        tensors=tensors,
        dropped=dropped,
    )


def refusals(head: Eagle3Head, num_layers: int | None) -> list[str]:
    """Why the layout cannot say this head. num_layers: of the target."""
    found = [f"the original layout has no {norm}, and the head has it" for norm in NORMS if getattr(head, norm)]
    for key in ("attention_bias", "mlp_bias"):
        if head.layer.get(key):
            found.append(f"the original layer has no biases, and the head has {key}")
    if head.layer["model_type"] != "llama":
        found.append(f"the original layer is a Llama's, the head's is of {head.layer['model_type']}")
    if num_layers is None:
        found.append("the original taps follow from the target's number of layers, which is not known here (--target)")
    elif head.taps != original_taps(num_layers):
        taps, original = (", ".join(map(str, each)) for each in (head.taps, original_taps(num_layers)))
        found.append(f"the head reads taps {taps}, the original layout means {original} for {num_layers} layers")
    return found


def config(head: Eagle3Head) -> dict[str, Any]:
    """config.json of the layout."""
    return {
        "architectures": [ARCHITECTURE],
        **whole(head.layer, "the head"),
        "draft_vocab_size": head.draft_vocab,
        "target_hidden_size": head.target_hidden,
    }
