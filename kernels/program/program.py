"""A forward pass as a list of operations, run in one call (program.cpp): the other kernels in a row.

Layers emit operations into a `Program`. The structs mirror program.h field by field and hold addresses only:
who emits keeps the tensors. The reference is the same layers called from Python; bits are equal.
Legend: T tokens, R requests, S of them that sample, D head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import NewType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..linear.xielu import XieluTable
from ..recurrent.causal_conv import CausalConvTable
from ..recurrent.delta_rule import DeltaRuleTable
from ..recurrent.mamba2 import Mamba2Table

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

Slot = NewType("Slot", int)
OUT = Slot(0)  # the result: what `run_program` is given


# QuireKind.
Kind = IntEnum(
    "Kind",
    ["EMBED", "ANGLES", "NORM", "ADD_NORM", "LINEAR", "ROTATE", "KEEP", "ATTEND", "ACTIVATE", "WIDEN",
     "SCALE", "CAP", "ROUTE", "EXPERTS", "ADD", "LAYER_NORM", "ADD_ROWS", "ALL_REDUCE",
     "SHARED_NORM", "ENCODER_ATTEND", "LOAD", "SCALE_ROWS", "XIELU", "ROTATE_LATENT", "MULTIPLY_HEADS",
     "PRODUCT", "CONVOLVE", "DELTA_RULE", "MAMBA2"],
    start=0,
)  # fmt: skip


class _Table(ctypes.Structure):
    """A struct of program.h; they are defined here in the order of quire_program_layout."""


def _fields(pointers: str = "", ints: str = "", floats: str = "") -> list[tuple[str, type]]:
    """Fields of a struct, by type in this order."""
    types = ((_POINTER, pointers), (_INT, ints), (_FLOAT, floats))
    return [(name, kind) for kind, names in types for name in names.split()]


def _make_struct(
    pointers: str = "", ints: str = "", floats: str = "", first: tuple[tuple[str, type], ...] = ()
) -> type[ctypes.Structure]:
    fields = (*first, *_fields(pointers, ints, floats))
    return type("Arguments", (_Table,), {"_fields_": fields})


class LinearTable(_Table):
    """QuireLinear."""

    _fields_ = _fields(
        "packed scales offsets codebook permutation bias",
        "num_in num_out variant format group_size has_bf16_scales activation padding",
    )


class SlotTable(_Table):
    """QuireSlot."""

    _fields_ = (("row_bytes", _LONG), ("is_sampled", _INT), ("is_whole", _INT))


class CacheTable(_Table):
    """QuireCache."""

    _fields_ = _fields("k v", "group padding")


class RouterTable(_Table):
    """QuireRouter."""

    _fields_ = _fields(
        "correction expert_scales",
        "num_experts per_token is_sigmoid normalizes num_groups num_groups_per_token sums_two padding",
        "scale mixer_threshold",
    )


# Arguments of the operations, by kind.
Embed = _make_struct("table", "y size first num_rows")
Angles = _make_struct("cos_table sin_table", "cos sin half rope")
Norm = _make_struct("weight", "x residual y first size stride rounds_normed count", "eps weight_offset")
Multiply = _make_struct("", "x y", first=(("linear", LinearTable),))
Rotate = _make_struct(
    "query_norm key_norm",
    "qkv cos sin layer num_heads num_kv_heads head_size stride writes norms_after",
    "eps",
)
Keep = _make_struct("slots", "num_slots padding")
Attend = _make_struct(
    "sinks",
    "qkv y layer num_heads num_kv_heads head_size value_size stride window padding",
    "scale soft_cap",
)
Activate = _make_struct("", "x y size activation")
Widen = _make_struct("", "x y size")
Scale = _make_struct("", "x size", "factor")
Cap = _make_struct("", "x size", "cap")
Route = _make_struct("", "logits choices weights is_float32", first=(("router", RouterTable),))
Experts = _make_struct(
    "gate_up down",
    "x choices weights routed wide gated y num_experts per_token activation scales_inputs padding",
)
Add = _make_struct("", "x residual size gate")
LayerNorm = _make_struct("weight bias", "x residual y size adds", "eps")
AddRows = _make_struct("table", "x size by_type padding")
AllReduce = _make_struct("group", "x size")


class SharedNormTable(_Table):
    """QuireSharedNorm."""

    _fields_ = _fields("weight group", "size total_size counts rounds_normed", "eps weight_offset")


NormOfRanks = _make_struct("", "x first stride squares", first=(("norm", SharedNormTable),))
EncoderAttend = _make_struct(
    "bias", "qkv y num_heads num_kv_heads head_size window reach padding", "scale soft_cap"
)


ScaleRows = _make_struct("table", "x size stride padding")
Xielu = _make_struct("", "x size", first=(("numbers", XieluTable),))
RotateLatent = _make_struct("", "query y latent cos sin layer num_heads nope rope rank")
MultiplyHeads = _make_struct("layers", "x y num_heads x_stride x_step y_stride y_step padding")
Product = _make_struct("", "x y first size stride gate")
Convolve = _make_struct("", "x y stride padding", first=(("conv", CausalConvTable),))
AdvanceDelta = _make_struct(
    "",
    "qkv qkv_stride decay decay_first decay_stride beta beta_first beta_stride y padding",
    first=(("rule", DeltaRuleTable),),
)
Scan = _make_struct("", "x steps y first stride padding", first=(("scan", Mamba2Table),))


class OperationTable(_Table):
    """QuireOperation."""

    _fields_ = _fields("arguments", "kind padding")


class ProgramTable(_Table):
    """QuireProgram."""

    _fields_ = _fields(
        "operations slots caches", "num_operations num_slots is_bf16 block_size splits_tokens kv_format"
    )


class StepTable(_Table):
    """QuireStep."""

    _fields_ = (
        ("state_stride", _LONG),
        *_fields(
            "input_ids positions slots types cos sin query_starts seq_lens block_tables sampling"
            " states state_slots save_starts save_tokens save_slots",
            "num_tokens num_requests num_sampling table_width num_parts num_groups",
        ),
    )

    def set_states(self, states: Tensor, *arrays: NDArray[np.int32]) -> None:
        """Point to the recurrent states of the step's requests, and to what is saved of them.

        `states`: float32 [num_slots, stride] on the CPU; `arrays`: slots, starts, tokens and slots of saves,
        as QuireStep says. The caller keeps all of them until the step is computed.
        """
        self.states, self.state_stride = states.data_ptr(), states.stride(0)
        names = ("state_slots", "save_starts", "save_tokens", "save_slots")
        for name, array in zip(names, arrays, strict=True):
            setattr(self, name, array.ctypes.data)


_TABLES = tuple(_Table.__subclasses__())


class NotNativeError(Exception):
    """A layer has no operation: its model is computed layer by layer in Python."""


class Program:
    """Operations in the order in which they are emitted, and the buffers that they name.

    A row of the result has `out_width` numbers: of the model's type, one row a token; or float32, one row a
    sampling request (`wants_logits`). It is the slot of the name `out`.
    """

    def __init__(self, dtype: torch.dtype, out_width: int, wants_logits: bool, out: str = "out") -> None:
        self.dtype = dtype
        self.wants_logits = wants_logits
        self._arguments: list[tuple[Kind, ctypes.Structure]] = []
        self._slots: dict[str, tuple[Slot, SlotTable]] = {}
        self._kept: list[ctypes.Array[ctypes.c_int32]] = []
        self.slot(out, out_width, torch.float32 if wants_logits else dtype, is_sampled=wants_logits)

    def slot(
        self,
        name: str,
        width: int,
        dtype: torch.dtype | None = None,
        *,
        is_sampled: bool = False,
        is_whole: bool = False,
    ) -> Slot:
        """The buffer of that name with a row of `width` numbers for each token (or sampling request).

        Asked for again it is the same one, wide enough for both. `is_whole`: as of QuireSlot.
        """
        row_bytes = width * (dtype or self.dtype).itemsize
        slot, table = self._slots.setdefault(
            name, (Slot(len(self._slots)), SlotTable(row_bytes=0, is_sampled=is_sampled, is_whole=is_whole))
        )
        table.row_bytes = max(table.row_bytes, row_bytes)
        return slot

    def add(self, kind: Kind, arguments: ctypes.Structure) -> None:
        """Append an operation."""
        self._arguments.append((kind, arguments))

    def keep_sampled(self, slots: Sequence[Slot]) -> None:
        """From here on compute sampled tokens only; `slots` are those that are read later."""
        array = (_INT * len(slots))(*slots)
        self._kept.append(array)
        self.add(Kind.KEEP, Keep(slots=ctypes.addressof(array), num_slots=len(slots)))

    def finish(self, caches: ctypes.Array[CacheTable], splits_tokens: bool) -> ProgramTable:
        """The program as program.cpp takes it, valid while this object and `caches` live."""
        arguments = self._arguments
        self._operations = (OperationTable * len(arguments))(
            *(OperationTable(arguments=ctypes.addressof(struct), kind=kind) for kind, struct in arguments)
        )
        tables = [table for _, table in self._slots.values()]
        self._slot_tables = (SlotTable * len(tables))(*tables)
        return ProgramTable(
            operations=ctypes.addressof(self._operations),
            slots=ctypes.addressof(self._slot_tables),
            caches=ctypes.addressof(caches),
            num_operations=len(arguments),
            num_slots=len(tables),
            is_bf16=self.dtype is torch.bfloat16,
            splits_tokens=splits_tokens,
        )


def check_layout(library: ctypes.CDLL) -> None:
    """Raises RuntimeError if the structs here are not those that the library was compiled with."""
    ours = [ctypes.sizeof(table) for table in _TABLES]
    theirs = [library.quire_program_layout(which) for which in range(len(_TABLES))]
    if ours != theirs:
        raise RuntimeError(f"program.py's structs have {ours} bytes, program.h's {theirs}")


class Workspace:
    """Memory for what a step computes between its inputs and its result; grows to the largest step's size."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size_bytes: int) -> int:
        """Address of at least so many bytes, aligned to 64; what was there before is void."""
        if self._memory.numel() < size_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # first, so that both are never held
            self._memory = torch.empty(size_bytes, dtype=torch.uint8)
        return self._memory.data_ptr()


def run_program(
    library: ctypes.CDLL, program: ProgramTable, step: StepTable, workspace: Workspace, out: Tensor
) -> bool:
    """Compute a step. `out` is contiguous on the CPU and has the rows that the program's slot "out" says.

    All K and V of the step are in the caches afterwards. False, with nothing of that, if the group of
    ranks that compute it has been aborted.
    """
    addresses = ctypes.addressof(program), ctypes.addressof(step)
    size_bytes = library.quire_program_workspace(*addresses)
    return not library.quire_program_run(*addresses, workspace.reserve(size_bytes), out.data_ptr())
