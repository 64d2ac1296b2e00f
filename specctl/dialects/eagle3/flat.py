"""EAGLE-3 heads whose config.json is that of a Llama with a few keys more: what it claims, by itself.

Taps are numbered in two ways. vLLM's id k is the residual that enters layer k, and so is the top-level key wherever it
stands; SGLang's, in eagle_config alone, is the layer whose output it is, one less. What a config claims is said here
once the way is known; what an engine reads is in that engine's file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from specctl.dialects.eagle3.layer import whole
from specctl.dialects.eagle3.view import NORMS, View, is_rising, shapes, sort_names
from specctl.errors import CheckpointError
from specctl.heads.eagle3 import LAYER
from specctl.keys import Keys
from specctl.models import ModelConfig
from specctl.shards import TensorInfo

IDS, NESTED, USES_TAPS, COUNT = (
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "use_aux_hidden_state",
    "num_aux_hidden_states",
)
ORIGINAL_COUNT = 3
PREFIXES = (LAYER, "layers.0")
DEEPSEEK = "Deepseek"  # how the architectures begin of targets for which engines have rules of their own
MAX_TAPS = 64


def nested(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The object eagle_config, empty where there is none."""
    found = config.get(NESTED)
    if found is not None and not isinstance(found, Mapping):
        raise CheckpointError(f"{where}: {NESTED} is {found!r}, expected an object")
    return found or {}


def ids(holder: Mapping[str, Any], where: str) -> tuple[int, ...] | None:
    """The numbers of layers under IDS; None where none are given, which an empty list is to every reader."""
    found = holder.get(IDS)
    if not found:
        return None
    if not isinstance(found, list) or len(found) > MAX_TAPS or not all(type(index) is int for index in found):
        raise CheckpointError(f"{where}: {IDS} is {found!r}, expected a list of layer numbers")
    return tuple(found)


def claimed_norms(config: Mapping[str, Any], where: str) -> dict[str, bool]:
    """The four, false where they are not named. Raises CheckpointError where eagle_config says otherwise."""
    outer, inner = Keys(config, where), Keys(nested(config, where), f"{where}: {NESTED}")
    found = {}
    for norm in NORMS:
        if norm in outer and norm in inner and outer.boolean(norm, False) != inner.boolean(norm, False):
            raise CheckpointError(
                f"{where}: {norm} is {_word(config[norm])}, and {_word(inner.values[norm])} in {NESTED}; readers "
                "differ in which one they follow: say the same in both"
            )
        found[norm] = outer.boolean(norm, inner.boolean(norm, False))
    return found


def claims(config: Mapping[str, Any], infos: Mapping[str, TensorInfo], shift: int, name: str, where: str) -> View:
    """The head that a flat config and its tensors are. shift: what is added to the ids in eagle_config to get taps.

    Raises CheckpointError for keys that are missing, malformed or contradict each other.
    """
    keys, inner = Keys(config, where), nested(config, where)
    norms = claimed_norms(config, where)
    below = ids(inner, f"{where}: {NESTED}")
    taps = ids(config, where) or (None if below is None else tuple(index + shift for index in below))
    if taps is not None and (not is_rising(taps) or taps[0] < 0):
        raise CheckpointError(
            f"{where}: {IDS} comes to taps {', '.join(map(str, taps))}; readers take them in rising order, each once: "
            "expected rising numbers"
        )
    if not Keys(inner, f"{where}: {NESTED}").boolean(USES_TAPS, True):
        raise CheckpointError(f"{where}: {USES_TAPS} is false: a head that reads no taps is not supported")
    num_taps = ORIGINAL_COUNT if taps is None else len(taps)
    if COUNT in keys and keys.integer(COUNT) != num_taps:
        raise CheckpointError(f"{where}: {COUNT} is {config[COUNT]}, and there are {num_taps} taps")
    check_layers(config, infos, where)
    layer = whole(config, where)
    known = parameter_names(layer, norms, num_taps)
    tensors, dropped = sort_names(infos, PREFIXES, known)
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
    )


def is_deepseek(architectures: Iterable[str]) -> bool:
    return any(name.startswith(DEEPSEEK) for name in architectures)


def parameter_names(layer: Mapping[str, Any], norms: Mapping[str, bool], num_taps: int) -> set[str]:
    """What a head of this kind has, an embedding of its own among it."""
    return set(shapes(ModelConfig.read(layer, "config.json"), num_taps, 1, 1, norms, True))


def check_layers(config: Mapping[str, Any], infos: Collection[str], where: str) -> None:
    """Raises CheckpointError when the config declares another number of layers than there are, or more than one."""
    declared, present = Keys(config, where).integer("num_hidden_layers"), len(set(_layers(infos)))
    if declared != present:
        raise CheckpointError(
            f"{where}: num_hidden_layers is {declared}, the tensors are those of {present} "
            f"layer{'' if present == 1 else 's'}"
        )
    if declared != 1:
        raise CheckpointError(f"{where}: num_hidden_layers is {declared}: heads of one layer are supported")


def _layers(names: Collection[str]) -> Iterator[str]:
    for name in names:
        parts = name.split(".")
        if parts[0] == LAYER:
            yield "0"
        elif parts[0] in ("layers", "additional_layers") and len(parts) > 2:
            yield parts[1] if parts[0] == "layers" else f"additional {parts[1]}"


def _word(value: Any) -> str:
    return str(value).lower()
