"""What transformers drafts with the MTP layer of a checkpoint: one token a step, and for which text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

Proposal = tuple[list[int], list[int]]


def propose(
    path: Path, prompt: list[int], count: int, dtype: torch.dtype = torch.float32, number: int | None = None
) -> tuple[list[int], list[Proposal]]:
    """The prompt with `count` greedy tokens, and on the way there each text with what was proposed after it.

    transformers knows the layer by its number in the published models. number: the one that it has here, in a model of
    any family.
    """
    from transformers import AutoModelForCausalLM
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    found: list[Proposal] = []
    candidates = MTPCandidateGenerator.get_candidates

    def record(self: Any, input_ids: torch.Tensor, *args: Any, **more: Any) -> Any:
        ids, logits = candidates(self, input_ids, *args, **more)
        text, proposed = ids[0, : input_ids.shape[1]].tolist(), ids[0, input_ids.shape[1] :].tolist()
        if proposed:
            found.append((text, proposed))
        return ids, logits

    # The grouped experts of transformers know no float64.
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager")
    if number is not None:
        model.config.num_mtp_layers = 1
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{number}\."]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(MTPCandidateGenerator, "get_candidates", record)
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, use_mtp=True, eos_token_id=None
        )
    return ids[0].tolist(), found
