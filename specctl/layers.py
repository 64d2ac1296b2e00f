"""The layers every model is made of: RMSNorm, Embedding, Linear, MLP, and the way weights are made ready for serving.

A module's parameters carry the checkpoint's own names until prepare("serve") turns them into what the machine reads
fastest. Legend: T rows, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Purpose = Literal["train", "serve"]

# oneDNN lays a packed weight out for an expected number of rows. 4 served 1..16 rows best, and prefill not worse than
# torch's own linear (benchmarks/linear.py).
PACKED_FOR_ROWS = 4
ALIGNMENT = 64  # bytes, of torch's own tensors on a CPU


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square taken in float32 for every dtype, as transformers does."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        if x_TD.dtype == torch.float32:  # the same arithmetic in one call
            return F.rms_norm(x_TD, self.weight.shape, self.weight, self.eps)
        x = x_TD.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(x_TD.dtype)


class Embedding(nn.Module):
    """Row `id` of the weight [V, D] for every id. torch's own would draw random numbers for it first, which on the meta
    device imports sympy and much else: seconds, and 70 MB that stay."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, id_T: Tensor) -> Tensor:
        return F.embedding(id_T, self.weight)


class Linear(nn.Module):
    """x @ weight.T + bias. The weight is [outputs, inputs], as checkpoints have it.

    prepare("serve") on a CPU hands the weight to oneDNN in its packed form: torch's own CPU linear takes about twice as
    long for two to eight rows as for one, which would eat the gain of verifying several tokens in one pass.

    prepare("serve", single=True) is for a weight that mostly gets a single row. With one thread torch's own is faster
    there than the packed one by a quarter, and from two rows on it is multiplied from the left, which takes no longer
    than the packed one. With several threads the packed one is faster by a sixth for a single row, too.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self._packed: Tensor | None = None
        self._serving = self._single = False

    def forward(self, x_TD: Tensor) -> Tensor:
        if self._packed is None:
            if self._single and len(x_TD) > 1:
                return (self.weight @ x_TD.T).T
            return F.linear(x_TD, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x_TD, self._packed, self.bias, "none", [], "")
        return out

    def prepare(self, purpose: Purpose, *, single: bool = False) -> None:
        assert not self._serving, "prepared for serving already"
        if purpose == "train":
            return
        self._serving, self._single = True, single and self.bias is None and torch.get_num_threads() == 1
        if self._single and self.weight.device.type == "cpu" and self.weight.data_ptr() % ALIGNMENT:
            # As it lies in a file: slower to read, and summed in another order.
            self.weight = nn.Parameter(self.weight.detach().clone(), requires_grad=False)
        if not self._single and _can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), PACKED_FOR_ROWS)
            del self.weight

    @classmethod
    def fused(cls, parts: Seq[Linear]) -> Linear:
        """One layer whose output is the outputs of `parts` side by side: one pass over the rows instead of several.

        Takes the weights out of the parts, so that they are freed before the new one is packed.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
        layer.bias = None
        if any(part.bias is not None for part in parts):
            biases = [part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts]
            layer.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
        layer._packed, layer._serving, layer._single = None, False, False
        for part in parts:
            del part.weight, part.bias
        return layer

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # A packed weight is in no state_dict and a fused one has no name in a checkpoint: half a checkpoint is worse
        # than none.
        assert not self._serving, "state_dict() of a module prepared for serving; load it for training to save it"
        super()._save_to_state_dict(*args, **kwargs)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), `inner` wide inside."""

    def __init__(self, width: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner, bias)
        self.up_proj = Linear(width, inner, bias)
        self.down_proj = Linear(inner, width, bias)
        self._gate_up: Linear | None = None

    def forward(self, x_TD: Tensor) -> Tensor:
        if self._gate_up is None:
            gate, up = self.gate_proj(x_TD), self.up_proj(x_TD)
        else:
            gate, up = self._gate_up(x_TD).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out

    def gate_up(self, x_TD: Tensor) -> Tensor:
        """gate(x) and up(x) side by side."""
        if self._gate_up is None:
            return torch.cat((self.gate_proj(x_TD), self.up_proj(x_TD)), dim=-1)
        out: Tensor = self._gate_up(x_TD)
        return out

    def take(self) -> tuple[Tensor, Tensor]:
        """The weights of one that serves unpacked, gate's and up's in one, which it then has no more."""
        assert self._gate_up is not None
        taken = self._gate_up.weight.detach(), self.down_proj.weight.detach()
        del self._gate_up.weight, self.down_proj.weight
        return taken

    def prepare(self, purpose: Purpose, *, single: bool = False) -> None:
        """single: see Linear."""
        if purpose == "serve":
            self._gate_up = Linear.fused([self.gate_proj, self.up_proj])
            del self.gate_proj, self.up_proj
            self._gate_up.prepare(purpose, single=single)
        self.down_proj.prepare(purpose, single=single)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
