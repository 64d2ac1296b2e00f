"""The router against the published rule, row by row; experts against a loop; what is not chosen is not read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.moe import Experts, MoE, Router, Routing

WIDTH = 10
GREEDY = Routing(8, 3, "softmax", False, 1, 1, 1, normalised=False, scale=1.0)
LIMITED = replace(GREEDY, experts=12, chosen=3, groups=4, kept_groups=2, scale=16.0)
NOAUX = Routing(16, 4, "sigmoid", True, 4, 2, 2, normalised=True, scale=2.5)
ROUTINGS = {
    "V2-Lite": GREEDY,
    "V2": LIMITED,
    "V2 normalised": replace(GREEDY, normalised=True),
    "V3": NOAUX,
    "V3 not normalised": replace(NOAUX, normalised=False),
    "V3 without groups": replace(NOAUX, groups=1, kept_groups=1),
    "V3 with all groups kept": replace(NOAUX, kept_groups=4),
    "one expert": replace(GREEDY, chosen=1),
    "all experts": replace(GREEDY, chosen=8),
}


def filled(module: Any, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(seed)
    module.to(dtype)
    for parameter in module.parameters():
        # A bias is smaller than what scores differ by, so that both have a part in the choice.
        scale = 0.2 if parameter.dim() == 1 else 1.0
        parameter.data = scale * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return module


def rows(count: int, seed: int = 9) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_the_rule(x: list[float], weight: list[list[float]], bias: list[float], r: Routing) -> dict[int, float]:
    """Expert to weight for one row, in plain Python."""
    logits = [sum(a * b for a, b in zip(x, row, strict=True)) for row in weight]
    if r.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    else:
        total = sum(math.exp(value) for value in logits)
        scores = [math.exp(value) / total for value in logits]
    choice = [score + b for score, b in zip(scores, bias, strict=True)]
    size = r.experts // r.groups
    groups = [range(g * size, (g + 1) * size) for g in range(r.groups)]
    groups.sort(key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[: r.group_best]))
    allowed = [e for group in groups[: r.kept_groups] for e in group]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: r.chosen]
    total = sum(scores[e] for e in chosen) if r.normalised else 1.0
    return {e: scores[e] / total * r.scale for e in chosen}


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_router_goes_by_the_rule(name: str) -> None:
    routing = ROUTINGS[name]
    router, x_TD = filled(Router(WIDTH, routing)), rows(60)
    bias = router.e_score_correction_bias
    weights, experts = router(x_TD)
    biases = [0.0] * routing.experts if bias is None else bias.tolist()
    seen: set[int] = set()
    for x, weight, expert in zip(x_TD.tolist(), weights.tolist(), experts.tolist(), strict=True):
        expected = by_the_rule(x, router.weight.tolist(), biases, routing)
        assert dict(zip(expert, weight, strict=True)) == pytest.approx(expected, rel=1e-12)
        seen |= expected.keys()
    assert len(seen) > routing.experts / 2
    if bias is not None:
        unbiased = [
            set(by_the_rule(x, router.weight.tolist(), [0.0] * routing.experts, routing)) for x in x_TD.tolist()
        ]
        assert sum(a != set(b) for a, b in zip(unbiased, experts.tolist(), strict=True)) > 10, "the bias decides"


def test_the_router_is_at_least_float32() -> None:
    """Two scores may be nearer than bfloat16 can tell."""
    router, x_TD = filled(Router(WIDTH, NOAUX)), rows(40).bfloat16()
    router.weight.data = router.weight.data.bfloat16()
    router.e_score_correction_bias.data = router.e_score_correction_bias.data.float()
    weights, experts = router(x_TD)
    exact = filled(Router(WIDTH, NOAUX))
    exact.weight.data = router.weight.data.double()
    exact.e_score_correction_bias.data = router.e_score_correction_bias.data.double()
    assert weights.dtype == torch.float32
    expected, chosen = exact(x_TD.double())
    assert torch.equal(experts.sort().values, chosen.sort().values)
    torch.testing.assert_close(weights.double().sort().values, expected.sort().values, rtol=1e-5, atol=0)


def one_by_one(experts: Experts, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor) -> Iterator[Tensor]:
    for x, weights, chosen in zip(x_TD, weight_TK, expert_TK.tolist(), strict=True):
        yield sum(w * experts[e](x[None])[0] for w, e in zip(weights, chosen, strict=True))


@pytest.mark.parametrize("count", [1, 2, 7, 100])
@pytest.mark.parametrize("serve", [False, True])
def test_experts_by_group_are_experts_one_by_one(count: int, serve: bool) -> None:
    moe = filled(MoE(WIDTH, 6, 0, NOAUX))
    if serve:
        for expert in moe.experts.each():
            expert.prepare("serve")
        moe.prepare("serve")
    x_TD = rows(count)
    expected = torch.stack(list(one_by_one(moe.experts, x_TD, *moe.gate(x_TD))))
    torch.testing.assert_close(moe(x_TD), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_experts_serve_as_they_were_however_they_are_kept(
    count: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one thread as they are, for several packed as everything else is."""
    moe = filled(MoE(16, 8, 0, NOAUX), dtype=torch.float32)
    x_TD = torch.randn(count, 16, generator=torch.Generator().manual_seed(3))
    expected = moe(x_TD)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for expert in moe.experts.each():
        expert.prepare("serve", single=True)
        assert hasattr(expert.down_proj, "weight") == (threads == 1 or not torch.backends.mkldnn.is_available())
    moe.prepare("serve")
    torch.testing.assert_close(moe(x_TD), expected, rtol=1e-5, atol=1e-5)


