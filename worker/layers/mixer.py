"""What a layer computes over the tokens of a request: attention, a recurrence, or both."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from ...kernels.program.program import Program, Slot
from ..attention import AttentionBackend
from ..attention.metadata import AttentionMetadata
from .rotary import Angles, AngleSlots


class Mixer(ABC):
    """Legend: T tokens."""

    @property
    def backends(self) -> tuple[AttentionBackend, ...]:
        """Of its attention."""
        return ()

    @property
    def writes(self) -> bool:
        """Whether later steps read what it leaves: keys and values of its own, or a state."""
        return True

    @abstractmethod
    def __call__(
        self,
        hidden: Tensor,
        angles: Angles | None,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """[T, hidden] from [T, hidden]; what later steps read is written afterwards."""

    @abstractmethod
    def emit_write(
        self, program: Program, x: Slot, angles: AngleSlots | None, layer: int
    ) -> tuple[Slot, ...]:
        """The part up to what is written, for all tokens, as operations; the slots that the rest reads come
        back. Raises NotNativeError.
        """

    @abstractmethod
    def emit_attend(self, program: Program, slots: tuple[Slot, ...], y: Slot, layer: int) -> None:
        """The rest as operations: y [T, hidden]."""
