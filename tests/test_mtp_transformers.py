"""The token that an MTP layer proposes is the one that transformers' use_mtp does, after every text on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_mtp
import torch
from decoding import engine, greedy_params, model, mtp_draft
from fixtures import Make
from torch import Tensor
from transformers_mtp import Proposal, propose

from specctl.drafts import Draft
from specctl.engine.sequence import Sequence
from specctl.engine.verify import Verdict

COUNT = 16
PROMPTS = [
    [tiny.BOS, *((5 * i + 3 * (j % 11)) % 256 for j in range(length))] for i, length in enumerate((0, 3, 16, 37))
]


def proposals(path: Path, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[Proposal]]]:
    """Ours, as transformers_mtp has them; all prompts at once."""
    found: list[list[Proposal]] = [[] for _ in prompts]

    def observe(sequences: list[Sequence], draft: Draft, scores_BMV: Tensor, verdict: Verdict) -> None:
        for b, (s, length) in enumerate(zip(sequences, draft.length, strict=True)):
            if length:
                found[s.request_id].append((s.tokens(0, len(s)), draft.token_BK[b, :length].tolist()))

    e = engine(model(path), mtp_draft(path), 1, max_sequences=len(prompts))
    e.observer = observe
    texts = e.run([(ids, greedy_params(COUNT)) for ids in prompts])
    return [s.tokens(0, len(s)) for (s,) in texts], found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "layers", "more"),
    [
        ("deepseek_v3", 1, {"first_k_dense_replace": 0}),
        ("deepseek_v3", 2, {}),
        ("deepseek_v3", 1, {"first_k_dense_replace": 0, "rope_scaling": None}),
        ("deepseek_v2", 1, {"first_k_dense_replace": 0}),
        ("deepseek_v2", 2, {}),
        ("llama", 1, {}),
    ],
)
def test_it_proposes_what_transformers_proposes(make: Make, family: str, layers: int, more: dict[str, Any]) -> None:
    write = tiny.llama if family == "llama" else tiny.deepseek
    path = make(tiny_mtp.mtp, of=make(write, seed=1, model_type=family, num_hidden_layers=layers, **more))
    texts, found = proposals(path, PROMPTS)
    expected = [propose(path, prompt, COUNT, torch.float64, number=layers) for prompt in PROMPTS]
    assert texts == [text for text, _ in expected]
    assert found == [each for _, each in expected]
    proposed = [token for each in found for _, tokens in each for token in tokens]
    assert len(proposed) > 30
    assert len(set(proposed)) > 10, "the drafts are no echo"
