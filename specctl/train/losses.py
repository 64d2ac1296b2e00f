"""Losses between what a draft says and what it should: cross-entropy to the data, forward KL and total variation to the
target. Logits exist for a chunk of rows at a time and are computed again for the gradient.

It knows neither models nor data: final hidden states come in, and the head's weight, whose gradient is added in place.
Legend: R labelled rows (C of a chunk), D the draft's width, E the target's, V ids that draft and target share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

METRICS = ("ce", "kl", "tv", "top1")
"""What is summed over rows: the three losses, and how often the draft's likeliest token is the label."""


@dataclass(frozen=True)
class Objective:
    """The weights of the losses; temperature: of both distributions in kl and tv; chunk: rows whose logits are held at
    a time; teacher_head: the target's final hidden states [C, E] to its logits [C, V'], V' >= V, for kl and tv."""

    ce: float
    kl: float = 0.0
    tv: float = 0.0
    temperature: float = 1.0
    chunk: int = 1024
    teacher_head: Callable[[Tensor], Tensor] | None = None

    @property
    def needs_teacher(self) -> bool:
        return self.kl > 0 or self.tv > 0

    def __call__(
        self, final_RD: Tensor, head: nn.Parameter, vocab_size: int, label_R: Tensor, teacher_RE: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The weighted loss, summed over rows, and the sums of METRICS (float64 [4], without a gradient).

        backward() of the loss gives final_RD its gradient and adds the head's to head.grad, which has to be there:
        autograd would hold the largest gradient there is two or three times.
        """
        assert (teacher_RE is not None and self.teacher_head is not None) or not self.needs_teacher
        assert head.grad is not None or not torch.is_grad_enabled()
        dtype = final_RD.dtype
        if torch.is_autocast_enabled(final_RD.device.type):
            dtype = torch.get_autocast_dtype(final_RD.device.type)
        rows = _Rows(self, head, vocab_size, label_R, teacher_RE, dtype)
        loss, sums = _ChunkedLoss.apply(final_RD, rows)  # type: ignore[no-untyped-call]
        return loss, sums


@dataclass(frozen=True)
class _Rows:
    """One call's labelled rows. dtype: in which logits are multiplied out; from there on they are at least float32."""

    objective: Objective
    head: nn.Parameter
    vocab_size: int
    label_R: Tensor
    teacher_RE: Tensor | None
    dtype: torch.dtype

    def chunks(self) -> Iterator[slice]:
        for start in range(0, len(self.label_R), self.objective.chunk):
            yield slice(start, start + self.objective.chunk)

    def weight(self) -> Tensor:
        """The head in the dtype it is multiplied in, [V, D]."""
        return self.head.detach()[: self.vocab_size].to(self.dtype)

    def logits(self, final_CD: Tensor, weight_VD: Tensor) -> Tensor:
        """[C, V], fresh: to be worked on in place."""
        return _wide(final_CD.to(self.dtype) @ weight_VD.T)

    def teacher_logits(self, chunk: slice) -> Tensor | None:
        """The same of the target."""
        if self.teacher_RE is None or self.objective.teacher_head is None or not self.objective.needs_teacher:
            return None
        return _wide(self.objective.teacher_head(self.teacher_RE[chunk])[:, : self.vocab_size])


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, final_RD: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(final_RD)
        ctx.rows = rows
        sums = torch.zeros(len(METRICS), dtype=torch.float64, device=final_RD.device)
        with torch.autocast(final_RD.device.type, enabled=False):
            weight_VD = rows.weight()
            for chunk in rows.chunks():
                logits_CV = rows.logits(final_RD[chunk], weight_VD)
                teacher_CV = rows.teacher_logits(chunk)
                sums += _measure(rows.objective, logits_CV, teacher_CV, rows.label_R[chunk])
        ctx.mark_non_differentiable(sums)
        weights = sums.new_tensor([rows.objective.ce, rows.objective.kl, rows.objective.tv, 0.0])
        return sums @ weights, sums

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _grad_sums: Tensor) -> tuple[Tensor, None]:
        (final_RD,) = ctx.saved_tensors
        rows: _Rows = ctx.rows
        head = rows.head
        assert head.grad is not None
        grad_head_VD = head.grad[: rows.vocab_size]
        grad_RD = torch.empty_like(final_RD)
        with torch.autocast(final_RD.device.type, enabled=False):
            weight_VD = rows.weight()
            for chunk in rows.chunks():
                logits_CV = rows.logits(final_RD[chunk], weight_VD)
                teacher_CV = rows.teacher_logits(chunk)
                grad_CV = _gradient(rows.objective, logits_CV, teacher_CV, rows.label_R[chunk]).mul_(grad_loss)
                grad_RD[chunk] = grad_CV.to(rows.dtype) @ weight_VD
                grad_head_VD.addmm_(grad_CV.to(head.dtype).T, final_RD[chunk].to(head.dtype))
        return grad_RD, None


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _measure(objective: Objective, z_CV: Tensor, t_CV: Tensor | None, label_C: Tensor) -> Tensor:
    """Sums of METRICS over a chunk, float64 [4]; overwrites the logits."""
    hits = (z_CV.argmax(-1) == label_C).sum()
    z_CV.sub_(z_CV.logsumexp(-1, keepdim=True))
    ce = -z_CV.gather(1, label_C[:, None]).sum(dtype=torch.float64)
    kl = tv = torch.zeros_like(ce)
    if t_CV is not None:
        log_q_CV = _tempered(z_CV, objective.temperature)
        log_p_CV = t_CV.sub_(t_CV.logsumexp(-1, keepdim=True))
        log_p_CV = _tempered(log_p_CV, objective.temperature)
        p_CV = log_p_CV.exp()
        kl = _dot(p_CV, log_p_CV.sub_(log_q_CV)).sum(dtype=torch.float64)
        tv = 0.5 * p_CV.sub_(log_q_CV.exp_()).abs_().sum(dtype=torch.float64)
    return torch.stack((ce, kl, tv, hits.to(ce.dtype)))


