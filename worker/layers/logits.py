"""The projection of hidden states to logits, with a soft cap in some models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.choice import choose_kernel, native_library
from ...kernels.program.program import OUT, Cap, Kind, Program, Slot, Widen
from ...kernels.sampling.soft_cap import launch_soft_cap, soft_cap_reference
from .collectives import GatheredLogits
from .linear import Linear
from .norm import Scaled


@dataclass(eq=False)
class LogitsHead:
    """Logits in float32, cap * tanh(x / cap) of them where there is a cap.

    `scale` multiplies the hidden states, which are a hundredth of the logits' numbers.

    With `gathered` they are a rank's part of them, and then put together. Plain ones stay of the model's type
    where the sampler reads that: of 256 rows, writing them wider and reading that is 230 MB.
    """

    linear: Linear
    width: int  # of the vocabulary, or of a rank's part
    soft_cap: float | None
    scale: Scaled | None = None
    gathered: GatheredLogits | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """[S, vocab] for [S, hidden]."""
        logits = self._compute(hidden)
        return logits if self.gathered is None else self.gathered(logits)

    def _compute(self, hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        logits = self.linear(hidden if self.scale is None else self.scale(hidden))
        if logits.dtype is not torch.float32:
            is_plain = self.soft_cap is None and self.gathered is None
            if is_plain and choose_kernel("sample", logits.dtype, logits.device) == "triton":
                return logits
            logits = logits.float()
        if self.soft_cap is None:
            return logits
        if choose_kernel("soft_cap", logits.dtype, logits.device) == "torch":
            return soft_cap_reference(logits, self.soft_cap)
        return launch_soft_cap(native_library(), logits, self.soft_cap)

    def emit(self, program: Program, x: Slot) -> None:
        """The same as operations, into the program's result, all but `gathered`. Raises NotNativeError."""
        size = self.width
        if self.scale is not None:
            self.scale.emit(program, x, x)
        if program.dtype is torch.float32:
            self.linear.emit(program, x, OUT)
        else:
            logits = program.slot("logits", size, is_sampled=True)
            self.linear.emit(program, x, logits)
            program.add(Kind.WIDEN, Widen(x=logits, y=OUT, size=size))
        if self.soft_cap is not None:
            program.add(Kind.CAP, Cap(x=OUT, size=size, cap=self.soft_cap))
