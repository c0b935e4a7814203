"""What a model is to its runner, whatever computes it. Legend: T tokens, S positions to score."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from ..attention import AttentionBackend
from ..attention.metadata import AttentionMetadata, KVCaches
from ..pooling.head import PoolingHead
from .native_forward import NativeForward


class Model(ABC):
    """Called under `torch.inference_mode` by one thread at a time.

    `weight_bytes` are those held on the device, packed copies and rotary tables included.
    `batch_variance_reason` says what may make a row's bits depend on the rows beside it, '' if nothing does.
    """

    weight_bytes: int
    batch_variance_reason: str
    # The whole pass as one call into the CPU kernels, None where some piece has no such kernel.
    native: NativeForward | None
    pooling_head: PoolingHead | None  # of a model that vectors are made with

    @property
    @abstractmethod
    def attention_backends(self) -> list[AttentionBackend]:
        """Each once."""

    @property
    @abstractmethod
    def is_capturable(self) -> bool:
        """Whether `forward` of single tokens can be captured into a CUDA graph."""

    @property
    @abstractmethod
    def captures_chunks(self) -> bool:
        """Whether that of any other step can be, too."""

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: KVCaches,
        metadata: AttentionMetadata,
        rope_lengths: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, hidden] of the step's tokens, after the last norm; of an earlier stage before it.

        `input_ids` and `positions` are int64 [T]. Every layer writes all K and V of the step to its cache
        before any token reads them. `rope_lengths` (int64 [T]) is given exactly when some layer's
        rope is "dynamic": the sequence length whose rotary base each token uses. `token_types` (int64 [T])
        are those of a model with types; without them all are 0.
        """

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[S, vocab] for hidden states [S, hidden], rows chosen by the caller; as `sample` takes them."""
