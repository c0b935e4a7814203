"""bitsandbytes: nf4 and fp4 (a table of 16 numbers, a scale for each 64 of them in a row) and LLM.int8.

Source: bitsandbytes 0.50.2. Of a pair the first is in the high half of a byte. Scales of 4 bits may be
quantized themselves, to 8 bits by a table of 256, with a scale for each 256 and an offset for all.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from ...ipc.decoding import decode_json
from ...ipc.spec.weight_format import WeightFormat
from .compressed_tensors import to_unsigned
from .integer_weight import IntegerWeight
from .packed_bits import make_weight
from .stored_tensors import StoredTensors

_BYTE_TYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)  # any can hold the bytes


class _State(msgspec.Struct):
    """The JSON text of `weight.quant_state.bitsandbytes__*`; other keys decide nothing here."""

    quant_type: str
    blocksize: int
    shape: tuple[int, int]
    nested_blocksize: int = 256
    nested_offset: float = 0.0


def read_4bit(tensors: StoredTensors, weight_format: WeightFormat, shape: tuple[int, int]) -> IntegerWeight:
    """The layout is "bnb-nf4" or "bnb-fp4"."""
    kind = (weight_format.layout or "").removeprefix("bnb-")
    num_out, num_in = shape
    state = _read_state(tensors, kind)
    expected = {"quant_type": kind, "blocksize": weight_format.group_size, "shape": shape}
    for name, allowed in expected.items():
        if getattr(state, name) != allowed:
            raise tensors.error(
                f"weight.quant_state {name}", getattr(state, name), f"{allowed} by config.json"
            )
    size = num_out * num_in // 2
    stored = tensors.take_bytes("weight", _BYTE_TYPES, size).view(num_out, num_in // 2)
    packed = stored << 4 | stored >> 4
    absmax = _read_absmax(tensors, state, num_out * num_in // state.blocksize)
    codebook = tensors.take_scales("weight.quant_map", (16,)).contiguous()
    scales = absmax.view(num_out, -1)
    return IntegerWeight(packed, scales, 4, num_in, weight_format.group_size, codebook=codebook)


def read_int8(tensors: StoredTensors, weight_format: WeightFormat, shape: tuple[int, int]) -> IntegerWeight:
    """int8 and the largest magnitude of each output, which is 127."""
    codes = to_unsigned(tensors.take("weight", [torch.int8], shape))
    scales = tensors.take_scales("SCB", (shape[0],), (shape[0], 1)).reshape(-1, 1) * _PER_CODE
    layout = tensors.find("weight_format", [torch.uint8], ())
    if layout is not None and bool(layout):  # older versions kept the tiles of a GPU's instructions, too
        raise tensors.error("weight_format", int(layout), "0, row by row")
    return make_weight(codes, scales, 8, weight_format.group_size)


_PER_CODE = 0.007874015718698502  # what bitsandbytes multiplies with: 1 / 127 in float32


def _read_state(tensors: StoredTensors, kind: str) -> _State:
    part = f"weight.quant_state.bitsandbytes__{kind}"
    text = tensors.take_text(part)
    try:
        return decode_json(text, _State)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise tensors.error(part, "other JSON", f"quant_type, blocksize and shape ({error})") from None


def _read_absmax(tensors: StoredTensors, state: _State, count: int) -> Tensor:
    nested = tensors.peek("weight.absmax", [torch.uint8], (count,))
    if nested is None:
        return tensors.take_scales("weight.absmax", (count,)).contiguous()
    tensors.skip("weight.absmax")
    size = state.nested_blocksize
    if not 1 <= size <= 1 << 20:
        raise tensors.error("weight.quant_state nested_blocksize", size, "from 1 to 1048576")
    table = tensors.take_scales("weight.nested_quant_map", (256,))
    outer = tensors.take_scales("weight.nested_absmax", (-(-count // size),))
    absmax = table[nested.int()] * outer.repeat_interleave(size)[:count] + state.nested_offset
    return tensors.check_scales("weight.absmax", absmax)
