"""What logprobs need of whole rows: log(sum(exp(x))), and the rank of one token, 1 + the number above it.

With these, the logprob of a token is its logit minus the total: log_softmax of the rows is never written.
Bytes: 4 S V read. Legend: S rows, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor


def log_totals_reference(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(float64 [S], int32 [S]) of float32 `logits` [S, V] and int64 `token_ids` [S]."""
    chosen = logits.gather(1, token_ids[:, None])
    ranks = 1 + (logits > chosen).sum(dim=1)
    return logits.double().logsumexp(dim=1), ranks.int()
