"""Losses between what a draft says and what it should: cross-entropy to the data, forward KL and total variation to the
target; and between its final hidden states and the target's. Logits exist for a chunk of rows at a time and are
computed again for the gradient.

It knows neither models nor data: final hidden states come in, and the head's weight, whose gradient is added in place.
A head may have columns for a part of the target's ids only. Then no column is to be learnt where the label has none; of
KL what the target says of the others is left out of both sides, and of total variation it counts as missed.
Legend: R labelled rows (C of a chunk), D the draft's width, E the target's, V ids that the draft scores, M metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specctl.drafts import OutputHead, Scored

METRICS = ("ce", "kl", "tv", "top1", "feature")
"""What is summed over rows: the losses, and how often the draft's likeliest token is the label."""


@dataclass(frozen=True)
class Objective:
    """The weights of the losses; temperature: of both distributions in kl and tv; chunk: rows whose logits are held at
    a time; teacher_head: the target's final hidden states [C, E] to its logits, [C, V'], for kl and tv. feature: weight
    of the smooth L1 distance (quadratic up to a difference of 1, as EAGLE has it) between the final hidden states and
    the target's, which have to be as wide, averaged over their numbers. teacher_rows: of the target's matrix the rows
    that the draft scores, [V, E], where these are a part of them."""

    ce: float
    kl: float = 0.0
    tv: float = 0.0
    temperature: float = 1.0
    chunk: int = 1024
    teacher_head: Callable[[Tensor], Tensor] | None = None
    feature: float = 0.0
    teacher_rows: Tensor | None = None

    @property
    def needs_teacher(self) -> bool:
        return self.compares or self.feature > 0

    @property
    def compares(self) -> bool:
        """Whether it looks at the target's distributions."""
        return self.kl > 0 or self.tv > 0

    @property
    def weights(self) -> tuple[float, ...]:
        """Of METRICS in the loss."""
        return (self.ce, self.kl, self.tv, 0.0, self.feature)

    @torch.no_grad()
    def totals(self, teacher_RE: Tensor) -> Tensor | None:
        """The logarithms of what the exponentials of the target's logits, all of them, sum to. With them a chunk's
        logits are those of teacher_rows alone: of a large vocabulary a small part, at every step of a chain and for the
        gradient once more."""
        if not self.compares or self.teacher_rows is None:
            return None
        with torch.autocast(teacher_RE.device.type, enabled=False):
            total_R = [self.teacher_logits(chunk_CE).logsumexp(-1) for chunk_CE in torch.split(teacher_RE, self.chunk)]
        return torch.cat(total_R)

    def teacher_logits(self, teacher_CE: Tensor, rows_VE: Tensor | None = None) -> Tensor:
        """The target's logits at the objective's temperature, those of rows_VE or all; float32 at least."""
        if rows_VE is not None:
            logits = teacher_CE @ rows_VE.T
        else:
            assert self.teacher_head is not None
            logits = self.teacher_head(teacher_CE)
        return _wide(logits) if self.temperature == 1 else _wide(logits) / self.temperature

    def __call__(self, scored: Scored, head: OutputHead) -> tuple[Tensor, Tensor]:
        """The weighted loss, summed over rows, and the sums of METRICS (float64 [M], without weights or a gradient).

        backward() of the loss gives the final hidden states their gradient and adds the head's, if it is trained, to
        head.weight.grad where there is one: autograd would hold the largest gradient there is two or three times. Else
        it is left to autograd.
        """
        assert scored.teacher_RE is not None or not self.needs_teacher
        assert self.teacher_head is not None or not self.compares
        dtype = scored.final_RD.dtype
        if torch.is_autocast_enabled(scored.final_RD.device.type):
            dtype = torch.get_autocast_dtype(scored.final_RD.device.type)
        rows = _Rows(self, head, scored, dtype)
        left = head.weight if head.trained and head.weight.grad is None else None
        loss, sums = _ChunkedLoss.apply(scored.final_RD, left, rows)  # type: ignore[no-untyped-call]
        return loss, sums


