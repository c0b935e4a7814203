"""How the pocket model begins: not at random, but with two layers that look up what followed a token.

An induction head takes two layers that agree, which training found late: 300 steps had not moved the loss of
sequences to copy. Here the first layer begins by telling each position its predecessor, and the second by
attending to where the present token was a predecessor, and saying what stands there (Olsson et al.,
"In-context Learning and Induction Heads", 2022). Before any step that copies 97 % of the tokens of random
sequences. All of it is then trained like the rest.
"""

from typing import cast

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

# All embeddings share coordinate 0, which adds the same to every logit; keys and queries that do not depend
# on the token come from it.
SHARED = 0.35
LOOK_BACK = 1.2
NUM_NEAR = 4  # frequencies that tell near positions apart
FIRST_FAR = 7  # from this frequency on, 300 positions turn a key by less than a radian
TOLD, MATCH, SAY = 0.15, 2.8, 1.0  # scales of what the two layers write, compare, and say


@torch.no_grad()
def wire(model: LlamaForCausalLM, theta: float) -> None:
    """Sets the shared coordinate and the first two layers' attention; all other outputs begin at zero."""
    layers = [cast(LlamaDecoderLayer, layer) for layer in model.model.layers]
    for layer in layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight[:, 0] = SHARED
    hidden, size = model.config.hidden_size, cast(int, model.config.head_dim)
    # Directions without the shared coordinate that do not disturb each other: [hidden - 1, hidden].
    basis = torch.zeros(hidden - 1, hidden)
    basis[:, 1:] = torch.linalg.qr(torch.randn(hidden - 1, hidden - 1)).Q
    read, told, *said = basis.split(size)
    _wire_predecessors(layers[0].self_attn, theta, read, told)
    _wire_induction(layers[1].self_attn, read, told, said)


def _wire_predecessors(attention: LlamaAttention, theta: float, read: Tensor, told: Tensor) -> None:
    """Head 0 attends to the position before and writes the `read` part of its token into `told`.

    Key 0 is the same at all positions; the query is this key, turned by one position.
    """
    size = attention.head_dim
    angles = theta ** (-torch.arange(0, 2 * NUM_NEAR, 2) / size)
    query, key = attention.q_proj.weight[:size], attention.k_proj.weight[:size]
    query.zero_()
    key.zero_()
    key[:NUM_NEAR, 0] = LOOK_BACK
    query[:NUM_NEAR, 0] = LOOK_BACK * torch.cos(angles)
    query[size // 2 : size // 2 + NUM_NEAR, 0] = -LOOK_BACK * torch.sin(angles)
    attention.v_proj.weight[:size] = read
    attention.o_proj.weight[:, :size] = TOLD * told.T


def _wire_induction(attention: LlamaAttention, read: Tensor, told: Tensor, said: list[Tensor]) -> None:
    """A query head of each key head compares its token with the keys' predecessors and says the keys' token.

    Only slow frequencies take part, so that a match counts the same at any distance.
    """
    size, half = attention.head_dim, attention.head_dim // 2
    dims = [*range(FIRST_FAR, half), *range(half + FIRST_FAR, size)]
    num_key_heads = attention.k_proj.weight.shape[0] // size
    for index in range(num_key_heads):
        start = index * size
        head = index * attention.num_key_value_groups * size
        # Each key head compares another part of what was told.
        part = [(offset + index * size // num_key_heads) % size for offset in range(len(dims))]
        key, query = (
            attention.k_proj.weight[start : start + size],
            attention.q_proj.weight[head : head + size],
        )
        key.zero_()
        query.zero_()
        key[dims] = MATCH * told[part]
        query[dims] = MATCH * read[part]
        attention.v_proj.weight[start : start + size] = said[index]
        attention.o_proj.weight[:, head : head + size] = SAY * said[index].T
