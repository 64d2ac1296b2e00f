"""Which family's MTP weights a checkpoint has. DeepSeek-V3, R1 and V3.1 are converted; the others are refused by name.

A prefix alone tells nothing: the same `mtp.` holds a DSpark drafter in one model and an MTP layer in the next. So what
is asked is which modules there are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from specctl.errors import CheckpointError

SUPPORTED = "deepseek_v3"


@dataclass(frozen=True)
class Family:
    """model_type: a pattern for config.json's key. modules: patterns for tensor names, each of which some tensor
    fits."""

    name: str
    model_type: str = ""
    modules: tuple[str, ...] = ()


# Asked in this order, by tensors first: a checkpoint's own tensors are more to be trusted than its label.
BY_TENSORS = (
    Family("DSpark (a block drafter, not MTP)", modules=(r"mtp\.\d+\.main_proj\.",)),
    Family("DSpark (a block drafter, not MTP)", modules=(r"mtp\.\d+\.markov_head\.",)),
    Family("DeepSeek-V4", modules=(r"mtp\.\d+\.e_proj\.", r"mtp\.\d+\.h_proj\.")),
    Family("Qwen4-Exp", modules=(r"mtp\.fc_embedding\.", r"mtp\.fc_hidden\.")),
    Family("Qwen3-Next, Qwen3.5 or Exaone", modules=(r"mtp\.fc\.", r"mtp\.pre_fc_norm_")),
    Family("MiMo-7B", modules=(r"model\.mtp_layers\.\d+\.input_proj\.",)),
    Family("LongCat-Flash", modules=(r"model\.mtp\.layers\.\d+\.enorm\.m\.",)),
    Family("Inkling", modules=(r"model\.mtp\.layers\.\d+\.(input_proj|embed_norm)\.",)),
    Family("MiMo-V2", modules=(r"model\.mtp\.layers\.\d+\.pre_mlp_layernorm\.",)),
    Family("MiniMax-M3", modules=(r"model\.mtp\.layers\.\d+\.transformer_layer\.",)),
    Family("ERNIE-4.5-MoE", modules=(r"(model\.)?mtp_(block|linear_proj|emb_norm)\.",)),
    Family("Nemotron-H", modules=(r"(language_model\.)?mtp\.layers\.\d+\.(eh_proj|enorm|final_layernorm)\.",)),
    Family("Gemma-4 assistant", modules=(r"(model\.)?pre_projection\.",)),
    Family("Step-3.5", modules=(r"model\.layers\.\d+\.(transformer\.)?shared_head\.output\.",)),
    Family("Bailing or Ling", modules=(r"model\.layers\.\d+\.eh_proj\.", r"model\.layers\.\d+\.attention\.")),
    Family("GLM-OCR or GLM-5.3-Flash", modules=(r"model\.language_model\.layers\.\d+\.eh_proj\.",)),
    Family("DeepSeek-V3.2 or GLM-5 (with an indexer)", modules=(r"(model\.)?layers\.\d+\.self_attn\.indexer\.",)),
    Family(
        "Hunyuan V3 or another", modules=(r"model\.layers\.\d+\.eh_proj\.", r"model\.layers\.\d+\.final_layernorm\.")
    ),
)
BY_MODEL_TYPE = (
    Family("DeepSeek-V3.2", r"deepseek_v32"),
    Family("DeepSeek-V4", r"deepseek_v4.*"),
    Family("GLM-4.5 to 4.7", r"glm4_moe(_lite)?"),
    Family("GLM-5", r"glm_moe_dsa|glm5.*"),
    Family("GLM-OCR", r"glm_ocr"),
    Family("Qwen", r"qwen(3_next|3_5|3_6|3_8|4).*"),
    Family("Exaone", r"exaone.*"),
    Family("MiMo", r"mimo.*"),
    Family("LongCat-Flash", r"longcat.*"),
    Family("ERNIE-4.5-MoE", r"ernie.*"),
    Family("Nemotron-H", r"nemotron_h.*"),
    Family("Step-3.5", r"step3.*"),
    Family("Bailing or Ling", r"bailing.*"),
    Family("Hunyuan V3", r"hy_v3|hunyuan.*"),
    Family("openPangu", r".*pangu.*"),
    Family("Kimi-K3", r"kimi_k3.*"),
    Family("MiniMax-M3", r"minimax.*"),
    Family("Inkling", r"inkling.*"),
    Family("Gemma-4 assistant", r"gemma4.*"),
)


def by_tensors(names: Collection[str]) -> str | None:
    """The family whose MTP or drafting weights these are, None for DeepSeek-V3 or for no family that is known."""
    # Hundreds of experts say nothing that one does not: only names without them are asked.
    few = [name for name in names if ".experts." not in name]
    for family in BY_TENSORS:
        if all(any(re.match(module, name) for name in few) for module in family.modules):
            return family.name
    return None


def by_label(config: Mapping[str, Any]) -> str | None:
    """The same by config.json alone, whether there are such weights or not."""
    model_type = config.get("model_type")
    if isinstance(model_type, str):
        for family in BY_MODEL_TYPE:
            if re.fullmatch(family.model_type, model_type):
                return family.name
    return None


def refuse_others(config: Mapping[str, Any], names: Collection[str], where: str) -> None:
    """Raises CheckpointError for everything but DeepSeek-V3, R1 and V3.1, with the family's name where it is known."""
    family = by_tensors(names) or by_label(config)
    if family is not None:
        raise CheckpointError(
            f"{where}: has the weights of {family}, which are not converted, expected DeepSeek-V3, R1 or V3.1"
        )
    if config.get("model_type") != SUPPORTED:
        raise CheckpointError(
            f"{where}: model_type is {config.get('model_type')!r}, not a DeepSeek MTP model, expected {SUPPORTED!r}"
        )