@dataclass(frozen=True)
class _Rows:
    """One call's labelled rows. dtype: in which logits are multiplied out; from there on they are at least float32, and
    the target's are put in the same, whatever it computes in."""

    objective: Objective
    head: OutputHead
    scored: Scored
    dtype: torch.dtype

    def chunks(self) -> Iterator[slice]:
        for start in range(0, len(self.scored.label_R), self.objective.chunk):
            yield slice(start, start + self.objective.chunk)

    def weight(self) -> Tensor:
        """The head in the dtype it is multiplied in, [V, D]."""
        return self.head.weight.detach()[: self.head.vocab_size].to(self.dtype)

    def logits(self, chunk: slice, weight_VD: Tensor) -> Tensor:
        """[C, V], fresh: to be worked on in place."""
        return _wide(self.scored.final_RD[chunk].to(self.dtype) @ weight_VD.T)

    def teacher(self, chunk: slice) -> Tensor | None:
        """What the target says of the same ids, [C, V]: the logarithms of its probabilities at the objective's
        temperature, which need not sum to 1 where the draft's vocabulary is reduced. Fresh."""
        objective, scored = self.objective, self.scored
        if scored.teacher_RE is None or objective.teacher_head is None or not objective.compares:
            return None
        if scored.total_R is not None:
            logits = objective.teacher_logits(scored.teacher_RE[chunk], objective.teacher_rows)
            total_C1 = scored.total_R[chunk, None]
        else:
            logits = objective.teacher_logits(scored.teacher_RE[chunk])
            if self.head.ids_V is None:
                logits = logits[:, : self.head.vocab_size]
            total_C1 = logits.logsumexp(-1, keepdim=True)
            if self.head.ids_V is not None:
                logits = logits[:, self.head.ids_V]
        return logits.sub_(total_C1).to(torch.promote_types(self.dtype, torch.float32))

    def features(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """The final hidden states and the target's, [C, D] each, in one dtype."""
        assert self.scored.teacher_RE is not None
        final_CD, teacher_CD = _wide(self.scored.final_RD[chunk].detach()), self.scored.teacher_RE[chunk]
        assert final_CD.shape == teacher_CD.shape, "hidden states are compared number by number"
        return final_CD, teacher_CD.to(final_CD.dtype)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, final_RD: Tensor, left_VD: Tensor | None, rows: _Rows) -> tuple[Tensor, Tensor]:
        """left_VD: the head's weight where its gradient is autograd's to add."""
        ctx.rows, ctx.left = rows, left_VD is not None
        sums = torch.zeros(len(METRICS), dtype=torch.float64, device=final_RD.device)
        loss = torch.zeros((), dtype=torch.float64, device=final_RD.device)
        weight_M = sums.new_tensor(rows.objective.weights)
        with torch.autocast(final_RD.device.type, enabled=False):
            weight_VD = rows.weight()
            for chunk in rows.chunks():
                measured_MC = _measured(rows, chunk, weight_VD)
                sums += measured_MC.sum(-1)
                loss += (weight_M @ measured_MC) @ rows.scored.weight_R[chunk].to(sums.dtype)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _grad_sums: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows: _Rows = ctx.rows
        final_RD, head = rows.scored.final_RD.detach(), rows.head.weight
        grad_VD = torch.zeros_like(head) if ctx.left else head.grad
        grad_head_VD = grad_VD[: rows.head.vocab_size] if rows.head.trained and grad_VD is not None else None
        grad_RD = torch.zeros_like(final_RD)
        weight_R1 = (rows.scored.weight_R * grad_loss)[:, None]
        with torch.autocast(final_RD.device.type, enabled=False):
            weight_VD = rows.weight()
            for chunk in rows.chunks():
                grad_CV = _gradient(rows, chunk, weight_VD)
                if grad_CV is not None:
                    grad_CV.mul_(weight_R1[chunk].to(grad_CV.dtype))
                    grad_RD[chunk] = grad_CV.to(rows.dtype) @ weight_VD
                    if grad_head_VD is not None:
                        grad_head_VD.addmm_(grad_CV.to(head.dtype).T, final_RD[chunk].to(head.dtype))
                    del grad_CV
                if rows.objective.feature:
                    pull_CD = _pull(rows, chunk)
                    grad_RD[chunk] += pull_CD.mul_(weight_R1[chunk].to(pull_CD.dtype))
        return grad_RD, grad_VD if ctx.left else None, None


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _measured(rows: _Rows, chunk: slice, weight_VD: Tensor) -> Tensor:
    """METRICS of every row of a chunk, float64 [M, C]."""
    said = _measure(rows.objective, rows.logits(chunk, weight_VD), rows.teacher(chunk), rows.scored.label_R[chunk])
    feature_C = torch.zeros_like(said[0])
    if rows.objective.feature:
        feature_C = F.smooth_l1_loss(*rows.features(chunk), reduction="none").mean(-1).double()
    return torch.stack((*said, feature_C))


