"""Makes Triton's interpreter compute as a GPU does.

As it stands (3.6 to 3.9) it cuts float32 off instead of rounding it to the nearest, and takes bfloat16 for
integers in products of matrices and in conversions from integers. That of 3.6 rounds `fma` twice.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

_convert_float = interpreter._convert_float
_get_np_dtype = interpreter._get_np_dtype
_cast = interpreter.InterpreterBuilder.cast_impl
_create_dot = interpreter.InterpreterBuilder.create_dot
_HAS_FMA = hasattr(getattr(interpreter, "_interpreter", None), "fma_fp32")


def make_bfloat16_exact() -> None:
    """Replace the interpreter's conversions and products. Done once, before the first kernel."""
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.cast_impl = _convert_integers
    interpreter.InterpreterBuilder.create_dot = _multiply
    if not _HAS_FMA:
        interpreter.InterpreterBuilder.create_fma = _multiply_and_add


def look_up_once() -> None:
    """Replace two searches of the interpreter that give the same each time; done once, as the above.

    Before a kernel and before each function that it calls, every attribute of `triton.language` is looked at.
    """
    names: dict[Any, list[str]] = {}
    numpy_types: dict[str, Any] = {}

    def patch_builtins(package: Any, builder: Any, *scope: Any) -> None:
        if package not in names:
            members = inspect.getmembers(package, tl.core.is_builtin)
            names[package] = [name for name, _ in members]
        for name in names[package]:
            if tl.core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, *scope)

    def find_numpy_type(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in numpy_types:
            numpy_types[name] = _get_np_dtype(dtype)
        return numpy_types[name]

    interpreter._patch_builtin = patch_builtins
    interpreter._get_np_dtype = find_numpy_type


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


def _multiply_and_add(_builder: Any, x: Any, y: Any, z: Any) -> Any:
    """A `create_fma` that rounds once."""
    if z.data.dtype != np.float32:
        return interpreter.TensorHandle(x.data * y.data + z.data, z.dtype.scalar)
    return interpreter.TensorHandle(multiply_and_add(x.data, y.data, z.data), z.dtype.scalar)


def multiply_and_add(
    x: NDArray[np.float32], y: NDArray[np.float32], z: NDArray[np.float32]
) -> NDArray[np.float32]:
    """float32 of x y + z, rounded once: a float64 rounded to odd is between, which rounds as the whole does.

    S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums", 2008.
    """
    product, addend = x.astype(np.float64) * y, np.asarray(z, dtype=np.float64)  # the product is whole
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    is_even = (total.view(np.uint64) & 1) == 0
    to_odd = np.nextafter(total, np.copysign(np.inf, lost))
    return np.where((lost != 0) & is_even, to_odd, total).astype(np.float32)


def _widen(values: NDArray[Any]) -> NDArray[np.float32]:
    return (np.asarray(values).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
