"""Tiny but real Hugging Face checkpoints, written in milliseconds and without a network.

Models speak the vocabulary of one byte-level tokenizer: token id = byte value, then the special tokens below. Every
function writes a directory that transformers can load as it is, and returns its path.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tiny_deepseek
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

BOS, UNUSED, START, END, PAD = 256, 257, 258, 259, 260  # END is EOS
SPECIAL = ["<s>", "</s>", "<|start|>", "<|end|>", "<pad>"]
VOCAB = 264  # three ids more than the tokenizer has, as padded embeddings have
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
ABSENT = object()  # as a config override: the key is left out
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
FLOOR = 1e-30  # the probability of what a table does not list

Rows = Mapping[int, Mapping[int, float]]


def byte_tokenizer(
    path: Path, *, swap: tuple[int, int] | None = None, bos_post: bool = False, chat_template: str | None = TEMPLATE
) -> Path:
    """Write the byte tokenizer. swap: two bytes that exchange their ids (a vocabulary that differs). bos_post: the
    tokenizer puts <s> before every text by itself, as Llama 3's does."""
    path.mkdir(parents=True, exist_ok=True)
    id_of = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    if swap is not None:
        first, second = (_byte_symbols()[byte] for byte in swap)
        id_of[first], id_of[second] = id_of[second], id_of[first]
    tokenizer = Tokenizer(models.BPE(vocab=id_of, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    if bos_post:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|end|>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
    }
    _write_json(path / "tokenizer_config.json", config)
    if chat_template is not None:
        (path / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return path


def rope(kind: str, spelling: str = "parameters", theta: float = 10000.0, **values: Any) -> dict[str, Any]:
    """Config overrides that ask for a rotation: spelling "parameters" is transformers 5's rope_parameters, "scaling" is
    rope_theta beside rope_scaling, "type" is the same with the key `type` in place of `rope_type`."""
    if spelling == "parameters":
        return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **values}}
    key = {"scaling": "rope_type", "type": "type"}[spelling]
    return {
        "rope_parameters": ABSENT,
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {key: kind, **values},
    }


def llama(
    path: Path,
    *,
    seed: int = 0,
    model_type: str = "llama",
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    tokenizer: bool = True,
    **config_overrides: Any,
) -> Path:
    """A random model of the Llama family whose attention works and whose greedy text is diverse. The head is not tied
    unless tie_word_embeddings=True. Any key of config.json can be given; ABSENT leaves one out."""
    config = base_config(model_type, dtype) | config_overrides
    config = {key: value for key, value in config.items() if value is not ABSENT}
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(name, shape, generator).to(dtype) for name, shape in shapes(config).items()}
    return write(path, config, tensors, shards=shards, tokenizer=tokenizer)


def deepseek(
    path: Path,
    *,
    seed: int = 0,
    model_type: str = "deepseek_v3",
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    tokenizer: bool = True,
    **config_overrides: Any,
) -> Path:
    """A random DeepSeek V2 or V3 whose attention works, whose experts differ and whose greedy text is diverse; without
    an MTP layer unless num_nextn_predict_layers says so. Any key of config.json can be given; ABSENT leaves one out."""
    config = deepseek_config(model_type, dtype) | config_overrides
    generator = torch.Generator().manual_seed(seed)
    names = tiny_deepseek.shapes({"num_nextn_predict_layers": 0, "n_shared_experts": 0} | config)
    if model_type == "deepseek_v2":
        names = {name: shape for name, shape in names.items() if not name.endswith("correction_bias")}
    tensors = {name: _random(name, shape, generator).to(dtype) for name, shape in names.items()}
    for name in tensors:
        if name.endswith("correction_bias"):
            tensors[name] = tensors[name].float()
    config = {key: value for key, value in config.items() if value is not ABSENT}
    return write(path, config, tensors, shards=shards, tokenizer=tokenizer)


def near(path: Path, *, of: Path, noise: float = 0.02, seed: int = 7) -> Path:
    """The same model with noise on its matrices, `noise` times the deviation of each: a draft that is often right."""
    generator = torch.Generator().manual_seed(seed)
    config, tensors = read(of)
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            error = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * tensor.double().std() * noise
            tensors[name] = (tensor.double() + error).to(tensor.dtype)
    return derive(path, of, config, tensors)


