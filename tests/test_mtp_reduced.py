"""An MTP layer in a directory of its own that scores a part of the target's vocabulary: which ids, and whose rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_deepseek
import tiny_mtp
import torch
from decoding import engine, greedy_params, model, mtp_draft, outputs
from fixtures import Make
from test_eagle3_layouts import changed
from test_mtp import PROMPTS
from torch import Tensor

from specctl.errors import CheckpointError, IncompatiblePair
from specctl.options import ModelOptions
from specctl.pair import open_draft, open_target

IDS = (*range(0, 256, 3), tiny.END)


def blocks(target: Path, draft: Path) -> tuple[list[list[int]], list[Tensor]]:
    e, seen = engine(model(target), mtp_draft(draft, target), 2), list[Tensor]()
    e.observer = lambda sequences, drafted, scores, verdict: seen.append(drafted.token_BK)
    return outputs(e.run([(list(p), greedy_params(20)) for p in PROMPTS])), seen


@pytest.mark.parametrize("tied", [False, True])
def test_it_drafts_what_it_has_rows_for(make: Make, tied: bool) -> None:
    target = make(tiny.llama, seed=1, num_hidden_layers=1, tie_word_embeddings=tied)
    alone = make(tiny_mtp.mtp, of=target, alone="deepseek")
    text, seen = blocks(target, make(tiny_mtp.reduced, of=alone, ids=IDS))
    assert text == outputs(engine(model(target)).run([(list(p), greedy_params(20)) for p in PROMPTS]))
    proposed = {int(token) for block in seen for token in block.flatten()}
    assert len(proposed) > 10
    assert proposed <= set(IDS)


def test_with_all_ids_it_is_the_layer_without_a_table(make: Make) -> None:
    target = make(tiny.llama, seed=1, num_hidden_layers=1)
    alone = make(tiny_mtp.mtp, of=target, alone="deepseek")
    first, second = (blocks(target, path)[1] for path in (alone, make(tiny_mtp.reduced, of=alone, ids=range(264))))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("fp8", [False, True])
def test_rows_of_a_deepseek_target(make: Make, tmp_path: Path, fp8: bool) -> None:
    """Whose weights are stored in FP8, its head not."""
    target = make(tiny_deepseek.deepseek, fp8=fp8)
    config, tensors = tiny.read(target)
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    kept = {name: tensor for name, tensor in kept.items() if not name.endswith(copies)}
    alone = tiny.write(tmp_path / "alone", config, kept, tokenizer=False)
    ids = range(0, config["vocab_size"], 2)
    reduced = tiny_mtp.reduced(tmp_path / "reduced", of=alone, ids=ids)
    opened = open_target(str(target), ModelOptions(dtype="float64"))
    drafter = open_draft(str(reduced), opened).drafter
    rows: Any = drafter.model._rows[0]  # type: ignore[attr-defined]
    expected = tensors["lm_head.weight"].double()[list(ids)]
    state = torch.randn(3, expected.shape[1], dtype=torch.float64)
    torch.testing.assert_close(rows(state), state @ expected.T)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda c, t: t.pop("d2t"), "d2t is missing, and the layer has 87 of 264 token ids"),
        (lambda c, t: c.update(draft_vocab_size=80), "d2t is int64 [87], the head has 80 rows"),
        (lambda c, t: t["d2t"].add_(300), "the target has 264 ids"),
        (lambda c, t: t["t2d"].fill_(True), "t2d says id"),
        (
            lambda c, t: t.update({"model.layers.1.shared_head.head.weight": torch.ones(264, 32)}),
            "has both d2t and model.layers.1.shared_head.head.weight",
        ),
    ],
)
def test_what_is_refused(make: Make, tmp_path: Path, edit: Any, said: str) -> None:
    target = make(tiny.llama, seed=1, num_hidden_layers=1)
    of = make(tiny_mtp.reduced, of=make(tiny_mtp.mtp, of=target, alone="deepseek"), ids=IDS)
    path = changed(tmp_path / "changed", of, edit)
    with pytest.raises((CheckpointError, IncompatiblePair)) as caught:
        open_draft(str(path), open_target(str(target), ModelOptions()))
    assert said in str(caught.value)
