"""Decision: a verdict on the device, and its numbers on their way to the host. It knows nothing about sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specctl.engine.verify import Verdict


@dataclass
class Decision:
    """The numbers are copied beside whatever the device does next; who reads them waits for the copy alone."""

    verdict: Verdict
    _copies: tuple[Tensor, Tensor] = field(init=False)
    _arrived: torch.cuda.Event | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        numbers = self.verdict.token_BM, self.verdict.num_accepted_B
        self._copies = numbers[0].to("cpu", non_blocking=True), numbers[1].to("cpu", non_blocking=True)
        if numbers[0].is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> tuple[list[list[int]], list[int]]:
        """Tokens and how many of them were drafted ones, once they are here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies[0].tolist(), self._copies[1].tolist()