def table(path: Path, rows: Rows, *, vocab: int = VOCAB, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """A genuine Llama whose next-token distribution is exactly rows[last token], {next: probability}; uniform after a
    token without a row.

    Embeddings are one-hot and attention and MLP add zero, so the last norm gives sqrt(width) * one-hot, and the head
    holds log p / sqrt(width). The width is the next power of four, so that the root and the mean square are exact in
    float32 (the eps of 1e-12 is lost in rounding) and the logits are log p to the last bit but one.
    """
    width = _table_width(vocab)
    config = base_config("llama", dtype) | {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "rms_norm_eps": 1e-12,
        **overrides,
    }
    return write(path, config, _table_tensors(shapes(config), rows, dtype))


def deepseek_table(
    path: Path,
    rows: Rows,
    *,
    vocab: int = VOCAB,
    model_type: str = "deepseek_v3",
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """The same as a genuine DeepSeek, whose latents and experts are all there and add zero."""
    small = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size"), 2)
    config = deepseek_config(model_type, dtype)
    config |= small | {
        "vocab_size": vocab,
        "hidden_size": _table_width(vocab),
        "moe_intermediate_size": 2,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "q_lora_rank": None if config["q_lora_rank"] is None else 4,
        "kv_lora_rank": 4,
        "rms_norm_eps": 1e-12,
        "rope_scaling": None,
    }
    if model_type == "deepseek_v3":
        config |= {"n_group": 2, "topk_group": 1}
    config |= overrides
    names = tiny_deepseek.shapes({"num_nextn_predict_layers": 0} | config)
    if model_type == "deepseek_v2":
        names = {name: shape for name, shape in names.items() if not name.endswith("correction_bias")}
    return write(path, config, _table_tensors(names, rows, dtype))


def _table_width(vocab: int) -> int:
    return int(4 ** math.ceil(math.log(vocab, 4)))


def _table_tensors(names: Mapping[str, tuple[int, ...]], rows: Rows, dtype: torch.dtype) -> dict[str, Tensor]:
    """All zero, but for norms, the embedding and the head."""
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in names.items()}
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name].fill_(1.0)
        if name.endswith("correction_bias"):
            tensors[name] = tensors[name].float()
    tensors["model.embed_tokens.weight"].fill_diagonal_(1.0)
    vocab, width = names["model.embed_tokens.weight"]
    log_p = torch.full((vocab, width), math.log(FLOOR), dtype=torch.float64)
    for last, row in rows.items():
        assert abs(sum(row.values()) - 1) < 1e-9, f"probabilities after {last} sum to {sum(row.values())}"
        for following, probability in row.items():
            log_p[following, last] = math.log(max(probability, FLOOR))
    tensors["lm_head.weight"] = (log_p / math.sqrt(width)).to(dtype)
    return tensors


def chain(text: str | bytes, end: int = END) -> dict[int, dict[int, float]]:
    """Rows for a text that is certain: each byte is followed by the next, the last one by `end`. A newline (the end of
    the generation prompt) is followed by what follows the first byte, so that chat and completion say the same."""
    ids = text.encode() if isinstance(text, str) else text
    assert len(set(ids)) == len(ids), "a byte that comes twice has two followers"
    rows = {last: {following: 1.0} for last, following in zip(ids, [*ids[1:], end], strict=True)}
    return {10: rows[ids[0]]} | rows


