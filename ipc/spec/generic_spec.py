"""GenericSpec: what engine and worker must know of a decoder whose layers are transformers' own code."""

from __future__ import annotations

import msgspec


class GenericSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Made by worker/models/generic/plan.py; of the layers beside it in ModelSpec only attention is meant."""

    config: str  # JSON text of the config.json that transformers' class is made of
    linears: tuple[tuple[int, int, int], ...]  # (outputs, inputs, how many), without the projection to logits
    num_others: int  # numbers in tables, norms, biases and experts, without a projection that is not tied
    num_active_params: int  # weights that a token's pass uses
    num_activations: int  # numbers that a token holds at once, an upper estimate
    notes: tuple[str, ...] = ()  # what is slower than it could be, for an operator
