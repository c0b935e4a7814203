"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464; by channel: Kimi Delta Attention, 2510.26692).

Of each value head by itself, token by token, in float32, with the state S [K, V]:

    S = D S;  d = beta (v - S^T k);  S = S + k d^T;  y = S^T q
    D = exp(-rate * softplus(decay + shift)), one number or one a row of S;  beta = sigmoid of its input

q and k are of unit length (a root of the sum of squares + 1e-6), q is divided by sqrt(K) then; several value
heads one after the other share a head of keys. This order of tokens is the only arithmetic, for prompts too:
chunks, batches and threads change no bit. Bytes: a state once in each direction for all of its tokens.
Legend: T tokens, G key heads, H value heads, K and V numbers of a key and a value.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .states import RequestStates

_EPS = 1e-6
_SIZES = ("num_key_heads", "num_value_heads", "key_size", "value_size")
_COLUMNS = 32  # kBlock of delta_rule.cpp


class DeltaRule(NamedTuple):
    """A layer's numbers and sizes. Its state is H * K * V numbers of a slot, from `offset` on."""

    rate: Tensor  # float32 [H], at least 0
    shift: Tensor  # float32 [H], or [H * K] where the decay is by channel
    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    offset: int = 0
    is_tiled: bool = False  # value head h shares the head h % G of keys

    @property
    def by_channel(self) -> bool:
        """Whether each row of a state has a decay of its own."""
        return len(self.shift) > self.num_value_heads

    @property
    def state_size(self) -> int:
        """Numbers of a request's state."""
        return self.num_value_heads * self.key_size * self.value_size

    def split(self, qkv: Tensor) -> list[Tensor]:
        """Queries and keys [T, G, K] and values [T, H, V] in rows [T, 2 G K + H V]."""
        keys = self.num_key_heads * self.key_size
        query, key, value = qkv.split((keys, keys, self.num_value_heads * self.value_size), dim=1)
        query, key = (part.unflatten(1, (-1, self.key_size)) for part in (query, key))
        return [query, key, value.unflatten(1, (-1, self.value_size))]


class DeltaRuleTable(ctypes.Structure):
    """QuireDeltaRule."""

    _fields_ = [
        ("rate", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in (*_SIZES, "by_channel", "is_tiled")),
    ]


def make_table(rule: DeltaRule) -> DeltaRuleTable:
    """Valid while the rule's tensors live."""
    pointers = {name: getattr(rule, name).data_ptr() for name in ("rate", "shift")}
    sizes = {name: getattr(rule, name) for name in (*_SIZES, "by_channel", "is_tiled", "offset")}
    return DeltaRuleTable(**pointers, **sizes)


def delta_rule_reference(
    rule: DeltaRule, states: RequestStates, qkv: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """y [T, H * V] of rows [T, 2 G K + H V], `decay` [T, H or H * K] and `beta` [T, H] of one type.

    States [H, K, V] are advanced and saved.
    """
    query, key, value = (part.float() for part in rule.split(qkv))
    group = rule.num_value_heads // rule.num_key_heads
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) for x in (query, key))
    heads = torch.arange(rule.num_value_heads, device=qkv.device)
    heads = heads % rule.num_key_heads if rule.is_tiled else heads // group
    query, key = query[:, heads], key[:, heads]
    query *= rule.key_size**-0.5
    decay = F.softplus(decay.float() + rule.shift).unflatten(1, (rule.num_value_heads, -1))
    decay, beta = torch.exp(-rule.rate[:, None] * decay), torch.sigmoid(beta.float())
    y = torch.empty_like(value)
    for run in states.list_runs():
        places = slice(rule.offset, rule.offset + rule.state_size)
        own = states.states[run.slot, places]
        state = torch.zeros_like(own) if run.begins else own
        state = state.view(rule.num_value_heads, rule.key_size, rule.value_size)
        for token in range(run.first, run.end):
            state = state * decay[token].unsqueeze(2)
            delta = (value[token] - torch.einsum("hkv,hk->hv", state, key[token])) * beta[token, :, None]
            state = state + key[token].unsqueeze(2) * delta.unsqueeze(1)
            y[token] = torch.einsum("hkv,hk->hv", state, query[token])
        own.copy_(state.flatten())
        for slot in run.saves:
            states.states[slot, places] = own
    return y.flatten(1).to(qkv.dtype)


def launch_delta_rule(
    library: ctypes.CDLL, rule: DeltaRule, states: RequestStates, qkv: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """The same on the CPU; columns of the inputs are neighbours. States lie as `from_native_state` says."""
    y = qkv.new_empty((len(qkv), rule.num_value_heads * rule.value_size))
    parts = [part for tensor in (qkv, decay, beta) for part in (tensor, tensor.stride(0))]
    is_bf16, tables = qkv.dtype is torch.bfloat16, (make_table(rule), states.to_table())
    library.quire_delta_rule(is_bf16, *map(ctypes.byref, tables), *parts, y)
    return y


def from_native_state(rule: DeltaRule, state: Tensor) -> Tensor:
    """[H, K, V] of a state [H * K * V] of `launch_delta_rule`: blocks of some columns, each [K, columns]."""
    heads = state.view(rule.num_value_heads, -1)
    blocks = heads.split(rule.key_size * _COLUMNS, dim=1)
    return torch.cat([block.unflatten(1, (rule.key_size, -1)) for block in blocks], dim=2)