def padded(path: Path, *, of: Path, rows: int = 272) -> Path:
    """The same model with more vocabulary rows, whose logits are huge: whoever does not slice them off, says them."""
    config, tensors = read(of)
    more = rows - config["vocab_size"]
    assert more >= 2, f"{rows} rows are not two more than {config['vocab_size']}"
    embedding, head = (tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    sign = torch.ones(more, 1, dtype=head.dtype)
    sign[::2] = -1  # one of the two signs is above everything, whatever the hidden state is
    tensors["model.embed_tokens.weight"] = torch.cat([embedding, embedding[:more]])
    tensors["lm_head.weight"] = torch.cat([head, sign * 1000 * torch.ones_like(head[:more])])
    return derive(path, of, config | {"vocab_size": rows}, tensors)


def few_layers(path: Path, *, of: Path, layers: Sequence[int]) -> Path:
    """Some layers of a model, in the given order, with its embedding, last norm and head: a draft for it."""
    config, tensors = read(of)
    kept = {name: tensor for name, tensor in tensors.items() if ".layers." not in name}
    for index, layer in enumerate(layers):
        prefix = f"model.layers.{layer}."
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                kept[f"model.layers.{index}.{name.removeprefix(prefix)}"] = tensor
    return derive(path, of, config | {"num_hidden_layers": len(layers)}, kept)


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a config's checkpoint by name, in the order of the forward pass."""
    width, inner, family = config["hidden_size"], config["intermediate_size"], config["model_type"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or (128 if family == "qwen3" else width // heads)
    q, kv = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    attention_bias = bool(config.get("attention_bias")) and family in ("llama", "qwen3")
    mlp_bias = bool(config.get("mlp_bias")) and family == "llama"
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], width)}

    def linear(name: str, outputs: int, inputs: int, bias: bool) -> None:
        found[f"{name}.weight"] = (outputs, inputs)
        if bias:
            found[f"{name}.bias"] = (outputs,)

    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        found[f"{layer}.input_layernorm.weight"] = (width,)
        for name, outputs in (("q", q), ("k", kv), ("v", kv)):
            linear(f"{layer}.self_attn.{name}_proj", outputs, width, attention_bias or family == "qwen2")
        linear(f"{layer}.self_attn.o_proj", width, q, attention_bias)
        if family == "qwen3":
            found[f"{layer}.self_attn.q_norm.weight"] = found[f"{layer}.self_attn.k_norm.weight"] = (head_dim,)
        found[f"{layer}.post_attention_layernorm.weight"] = (width,)
        linear(f"{layer}.mlp.gate_proj", inner, width, mlp_bias)
        linear(f"{layer}.mlp.up_proj", inner, width, mlp_bias)
        linear(f"{layer}.mlp.down_proj", width, inner, mlp_bias)
    found["model.norm.weight"] = (width,)
    if not config.get("tie_word_embeddings"):
        linear("lm_head", config["vocab_size"], width, False)
    return found


def write(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, shards: int = 1, tokenizer: bool = True
) -> Path:
    """Write any config and tensors as a checkpoint directory, in one file or in shards with an index."""
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    _write_json(path / "generation_config.json", special)
    if shards == 1:
        save_file(_contiguous(tensors), path / "model.safetensors", metadata={"format": "pt"})
    else:
        _write_shards(path, tensors, shards)
    return byte_tokenizer(path) if tokenizer else path


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A directory's config and all its tensors."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return json.loads((path / "config.json").read_text()), tensors


def base_config(model_type: str = "llama", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The config.json that llama() starts from."""
    config = {
        "architectures": [ARCHITECTURES.get(model_type, "LlamaForCausalLM")],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": BOS,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if model_type == "mistral":
        config["sliding_window"] = None
    if model_type == "qwen3":
        config["head_dim"] = 8
    return config


def deepseek_config(model_type: str = "deepseek_v3", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The config.json that deepseek() starts from: of V3 (also R1 and V3.1), or of V2-Lite."""
    config: dict[str, Any] = {
        "architectures": [f"Deepseek{model_type.removeprefix('deepseek_').upper()}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
        "bos_token_id": BOS,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if model_type == "deepseek_v2":
        routing = {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax"}
        routing |= {"norm_topk_prob": False, "routed_scaling_factor": 1.0}
        config["rope_scaling"] |= {"mscale": 0.707, "mscale_all_dim": 0.707}
        return config | routing | {"q_lora_rank": None}
    routing = {"n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return config | routing | {"norm_topk_prob": True, "routed_scaling_factor": 2.5}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith((".bias", "correction_bias")):
        return 0.3 * noise
    # Far above the usual 0.02: small weights would leave the embedding alone in the residual, and the model an echo.
    return noise if name == "model.embed_tokens.weight" else 3.4 / math.sqrt(shape[1]) * noise


def derive(path: Path, of: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    write(path, config, tensors, tokenizer=False)
    for file in of.iterdir():
        if not re.search(r"config\.json$|safetensors", file.name) or file.name == "tokenizer_config.json":
            shutil.copyfile(file, path / file.name)
    return path


def _write_shards(path: Path, tensors: Mapping[str, Tensor], shards: int) -> None:
    names = sorted(tensors)
    assert 1 < shards <= len(names), f"{len(names)} tensors do not fill {shards} shards"
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[index::shards]}
        weight_map |= dict.fromkeys(part, file)
        save_file(_contiguous(part), path / file, metadata={"format": "pt"})
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(path / "model.safetensors.index.json", index_file)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _byte_symbols() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte: itself, or the next one from U+0100."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in kept]
    return [chr(byte if byte in kept else 0x100 + moved.index(byte)) for byte in range(256)]
