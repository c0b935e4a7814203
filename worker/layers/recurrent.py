"""What layers with recurrent states share: an operation in the form that the device has, and its states.

Legend: T tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.choice import choose_kernel, native_library
from ...kernels.program.program import Convolve, Kind, NotNativeError, Program
from ...kernels.recurrent.causal_conv import (
    CausalConv,
    causal_conv_reference,
    launch_causal_conv,
    make_table,
)
from ...kernels.recurrent.states import RequestStates
from ..attention.metadata import AttentionMetadata


class Forms(NamedTuple):
    """An operation of kernels/recurrent; each form takes a layer's numbers, states and the inputs."""

    name: str  # as choose_kernel knows it
    reference: Callable[..., Tensor]
    native: Callable[..., Tensor]  # after the library
    load_triton: Callable[[], Callable[..., Tensor]]


class Recurrence(ABC):
    """One of these operations with a layer's numbers."""

    def __init__(self, forms: Forms, numbers: Any, dtype: torch.dtype, device: torch.device) -> None:
        """`numbers`: the layer's NamedTuple in the operation's file."""
        self.numbers = numbers
        self._name = forms.name
        self._chosen = choose_kernel(forms.name, dtype, device)
        if self._chosen == "native":
            compute = partial(forms.native, native_library())
        else:
            compute = forms.load_triton() if self._chosen == "triton" else forms.reference
        self._compute = compute

    @property
    def is_exact(self) -> bool:
        """Whether a request's bits depend on itself alone."""
        return self._chosen != "torch"

    @property
    def size_bytes(self) -> int:
        """Of its weights."""
        return sum(part.nbytes for part in self.numbers if isinstance(part, Tensor))

    def __call__(self, states: RequestStates, *inputs: Tensor) -> Tensor:
        """As the reference: what the step's tokens give; states are advanced and saved."""
        return self._compute(self.numbers, states, *inputs)

    def emit(self, program: Program, **places: int) -> None:
        """The same as an operation; `places` are fields of its struct. Raises NotNativeError."""
        if self._chosen != "native":
            raise NotNativeError(self._name)
        self._add(program, **places)

    @abstractmethod
    def _add(self, program: Program, **places: int) -> None: ...


def _load_triton() -> Callable[..., Tensor]:
    from ...kernels.recurrent import causal_conv_triton

    return causal_conv_triton.launch_causal_conv


_CAUSAL_CONV = Forms("causal_conv", causal_conv_reference, launch_causal_conv, _load_triton)


class Convolution(Recurrence):
    """A causal convolution (kernels/recurrent/causal_conv.py)."""

    numbers: CausalConv

    def __init__(self, conv: CausalConv, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(_CAUSAL_CONV, conv, dtype, device)

    @property
    def num_channels(self) -> int:
        """Of each token."""
        return self.numbers.weight.shape[1]

    def _add(self, program: Program, **places: int) -> None:
        program.add(Kind.CONVOLVE, Convolve(conv=make_table(self.numbers), **places))


def find_states(metadata: AttentionMetadata) -> RequestStates:
    """The states of a step's requests, as recurrent operations take them."""
    states = metadata.states
    assert states is not None
    return RequestStates(
        states.states,
        states.slots,
        metadata.query_starts,
        metadata.seq_lens,
        states.save_starts,
        states.save_tokens,
        states.save_slots,
    )
