"""The layout of the speculators library, which vLLM serves by itself (read in the version that
../readers.py names).

The head's own keys stand at the top, the layer's in transformer_layer_config, the target and the number of drafted
tokens in speculators_config. The library writes of the layer only what differs from transformers' class for its
model_type, and reads it so; vLLM takes what is written as it stands and has other values for what is not. So what is
written here is the whole layer, which both read alike. vLLM takes a missing norm_before_residual for true, the library
for false.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specctl.dialects.eagle3 import flat, vllm
from specctl.dialects.eagle3.flat import COUNT, IDS, ORIGINAL_COUNT, PREFIXES
from specctl.dialects.eagle3.layer import by_class, whole
from specctl.dialects.eagle3.view import NORMS, View, is_rising, sort_names
from specctl.errors import CheckpointError
from specctl.heads.eagle3 import LAYER, Eagle3Head
from specctl.keys import Keys
from specctl.shards import TensorInfo

TYPE, LAYER_CONFIG, ABOUT = "speculators_model_type", "transformer_layer_config", "speculators_config"
MARKS = (TYPE, LAYER_CONFIG, ABOUT)
VERSION = "0.5.0"
# What vLLM asks its config for without a value of its own.
ASKED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "hidden_act",
)
VLLM_CONTEXT = 8192
_UNSAID = "norm_before_residual"


def claims(config: Mapping[str, Any], infos: Mapping[str, TensorInfo], name: str, where: str) -> View:
    """The head that such a directory is. Raises CheckpointError for keys that are missing or malformed."""
    keys, inside = Keys(config, where), f"{where}: {LAYER_CONFIG}"
    kind = config.get(TYPE)
    if kind != "eagle3":
        raise CheckpointError(f"{where}: {TYPE} is {kind!r}, which is not supported, expected 'eagle3'")
    about(config, where)
    given = _layer(config, where)
    resolved = by_class(given, inside)
    flat.check_layers({"num_hidden_layers": given.get("num_hidden_layers", 1)}, infos, inside)
    layer = whole(resolved, inside)
    taps = flat.ids(config, where)
    if taps is not None and (not is_rising(taps) or taps[0] < 0):
        raise CheckpointError(f"{where}: {IDS} is {list(taps)}, expected rising numbers")
    norms = {norm: keys.boolean(norm, norm == _UNSAID) for norm in NORMS}
    num_taps = ORIGINAL_COUNT if taps is None else len(taps)
    tensors, dropped = sort_names(infos, PREFIXES, flat.parameter_names(layer, norms, num_taps))
    notes: tuple[str, ...] = ()
    if _UNSAID not in keys:
        notes = (
            f"{_UNSAID} is not said: it is taken for true, as vLLM does, and the speculators library takes it for "
            "false",
        )
    return View(
        reader=name,
        layer=layer,
        taps=taps,
        num_taps=num_taps,
        norms=norms,
        target_hidden=keys.integer("target_hidden_size", layer["hidden_size"]),
        draft_vocab=keys.integer("draft_vocab_size", layer["vocab_size"]),
        tensors=tensors,
        dropped=dropped,
        notes=notes,
    )


def view(
    config: Mapping[str, Any], infos: Mapping[str, TensorInfo], where: str, architectures: Sequence[str] = ()
) -> View:
    """What vLLM makes of it. architectures: of the target, as far as they are known."""
    keys, given = Keys(config, where), {k: v for k, v in _layer(config, where).items() if v is not None}
    norms = {norm: keys.boolean(norm, norm == _UNSAID) for norm in NORMS}
    lacking = [key for key in ASKED if key not in given]
    of_class = by_class(given, where) if lacking else {}
    filled = {key: of_class[key] for key in lacking if key in of_class} | given
    heads, width = (Keys(filled, where).integer(key) for key in ("num_attention_heads", "hidden_size"))
    unsaid = {
        "model_type": "llama",
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "max_position_embeddings": VLLM_CONTEXT,
    }
    filled = unsaid | filled
    copied = {key: config[key] for key in ("draft_vocab_size", "target_hidden_size", IDS) if config.get(key)}
    found = vllm.seen(filled | copied, infos, norms, where, architectures)
    if not lacking:
        return found
    loud = f"{LAYER_CONFIG} has no {lacking[0]}, and it does not ask transformers' class for it"
    return replace(found, loud=(loud, *found.loud))


def about(config: Mapping[str, Any], where: str) -> tuple[str, int]:
    """The target's name and the number of drafted tokens. Raises CheckpointError where either is not said."""
    found = config.get(ABOUT)
    try:
        tokens = found["proposal_methods"][0]["speculative_tokens"]  # type: ignore[index]
        name = found["verifier"]["name_or_path"]  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        raise CheckpointError(
            f"{where}: {ABOUT} names no verifier.name_or_path or no proposal_methods[0].speculative_tokens, which "
            "its readers want"
        ) from None
    if type(tokens) is not int or tokens < 1:
        raise CheckpointError(f"{where}: speculative_tokens is {tokens!r}, expected a positive integer")
    return str(name or ""), tokens


def _layer(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    found = config.get(LAYER_CONFIG)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where}: {LAYER_CONFIG} is {found!r}, expected an object")
    return found


def refusals(head: Eagle3Head, target: str | None) -> list[str]:
    """Why the layout cannot say this head. target: its name."""
    return [] if target else ["the layout names the target, which is not known here (--target)"]


def config(head: Eagle3Head, target: str, architectures: list[str], num_tokens: int) -> dict[str, Any]:
    """config.json of the layout. num_tokens: drafted at a time."""
    layer = whole(head.layer, "the head")
    if layer["rope_scaling"] is None:  # which transformers would take to say that there are no rope_parameters
        del layer["rope_scaling"]
    if len(head.taps) != ORIGINAL_COUNT:  # which vLLM looks for here
        layer[COUNT] = len(head.taps)
    method = {"proposal_type": "greedy", "speculative_tokens": num_tokens}
    return {
        "architectures": ["Eagle3Speculator"],
        TYPE: "eagle3",
        "speculators_version": VERSION,
        LAYER_CONFIG: layer,
        "draft_vocab_size": head.draft_vocab,
        "target_hidden_size": head.target_hidden,
        **{norm: getattr(head, norm) for norm in NORMS},
        IDS: list(head.taps),
        "embed_requires_grad": False,
        ABOUT: {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
    }


def name(ours: str) -> str:
    """What the layout calls a parameter of ours."""
    return f"layers.0{ours.removeprefix(LAYER)}" if ours.startswith(f"{LAYER}.") else ours
