"""What a model is to its runner. The families and their layers stand behind this.

Legend: T tokens of a step, S positions to sample or score.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..attention.metadata import AttentionMetadata, KVCaches
from .native_forward import NativeForward


class CausalLM(Protocol):
    """A decoder with its weights loaded. Called under `torch.inference_mode` by one thread at a time."""

    @property
    def native(self) -> NativeForward | None:
        """The whole pass as one call into the CPU kernels, None where some piece has no such kernel."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights hold on the device, packed copies and rotary tables included."""
        ...

    @property
    def is_capturable(self) -> bool:
        """True if `forward` of single tokens can be captured into a CUDA graph."""
        ...

    @property
    def batch_variance_reason(self) -> str:
        """What may make a row's bits depend on the rows beside it, '' if nothing does."""
        ...

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: KVCaches,
        metadata: AttentionMetadata,
        rope_lengths: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, hidden] of the step's tokens, after the last norm.

        `input_ids` and `positions` are int64 [T]. Every layer writes all K and V of the step to its cache
        before any token reads them. `rope_lengths` (int64 [T]) is given exactly when the rope type is
        "dynamic": the sequence length whose rotary base each token uses.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """float32 [S, vocab] for hidden states [S, hidden], rows chosen by the caller."""
        ...
