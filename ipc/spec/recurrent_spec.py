"""What layers compute that keep a state of one size for each request, however long it is.

A state is float32 numbers, which a request's tokens change one after the other: the same numbers come out in
any chunks. A layer's sizes are a rank's own after `for_rank`. Names are of tensors, after the layer's prefix.
"""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

STATE_ALIGNMENT = 16  # float32 numbers: 64 bytes
MAX_KERNEL_SIZE = 16  # kMaxKernel of kernels/recurrent/causal_conv.cpp


class ShortConvSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="short_conv"):
    """out(C * conv(B * x)) (LFM2): B, C and x are the thirds of one projection, in this order.

    The convolution is causal, of each channel by itself; its state is the last columns of B * x.
    """

    num_channels: int
    kernel_size: int = 3
    bias: bool = False  # of both projections and the convolution
    in_proj: str = "conv.in_proj"
    conv: str = "conv.conv"  # of `conv`.weight [num_channels, 1, kernel_size]
    out: str = "conv.out_proj"

    @property
    def state_size(self) -> int:
        """Numbers of a request's state."""
        return self.num_channels * (self.kernel_size - 1)

    @property
    def num_shares(self) -> int:
        """In how many parts it can be cut at most."""
        return self.num_channels

    def list_linears(self, hidden_size: int) -> list[tuple[str, int, int]]:
        """Name, outputs and inputs of each of its projections."""
        return [
            (self.in_proj, 3 * self.num_channels, hidden_size),
            (self.out, hidden_size, self.num_channels),
        ]

    def list_others(self, hidden_size: int) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of each other tensor."""
        size = self.num_channels
        biases = (self.in_proj, 3 * size), (self.conv, size), (self.out, hidden_size)
        others = [(f"{name}.bias", (count,)) for name, count in biases] if self.bias else []
        return [(f"{self.conv}.weight", (size, 1, self.kernel_size)), *others]

    def count_activations(self) -> int:
        """Numbers that one token holds between the layer's input and output."""
        return 4 * self.num_channels

    def is_cut_by(self, size: int) -> bool:
        """Whether so many ranks can share it."""
        return self.num_channels % size == 0

    def for_rank(self, size: int) -> ShortConvSpec:
        """What one of `size` ranks computes of it."""
        return replace(self, num_channels=self.num_channels // size)


class DeltaNetSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="delta_net"):
    """out(norm(S^T q) * act(z)): the gated delta rule of heads (kernels/recurrent/delta_rule.py).

    Queries, keys and values are what a causal convolution of one projection's outputs gives, with SiLU behind
    it. Several value heads, one after the other, share a head of keys.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    kernel_size: int = 4
    # Two names each: queries, keys and values, then z; beta, then what decays come of. One name: both, of
    # each head of keys by itself.
    projections: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    gates: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    # Value head h shares the head h % num_key_heads of keys, as files of llama.cpp have them.
    is_tiled: bool = False
    rate_is_log: bool = True  # else the tensor has the rates less than 0
    conv: str = "linear_attn.conv1d"  # of `conv`.weight [num_channels, 1, kernel_size]
    rate: str = "linear_attn.A_log"  # of a number for each value head
    shift: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"  # of each value head by itself
    out: str = "linear_attn.out_proj"

    @property
    def keys_size(self) -> int:
        """Numbers of a token's keys."""
        return self.num_key_heads * self.key_size

    @property
    def values_size(self) -> int:
        """Numbers of a token's values."""
        return self.num_value_heads * self.value_size

    @property
    def num_channels(self) -> int:
        """Of the convolution."""
        return 2 * self.keys_size + self.values_size

    @property
    def delta_offset(self) -> int:
        """Where, behind the convolution's columns, the heads' states [H, K, V] begin in the layer's."""
        return round_up(self.num_channels * (self.kernel_size - 1))

    @property
    def state_size(self) -> int:
        """Numbers of a request's state."""
        return self.delta_offset + self.values_size * self.key_size

    @property
    def num_shares(self) -> int:
        """In how many parts it can be cut at most."""
        return self.num_key_heads

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Outputs of each of `projections` and of `gates`."""
        wide, narrow = (self.num_channels, self.values_size), (self.num_value_heads,) * 2
        return (
            wide if len(self.projections) > 1 else (sum(wide),),
            narrow if len(self.gates) > 1 else (sum(narrow),),
        )

    def list_linears(self, hidden_size: int) -> list[tuple[str, int, int]]:
        """Name, outputs and inputs of each of its projections."""
        wide, narrow = self.sizes
        names, sizes = (*self.projections, *self.gates), (*wide, *narrow)
        named = [(name, size, hidden_size) for name, size in zip(names, sizes, strict=True)]
        return [*named, (self.out, hidden_size, self.values_size)]

    def list_others(self, hidden_size: int) -> list[tuple[str, tuple[int, ...]]]:  # noqa: ARG002
        """Name and shape of each other tensor."""
        heads = (self.num_value_heads,)
        return [
            (f"{self.conv}.weight", (self.num_channels, 1, self.kernel_size)),
            (self.rate, heads),
            (self.shift, heads),
            (f"{self.norm}.weight", (self.value_size,)),
        ]

    def count_activations(self) -> int:
        """Numbers that one token holds between the layer's input and output."""
        return 2 * self.num_channels + 2 * self.values_size + 2 * self.num_value_heads

    def is_cut_by(self, size: int) -> bool:
        """Whether so many ranks can share it."""
        is_even = not self.is_tiled or self.num_key_heads == self.num_value_heads
        return size == 1 or (is_even and self.num_key_heads % size == 0)

    def for_rank(self, size: int) -> DeltaNetSpec:
        """What one of `size` ranks computes of it."""
        heads = {"num_key_heads": self.num_key_heads // size, "num_value_heads": self.num_value_heads // size}
        return replace(self, **heads)


class Mamba2Spec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="mamba2"):
    """Mamba-2 (arXiv 2405.21060): out(norm(y * silu(z))), where y is a recurrence over conv(x, B, C) and dt.

    One projection gives z and x of each head, B and C [num_groups, num_rows], and dt of each head, in this
    order; the norm is of each group's heads by themselves. A head's state is [num_rows, head_size].
    """

    num_heads: int
    head_size: int
    num_groups: int
    num_rows: int
    kernel_size: int = 4
    bias: bool = False  # of both projections
    conv_bias: bool = True
    step_limit: tuple[float, float] = (0.0, math.inf)
    name: str = "mamba"  # of the tensors' part; below it `in_proj`, `conv1d`, `norm` and `out_proj`

    @property
    def inner_size(self) -> int:
        """Numbers of all heads."""
        return self.num_heads * self.head_size

    @property
    def conv_size(self) -> int:
        """Channels of the convolution."""
        return self.inner_size + 2 * self.num_groups * self.num_rows

    @property
    def projected_size(self) -> int:
        """Outputs of the first projection."""
        return self.inner_size + self.conv_size + self.num_heads

    @property
    def scan_offset(self) -> int:
        """Where heads' states begin, behind the last columns of x, B and C."""
        return round_up(self.conv_size * (self.kernel_size - 1))

    @property
    def state_size(self) -> int:
        """Numbers of a request's state; heads are padded to a multiple of 16 numbers."""
        return self.scan_offset + self.num_heads * self.num_rows * round_up(self.head_size)

    @property
    def num_shares(self) -> int:
        """In how many parts it can be cut at most."""
        return self.num_heads

    def list_linears(self, hidden_size: int) -> list[tuple[str, int, int]]:
        """Name, outputs and inputs of each of its projections."""
        return [
            (f"{self.name}.in_proj", self.projected_size, hidden_size),
            (f"{self.name}.out_proj", hidden_size, self.inner_size),
        ]

    def list_others(self, hidden_size: int) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of each other tensor."""
        others: list[tuple[str, tuple[int, ...]]] = [
            (part, (self.num_heads,)) for part in ("A_log", "D", "dt_bias")
        ]
        others.append(("conv1d.weight", (self.conv_size, 1, self.kernel_size)))
        others += [("conv1d.bias", (self.conv_size,))] if self.conv_bias else []
        others.append(("norm.weight", (self.inner_size,)))
        if self.bias:
            others += [("in_proj.bias", (self.projected_size,)), ("out_proj.bias", (hidden_size,))]
        return [(f"{self.name}.{part}", shape) for part, shape in others]

    def count_activations(self) -> int:
        """Numbers that one token holds between the layer's input and output."""
        return self.projected_size + self.conv_size + self.inner_size

    def is_cut_by(self, size: int) -> bool:
        """Whether so many ranks can share it: whole groups, or a single one's heads, each with B and C."""
        return self.num_heads % size == 0 and (self.num_groups % size == 0 or self.num_groups == 1)

    def for_rank(self, size: int) -> Mamba2Spec:
        """What one of `size` ranks computes of it."""
        num_groups = max(1, self.num_groups // size)
        return replace(self, num_heads=self.num_heads // size, num_groups=num_groups)


RecurrentSpec = ShortConvSpec | DeltaNetSpec | Mamba2Spec


def round_up(size: int) -> int:
    """To whole units of STATE_ALIGNMENT."""
    return -(-size // STATE_ALIGNMENT) * STATE_ALIGNMENT
