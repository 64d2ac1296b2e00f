"""Tokenizers that are not byte-level, written as files: SentencePiece-style with byte fallback, and plain words."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

WORDS = ["▁", "▁▁", "a", "b", "h", "i", "e", "l", "o", ".", "▁a", "hi", "▁hi", "el", "lo", "hel", "é", "▁é", "世"]
MERGES = [("▁", "▁"), ("▁", "a"), ("h", "i"), ("▁", "hi"), ("e", "l"), ("l", "o"), ("h", "el"), ("▁", "é")]
FIRST_BYTE, FIRST_WORD = 3, 3 + 256


def sentencepiece(path: Path, *, metaspace: bool = False) -> Path:
    """Ids: <unk>, <s>, </s>, 256 fallback bytes, WORDS, then an added token that is special and one that is not.

    metaspace: the decoder is Metaspace alone, without byte fallback, as some converted tokenizers have it.
    """
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Metaspace() if metaspace else decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<note>", normalized=False)])
    return _save(path, tokenizer)


def words(path: Path) -> Path:
    """Whole words without any decoder: the text is the tokens with spaces between them."""
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2, "<unk>": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return _save(path, tokenizer)


def _save(path: Path, tokenizer: Tokenizer) -> Path:
    path.mkdir(parents=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
