"""What layers compute that keep a state of one size for each request, however long it is.

A state is float32 numbers, which a request's tokens change one after the other: the same numbers come out in
any chunks. A layer's sizes are a rank's own after `for_rank`. Names are of tensors, after the layer's prefix.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

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


RecurrentSpec = ShortConvSpec