def _measure(
    objective: Objective, z_CV: Tensor, log_p_CV: Tensor | None, label_C: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ce, kl, tv and top1 of every row of a chunk, float64 [C] each; overwrites what it is given."""
    known_C, column_C1 = label_C >= 0, label_C.clamp(min=0)[:, None]
    hits_C = known_C & (z_CV.argmax(-1) == label_C)
    z_CV.sub_(z_CV.logsumexp(-1, keepdim=True))
    ce_C = -z_CV.gather(1, column_C1)[:, 0].double() * known_C
    kl_C = tv_C = torch.zeros_like(ce_C)
    if log_p_CV is not None:
        log_q_CV = _tempered(z_CV, objective.temperature)
        p_CV = log_p_CV.exp()
        mass_C = p_CV.sum(-1)
        # Of p divided by what is left of it; p itself where nothing is left out.
        kl_C = _dot(p_CV, log_p_CV.sub_(log_q_CV)).double() - torch.special.xlogy(mass_C, mass_C).double()
        missed_C = (1 - mass_C).clamp(min=0)
        tv_C = 0.5 * (p_CV.sub_(log_q_CV.exp_()).abs_().sum(-1) + missed_C).double()
    return ce_C, kl_C, tv_C, hits_C.to(ce_C.dtype)


def _tempered(log_p_CV: Tensor, temperature: float) -> Tensor:
    """In place, log-probabilities at another temperature."""
    if temperature == 1:
        return log_p_CV
    log_p_CV.div_(temperature)
    return log_p_CV.sub_(log_p_CV.logsumexp(-1, keepdim=True))


def _gradient(rows: _Rows, chunk: slice, weight_VD: Tensor) -> Tensor | None:
    """d loss / d logits of every row, [C, V], fresh; None where nothing is asked of them. With q of the draft and p of
    the target, both at temperature T, and m the sum of p, which is less than 1 where the draft's vocabulary is reduced:

    ce: q(T = 1) - onehot(label), 0 where the label has no column.   kl: (m q - p) / T.
    tv: q (g - <q, g>) / T, g = sign(q - p) / 2.
    """
    objective, label_C = rows.objective, rows.scored.label_R[chunk]
    if not objective.ce and not objective.compares:
        return None
    z_CV, log_p_CV = rows.logits(chunk, weight_VD), rows.teacher(chunk)
    grad_CV: Tensor | None = None
    if objective.ce:
        # Without a teacher the logits are not needed any more: the common case holds them once.
        grad_CV = _softmax(z_CV if log_p_CV is None else z_CV.clone())
        known_C1 = (label_C >= 0).to(grad_CV.dtype)[:, None]
        grad_CV.scatter_add_(1, label_C.clamp(min=0)[:, None], -known_C1)
        grad_CV.mul_(known_C1 * objective.ce)
    if log_p_CV is None:
        assert grad_CV is not None
        return grad_CV
    temperature = objective.temperature
    q_CV, p_CV = _softmax(z_CV.div_(temperature)), log_p_CV.exp_()
    if objective.kl:
        mass_C1 = p_CV.sum(-1, keepdim=True)
        away_CV = q_CV * mass_C1 if objective.tv else q_CV.mul_(mass_C1)
        away_CV.sub_(p_CV).mul_(objective.kl / temperature)
        grad_CV = away_CV if grad_CV is None else grad_CV.add_(away_CV)
    if objective.tv:
        g_CV = torch.sub(q_CV, p_CV, out=p_CV).sign_().mul_(0.5)
        g_CV.sub_(_dot(q_CV, g_CV)[:, None]).mul_(q_CV).mul_(objective.tv / temperature)
        grad_CV = g_CV if grad_CV is None else grad_CV.add_(g_CV)
    assert grad_CV is not None
    return grad_CV


def _pull(rows: _Rows, chunk: slice) -> Tensor:
    """d loss / d final hidden states of every row, as far as these are compared with the target's, [C, D]; fresh."""
    final_CD, teacher_CD = rows.features(chunk)
    return (final_CD - teacher_CD).clamp_(-1, 1).mul_(rows.objective.feature / final_CD.shape[1])


def _softmax(z_CV: Tensor) -> Tensor:
    """In place."""
    return z_CV.sub_(z_CV.logsumexp(-1, keepdim=True)).exp_()


def _dot(x_CV: Tensor, y_CV: Tensor) -> Tensor:
    """Row by row, without a product of the size of both."""
    return torch.bmm(x_CV[:, None], y_CV[:, :, None]).flatten()
