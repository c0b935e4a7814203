"""GenericModel: transformers' decoder with our layers inside, as a runner calls it.

Legend: T tokens, S positions to score.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ....ipc.spec.model_spec import AttentionSpec
from ...attention import AttentionBackend
from ...attention.metadata import AttentionMetadata, KVCaches
from ...pooling.head import PoolingHead
from ..model import Model
from .architecture import find_body
from .attention import attending

_MAX_SINGLE_THREAD_TOKENS = 64
VARIANCE = "transformers' code computes what lies between linear layers and attention"


class GenericModel(Model):
    """All tokens of a step are one sequence of a batch of one: attention alone looks at other tokens."""

    native = None
    pooling_head: PoolingHead | None = None
    batch_variance_reason = VARIANCE

    def __init__(
        self, model: Any, layers: Sequence[tuple[AttentionSpec, AttentionBackend]], weight_bytes: int
    ) -> None:
        self._model, self._layers, self.weight_bytes = model, layers, weight_bytes
        self._body, self._computed = find_body(model), _ComputedBody()

    @property
    def attention_backends(self) -> list[AttentionBackend]:
        return list(dict.fromkeys(backend for _, backend in self._layers))

    @property
    def is_capturable(self) -> bool:
        return False

    @property
    def captures_chunks(self) -> bool:
        return False

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: KVCaches,
        metadata: AttentionMetadata,
        rope_lengths: Tensor | None = None,  # noqa: ARG002
        token_types: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        with attending(self._layers, kv_caches, metadata), _few_threads(len(input_ids)):
            out = self._body(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        return out[0][0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """By the model's own way from hidden states to logits, which may scale or cap them."""
        self._computed.hidden = hidden[None]
        no_ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)  # their number counts
        setattr(self._model, self._model.base_model_prefix, self._computed)
        logits = self._model(input_ids=no_ids, use_cache=False).logits[0]
        setattr(self._model, self._model.base_model_prefix, self._body)
        self._computed.hidden = None
        return logits.float()


@contextmanager
def _few_threads(num_tokens: int) -> Generator[None]:
    """Have torch use one thread in a small step, whose operations are shorter than a meeting of threads.

    Our kernels have threads of their own.
    """
    num_threads = torch.get_num_threads()
    if num_tokens > _MAX_SINGLE_THREAD_TOKENS or num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class _ComputedBody(nn.Module):
    """Stands in the body's place while logits are computed, and gives what was computed before."""

    hidden: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["decoder"] = self  # OPT's head asks a part of the body

    def forward(self, *_: Any, **__: Any) -> Any:
        """What the body would have returned."""
        assert self.hidden is not None
        return _Output(self.hidden)


class _Output:
    """A body's output of hidden states alone: every other field is None, as where it was not asked for."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None
