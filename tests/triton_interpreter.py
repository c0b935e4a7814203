"""Makes Triton's interpreter compute as a GPU does, and faster; for tests/kernels and tests/worker.

Importing this module replaces parts of the interpreter. As it stands (3.6 to 3.9) that cuts float32 off
instead of rounding it to the nearest, and takes bfloat16 for integers in products of matrices and in
conversions from integers. That of 3.6 rounds `fma` twice.
"""

from __future__ import annotations

import dataclasses
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


def _make_bfloat16_exact() -> None:
    """Replace the interpreter's conversions and products."""
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.cast_impl = _convert_integers
    interpreter.InterpreterBuilder.create_dot = _multiply
    if not _HAS_FMA:
        interpreter.InterpreterBuilder.create_fma = _multiply_and_add


def _leave_out_repetitions() -> None:
    """Replace what the interpreter does again and again to no effect.

    Half of its time goes there: it looks for an overflow in each sum of integers and tells only a debugger,
    and before a kernel, and each function that it calls, it replaces every builtin of `triton.language`.
    """
    names: dict[Any, list[str]] = {}
    numpy_types: dict[str, Any] = {}
    replaced: set[tuple[Any, ...]] = {(tl,)}

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

    def call_function(function: Any, *args: Any, **kwargs: Any) -> Any:
        """Of what a function sees, a kernel has replaced `tl`; what is replaced for a function stays so."""
        seen = function.fn.__globals__.values()
        packages = tuple(package for package in (tl, tl.core) if any(each is package for each in seen))
        if packages not in replaced:
            replaced.add(packages)
            interpreter._patch_lang(function.fn)
        try:
            return function.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_builtin = patch_builtins
    interpreter._get_np_dtype = find_numpy_type
    interpreter.InterpretedFunction.__call__ = call_function
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


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


_make_bfloat16_exact()
_leave_out_repetitions()
