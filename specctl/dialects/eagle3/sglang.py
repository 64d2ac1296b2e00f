"""SGLang's rules for an EAGLE-3 head in a directory of its own (read in the version that ../readers.py names),
and the layout for it.

Ids of taps stand in eagle_config and are one less than ours: it adds one. At the top level it looks for none, so there
they can stand as every other reader counts them, which also tells this layout from the others. Without any id the taps
are (2, n // 2, n - 3). A residual is taken where it enters a layer, so what leaves the last one is not to be had. For
DeepSeek targets the one is added only where the first id is 1.

The layer's tensors are called midlayer.*. Names that fit nothing are passed over without a word, biases among them, and
so is input_norm: it knows neither norm_before_fc nor norm_before_residual. fc_norm and norm_output it knows. The
embedding is always the target's unless the head is of another width. An output head is the target's when
draft_vocab_size is null, and the embedding when tie_word_embeddings is true. The number of tokens it is told counts the
one that the target gives, so it is one more than the drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specctl.dialects.eagle3 import flat, vllm
from specctl.dialects.eagle3.flat import COUNT, IDS, NESTED, ORIGINAL_COUNT, is_deepseek
from specctl.dialects.eagle3.layer import whole
from specctl.dialects.eagle3.view import LM_HEAD, NORMS, View, sort_names
from specctl.heads.eagle3 import EMBEDDING, LAYER, Eagle3Head
from specctl.keys import Keys
from specctl.shards import TensorInfo

READER = "SGLang"
ARCHITECTURE = "LlamaForCausalLMEagle3"
SHIFT = 1


def view(
    config: Mapping[str, Any], infos: Mapping[str, TensorInfo], where: str, architectures: Sequence[str] = ()
) -> View:
    """What SGLang makes of a flat config.json and its tensors. architectures: of the target, as far as they are
    known."""
    keys, outer = Keys(config, where), whole(config, where)
    layer = outer | {"attention_bias": False, "mlp_bias": False, "model_type": "llama"}
    below = flat.ids(flat.nested(config, where), f"{where}: {NESTED}")
    count = keys.integer(COUNT, len(below or ()) or ORIGINAL_COUNT)
    norms = dict.fromkeys(NORMS, False)
    norms |= {
        "fc_norm": keys.boolean("fc_norm", False) or keys.boolean("use_aux_norm", False),
        "norm_output": keys.boolean("norm_output", False),
    }
    tensors, dropped = sort_names(infos, (LAYER,), flat.parameter_names(layer, norms, count))
    target_hidden = keys.integer("target_hidden_size", layer["hidden_size"])
    replaced = [] if target_hidden != layer["hidden_size"] else [EMBEDDING]
    if config.get("tie_word_embeddings") is True or ("draft_vocab_size" in config and "draft_vocab_size" not in keys):
        replaced.append(LM_HEAD)
    found = View(
        reader=READER,
        layer=layer,
        taps=None if below is None else _read(below, is_deepseek(architectures)),
        num_taps=count,
        norms=norms,
        target_hidden=target_hidden,
        draft_vocab=keys.integer("draft_vocab_size", layer["vocab_size"]),
        tensors={name: ours for name, ours in tensors.items() if ours not in replaced},
        dropped=(*dropped, *(name for name, ours in tensors.items() if ours in replaced)),
    )
    return replace(found, loud=tuple(_loud(config, found)), last_tap=False)


def _read(below: tuple[int, ...], deepseek: bool) -> tuple[int, ...]:
    """The taps that it takes ids for."""
    shift = SHIFT if not deepseek or below[0] == 1 else 0
    return tuple(sorted({index + shift for index in below}))


def _loud(config: Mapping[str, Any], found: View) -> list[str]:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or ARCHITECTURE not in architectures:
        return [f"architectures is {architectures!r}, and it knows {ARCHITECTURE}"]
    if "draft_vocab_size" not in config:
        return ["draft_vocab_size is not there"]
    if found.taps is not None and len(found.taps) != found.num_taps:
        return [f"it builds fc for {found.num_taps} taps, and {IDS} names {len(found.taps)}"]
    if found.taps is not None and found.taps[0] < 1:
        return ["tap 0, the embedding, has no residual beside it yet when it is read"]
    return []


def refusals(head: Eagle3Head, num_layers: int | None, architectures: Sequence[str]) -> list[str]:
    """Why SGLang cannot run this head. num_layers, architectures: of the target, where they are known."""
    named = [norm for norm in ("norm_before_residual", "norm_before_fc") if getattr(head, norm)]
    found = [f"{READER} has no code for {norm}, and the head has it: it would run another head" for norm in named]
    for key in ("attention_bias", "mlp_bias"):
        if head.layer.get(key):
            found.append(f"{READER} builds the layer without biases, and the head has {key}")
    if head.layer["model_type"] != "llama":
        found.append(f"{READER} builds a Llama layer, the head's is of {head.layer['model_type']}")
    found += _taps(head, num_layers, is_deepseek(architectures))
    if head.own_embedding and head.target_hidden == head.layer["hidden_size"]:
        found.append(
            f"{READER} puts the target's embedding in the place of the head's own; only where these are equal, which "
            "--target shows, is that the same head"
        )
    return found


def _taps(head: Eagle3Head, num_layers: int | None, deepseek: bool) -> Iterator[str]:
    """Those that it would not find, or take for others."""
    if head.taps[0] < 1:
        yield f"{READER} cannot read tap 0, the embedding"
    if num_layers is not None and head.taps[-1] >= num_layers:
        yield (
            f"{READER} reads residuals where they enter a layer, and tap {head.taps[-1]} is what leaves the last of "
            f"{num_layers}: it would run the head with a tap too few"
        )
    if deepseek and head.taps[0] - SHIFT != 1:
        yield (
            f"{READER} adds one to the ids for a DeepSeek target only where the first of them is 1, and would take "
            f"taps {', '.join(map(str, head.taps))} for others: it can be given heads whose first tap is 2"
        )


def config(head: Eagle3Head) -> dict[str, Any]:
    """config.json of the layout."""
    written = vllm.config(head) | {"architectures": [ARCHITECTURE]}
    inner = {key: value for key, value in written[NESTED].items() if key not in NORMS}
    return written | {NESTED: inner | {IDS: [tap - SHIFT for tap in head.taps]}}