def _tempered(log_p_CV: Tensor, temperature: float) -> Tensor:
    """In place, log-probabilities at another temperature."""
    if temperature == 1:
        return log_p_CV
    log_p_CV.div_(temperature)
    return log_p_CV.sub_(log_p_CV.logsumexp(-1, keepdim=True))


def _gradient(objective: Objective, z_CV: Tensor, t_CV: Tensor | None, label_C: Tensor) -> Tensor:
    """d loss / d logits, [C, V]; overwrites the logits. With q of the draft, p of the target, both at temperature T:

    ce: q(T = 1) - onehot(label).   kl: (q - p) / T.   tv: q (g - <q, g>) / T, g = sign(q - p) / 2.
    """
    grad_CV: Tensor | None = None
    if objective.ce:
        # Without a teacher the logits are not needed any more: the common case holds them once.
        grad_CV = _softmax(z_CV if t_CV is None else z_CV.clone())
        grad_CV.scatter_add_(1, label_C[:, None], grad_CV.new_full((len(label_C), 1), -1.0))
        grad_CV.mul_(objective.ce)
    if t_CV is None:
        assert grad_CV is not None
        return grad_CV
    temperature = objective.temperature
    q_CV, p_CV = _softmax(z_CV.div_(temperature)), _softmax(t_CV.div_(temperature))
    away_CV = torch.sub(q_CV, p_CV, out=p_CV)
    if objective.kl:
        if grad_CV is None:
            grad_CV = away_CV * (objective.kl / temperature)
        else:
            grad_CV.add_(away_CV, alpha=objective.kl / temperature)
    if objective.tv:
        g_CV = away_CV.sign_().mul_(0.5)
        g_CV.sub_(_dot(q_CV, g_CV)[:, None]).mul_(q_CV).mul_(objective.tv / temperature)
        grad_CV = g_CV if grad_CV is None else grad_CV.add_(g_CV)
    assert grad_CV is not None
    return grad_CV


def _softmax(z_CV: Tensor) -> Tensor:
    """In place."""
    return z_CV.sub_(z_CV.logsumexp(-1, keepdim=True)).exp_()


def _dot(x_CV: Tensor, y_CV: Tensor) -> Tensor:
    """Row by row, without a product of the size of both."""
    return torch.bmm(x_CV[:, None], y_CV[:, :, None]).flatten()
