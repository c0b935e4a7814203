"""Makes Triton's interpreter compute bfloat16 as a GPU does.

As it stands (3.6 to 3.9) it cuts float32 off instead of rounding to the nearest, and takes bfloat16 for
integers in products of matrices and in conversions from integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

_convert_float = interpreter._convert_float
_cast = interpreter.InterpreterBuilder.cast_impl
_create_dot = interpreter.InterpreterBuilder.create_dot


def make_bfloat16_exact() -> None:
    """Replace the interpreter's conversions and products. Done once, before the first kernel."""
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.cast_impl = _convert_integers
    interpreter.InterpreterBuilder.create_dot = _multiply


def multiply_in_order(_builder: Any, a: Any, b: Any, total: Any, *_: Any) -> Any:
    """A `create_dot` whose elements are chains over K, as on a GPU; the order of BLAS depends on shapes."""
    left, right = (
        _widen(part.data) if part.dtype.scalar == tl.bfloat16 else part.data.astype(np.float32)
        for part in (a, b)
    )
    values = total.data.copy()
    for column, row in zip(left.T, right, strict=True):
        values += column[:, None] * row[None, :]
    return interpreter.TensorHandle(values, total.dtype.scalar)


def _convert(values: NDArray[Any], source: Any, target: Any, rounding: Any) -> NDArray[Any]:
    if (source, target) == (tl.float32, tl.bfloat16):
        wide = torch.from_numpy(np.array(values, dtype=np.float32))
        return wide.to(torch.bfloat16).view(torch.uint16).numpy()
    if (source, target) == (tl.bfloat16, tl.float32):
        return _widen(values).view(np.uint32)
    return _convert_float(values, source, target, rounding)


def _convert_integers(builder: Any, source: Any, target: Any) -> Any:
    if target.scalar == tl.bfloat16 and source.dtype.scalar.is_int():
        source = _cast(builder, source, tl.float32)
    return _cast(builder, source, target)


def _multiply(builder: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    """a b + total, the products of 16-bit values exact in float32."""
    a, b = (
        interpreter.TensorHandle(_widen(part.data), tl.float32) if part.dtype.scalar == tl.bfloat16 else part
        for part in (a, b)
    )
    return _create_dot(builder, a, b, total, *options)


def _widen(values: NDArray[Any]) -> NDArray[np.float32]:
    return (np.asarray(values).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
