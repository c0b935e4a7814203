"""Readers: from the tensors that a checkpoint keeps of one linear layer to the one narrow form.

A file a family of formats; what one may hold is in config.json, which the frontend has made a WeightFormat
of. A reader checks every tensor's type, shape and numbers and knows nothing of models, ranks or kernels.
"""

from __future__ import annotations

from collections.abc import Callable

from ...ipc.errors import ModelError
from ...ipc.spec.weight_format import WeightFormat
from .awq import read_awq
from .bitsandbytes import read_4bit, read_int8
from .compressed_tensors import read_int_quantized, read_mxfp4, read_mxfp4_blocks, read_pack_quantized
from .fp8 import read_compressed_fp8, read_fp8
from .gptq import read_gptq
from .integer_weight import NarrowWeight
from .stored_tensors import StoredTensors, TensorFinder
from .torchao import read_torchao

# (tensors, format, [out, in]) -> the weight
Reader = Callable[[StoredTensors, WeightFormat, tuple[int, int]], NarrowWeight]

# By WeightFormat.layout, before a slash: behind it is what only the reader needs, the bits in the file.
_READERS: dict[str, Reader] = {
    "gptq": read_gptq,
    "gptq_v2": read_gptq,
    "awq": read_awq,
    "pack-quantized": read_pack_quantized,
    "int-quantized": read_int_quantized,
    "float-quantized": read_compressed_fp8,
    "mxfp4-pack-quantized": read_mxfp4,
    "mxfp4": read_mxfp4_blocks,
    "fp8": read_fp8,
    "bnb-nf4": read_4bit,
    "bnb-fp4": read_4bit,
    "bnb-int8": read_int8,
    "torchao": read_torchao,
}


def read_weight(
    find: TensorFinder, name: str, weight_format: WeightFormat, shape: tuple[int, int]
) -> NarrowWeight:
    """The weight [out, in] of the linear layer `name`; `find` gives a tensor of the files or None.

    ModelError names the tensor that is missing or not as the format has it.
    """
    layout = weight_format.layout or ""
    reader = _READERS.get(layout.partition("/")[0])
    if reader is None:
        raise ModelError(f"{name} layout", layout, f"one of {', '.join(_READERS)}")
    return reader(StoredTensors(find, name), weight_format, shape)
