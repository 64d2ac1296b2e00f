"""MoE: a feed-forward part of many experts, of which each token goes through a few. It knows nothing about checkpoints.

Rows are sorted by expert and every expert that was chosen runs once, over all its rows; the weights of the others are
not read. Legend: T rows, D width, E experts, K chosen ones, G groups of experts, M = T * K rows sorted by expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specctl.layers import MLP, Purpose


@dataclass(frozen=True)
class Routing:
    """How experts are chosen.

    experts, chosen: E and K. scoring: what makes scores of the router's logits. biased: a learned bias is added to the
    scores for the choice alone. groups, kept_groups: experts are chosen from the kept_groups best of `groups` groups, a
    group being as good as the sum of its group_best best experts. normalised: the weights of a token are divided by
    their sum. scale: weights are multiplied by it in the end.
    """

    experts: int
    chosen: int
    scoring: Literal["softmax", "sigmoid"]
    biased: bool
    groups: int
    kept_groups: int
    group_best: int
    normalised: bool
    scale: float


class Router(nn.Module):
    """Which experts a row goes to, and with what weight; in float32 at least, as two scores may be very near."""

    def __init__(self, width: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(routing.experts, width))
        self.e_score_correction_bias = nn.Parameter(torch.empty(routing.experts)) if routing.biased else None

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the chosen experts, both [T, K]."""
        routing = self.routing
        logits_TE = self._logits(x_TD)
        score_TE = logits_TE.sigmoid() if routing.scoring == "sigmoid" else logits_TE.softmax(-1)
        choice_TE = score_TE.detach()
        if self.e_score_correction_bias is not None:
            choice_TE = choice_TE + self.e_score_correction_bias.detach()
        if routing.kept_groups < routing.groups:
            choice_TE = self._in_best_groups(choice_TE)
        expert_TK = choice_TE.topk(routing.chosen, dim=-1, sorted=False).indices
        weight_TK = score_TE.gather(1, expert_TK)
        if routing.normalised:
            weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
        return weight_TK * routing.scale, expert_TK

    def _logits(self, x_TD: Tensor) -> Tensor:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        if torch.is_autocast_enabled(x_TD.device.type):  # which would narrow what is wide
            with torch.autocast(x_TD.device.type, enabled=False):
                return F.linear(x_TD.to(wide), self.weight.to(wide))
        return F.linear(x_TD.to(wide), self.weight.to(wide))

    def _in_best_groups(self, choice_TE: Tensor) -> Tensor:
        """Minus infinity where an expert is in none of the best groups."""
        routing = self.routing
        choice_TGE = choice_TE.view(len(choice_TE), routing.groups, -1)
        group_TG = choice_TGE.topk(routing.group_best, dim=-1).values.sum(-1)
        kept_TK = group_TG.topk(routing.kept_groups, dim=-1, sorted=False).indices
        out_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter(1, kept_TK, False)
        return choice_TGE.masked_fill(out_TG[..., None], float("-inf")).flatten(1)

    def prepare(self, purpose: Purpose) -> None:
        if purpose == "serve":
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            self.weight = nn.Parameter(self.weight.detach().to(wide), requires_grad=False)


class Experts(nn.ModuleList):
    """E MLPs of one shape.

    After prepare("serve") on a device their weights lie in two tensors, and a pass reads nothing back to the host.
    """

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__(MLP(width, inner) for _ in range(count))
        self._stacked: tuple[Tensor, Tensor] | None = None

    def each(self) -> list[MLP]:
        return [expert for expert in self if isinstance(expert, MLP)]

    def forward(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor) -> Tensor:
        """The sum over the chosen experts, each times its weight, [T, D]."""
        if len(x_TD) == 1 and self._stacked is None:  # the common pass: nothing to sort
            out_KD = self._one_by_one(x_TD.expand(expert_TK.shape[1], -1), expert_TK[0])
            return (weight_TK @ out_KD.to(weight_TK.dtype)).to(x_TD.dtype)
        expert_M, order_M = expert_TK.flatten().sort(stable=True)
        row_M = order_M // expert_TK.shape[1]
        x_MD = x_TD.index_select(0, row_M)
        out_MD = self._one_by_one(x_MD, expert_M) if self._stacked is None else self._at_once(x_MD, expert_M)
        out_MD = out_MD * weight_TK.flatten().index_select(0, order_M)[:, None]
        return torch.zeros_like(x_TD).index_add_(0, row_M, out_MD.to(x_TD.dtype))

    def _one_by_one(self, x_MD: Tensor, expert_M: Tensor) -> Tensor:
        groups = [(number, len(list(same))) for number, same in groupby(expert_M.tolist())]
        sizes, experts = [size for _, size in groups], self.each()
        busy = [experts[number] for number, _ in groups]
        first = [expert.gate_up(x) for expert, x in zip(busy, torch.split(x_MD, sizes), strict=True)]
        # All of them activated in one go: on a CPU a call costs more than the numbers in it.
        gate_MI, up_MI = torch.cat(first).chunk(2, dim=-1)
        inner_MI = torch.split(F.silu(gate_MI) * up_MI, sizes)
        return torch.cat([expert.down_proj(inner) for expert, inner in zip(busy, inner_MI, strict=True)])

    def _at_once(self, x_MD: Tensor, expert_M: Tensor) -> Tensor:
        assert self._stacked is not None
        first_EDI, down_EID = self._stacked
        number_E = torch.arange(len(self), device=x_MD.device)
        end_E = torch.searchsorted(expert_M, number_E, right=True, out_int32=True)
        gate_MI, up_MI = F.grouped_mm(x_MD, first_EDI, offs=end_E).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate_MI) * up_MI, down_EID, offs=end_E)

    def prepare(self, purpose: Purpose) -> None:
        """After every expert was prepared by itself."""
        weight = next(self.parameters(), None)  # none: packed, which is for a CPU
        if purpose == "serve" and weight is not None and weight.device.type != "cpu":
            self.stack()

    def stack(self) -> None:
        """Lay the weights of the prepared experts side by side, where torch has a product for that."""
        weight = self.each()[0].down_proj.weight
        aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape)
        if weight.dtype in (torch.bfloat16, torch.float16, torch.float32) and aligned:
            firsts, downs = zip(*(expert.take() for expert in self.each()), strict=True)
            self._stacked = _stack(list(firsts)), _stack(list(downs))


def _stack(weights: list[Tensor]) -> Tensor:
    """[E, inputs, outputs], a view of [E, outputs, inputs]; empties the list."""
    stacked = weights[0].new_empty(len(weights), *weights[0].shape)
    for index in range(len(weights)):
        stacked[index] = weights[index]
        weights[index] = weights[index].new_empty(0)
    return stacked.transpose(1, 2)


class MoE(nn.Module):
    """Routed experts, and beside them one MLP (the shared experts, side by side) that every token goes through."""

    def __init__(self, width: int, inner: int, shared_inner: int, routing: Routing) -> None:
        super().__init__()
        self.gate = Router(width, routing)
        self.experts = Experts(routing.experts, width, inner)
        self.shared_experts = MLP(width, shared_inner) if shared_inner else None

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.experts(x_TD, *self.gate(x_TD))
        if self.shared_experts is not None:
            out_TD = out_TD + self.shared_experts(x_TD)
        return out_TD

    def prepare(self, purpose: Purpose) -> None:
        """Every expert is prepared by itself before."""
        self.gate.prepare(purpose)
        self.experts.prepare(purpose)
        if self.shared_experts is not None:
            self.shared_experts.prepare(purpose)