def test_shared_experts_take_every_row_unweighted() -> None:
    with_shared = filled(MoE(WIDTH, 6, 12, GREEDY))
    x_TD = rows(5)
    routed = with_shared.experts(x_TD, *with_shared.gate(x_TD))
    torch.testing.assert_close(with_shared(x_TD), routed + with_shared.shared_experts(x_TD))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_not_chosen_is_not_read(dtype: torch.dtype) -> None:
    """The other experts are full of NaN, and are never called."""
    moe, x_TD = filled(MoE(WIDTH, 6, 0, NOAUX), dtype=dtype), rows(2).to(dtype)
    expected = moe(x_TD)
    chosen = set(moe.gate(x_TD)[1].flatten().tolist())
    called: list[int] = []
    for index, expert in enumerate(moe.experts.each()):
        if index not in chosen:
            for parameter in expert.parameters():
                parameter.data.fill_(float("nan"))
        expert.down_proj.register_forward_pre_hook(lambda module, inputs, index=index: called.append(index))
        expert.prepare("serve")
    moe.prepare("serve")
    torch.testing.assert_close(moe(x_TD), expected, rtol=1e-5, atol=1e-5)
    assert len(chosen) < 16
    assert called == sorted(chosen), "each once, whatever the number of its rows"


def test_on_a_device_nothing_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which experts are chosen stays there: their weights lie side by side, and one product takes them all."""
    moe = MoE(16, 8, 0, NOAUX)
    filled(moe, dtype=torch.float32)
    x_TD = torch.randn(9, 16, generator=torch.Generator().manual_seed(3))
    expected = [moe(x_TD[:count]) for count in (1, 2, 9)]
    for expert in moe.experts.each():
        expert.prepare("serve", single=True)
    moe.prepare("serve")
    moe.experts.stack()

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a read")

    for method in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "nonzero"):
        monkeypatch.setattr(Tensor, method, refuse)
    found = [moe(x_TD[:count]) for count in (1, 2, 9)]
    monkeypatch.undo()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_gradients_go_to_what_was_chosen() -> None:
    moe, x_TD = filled(MoE(WIDTH, 6, 0, NOAUX)), rows(2).requires_grad_()
    moe(x_TD).sum().backward()
    chosen = set(moe.gate(x_TD)[1].flatten().tolist())
    assert {e for e, expert in enumerate(moe.experts) if expert.down_proj.weight.grad is not None} == chosen
    assert moe.gate.weight.grad is not None
    assert torch.autograd.gradcheck(lambda x: moe(x), (x_TD,), eps=1e-7, atol=1e-5)
