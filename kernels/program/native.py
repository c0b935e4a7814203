"""The C++ kernels of this folder, loaded with ctypes.

They have threads of their own, which sleep when there is nothing to do (thread_pool.h). Whatever goes wrong
(no compiler, no write permission, another platform) costs one log line and the torch path is used, as it is
on demand with QUIRE_NATIVE_KERNELS=0: to find out whether a kernel is at fault.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import subprocess
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from .build import build_library

_LOGGER = logging.getLogger(__name__)

SWITCH = "QUIRE_NATIVE_KERNELS"
SWITCH_ALLOWED = "0 (torch operations take the place of the native CPU kernels), 1, or not set"


class _Data:
    """An argument that is memory: a tensor or an array, which lives until the call ends, or None.

    It takes 0.5 us more than an address, so what each step calls is given addresses.
    """

    @staticmethod
    def from_param(value: Tensor | NDArray[Any] | None) -> ctypes.c_void_p:
        """What ctypes passes on."""
        if isinstance(value, Tensor):
            return ctypes.c_void_p(value.data_ptr())
        return ctypes.c_void_p(None if value is None else value.ctypes.data)


_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
# Arguments of each exported function, as the .cpp of the same name declares them.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "quire_set_num_threads": (_INT,),
    "quire_argmax": (_POINTER, _INT, _LONG, _POINTER, _POINTER),
    "quire_gather_step": (_POINTER, _POINTER, _POINTER, _INT, _POINTER),
    "quire_program_layout": (_INT,),
    "quire_program_workspace": (_POINTER, _POINTER),
    "quire_program_run": (_POINTER, _POINTER, _POINTER, _POINTER),
    "quire_linear_best_variant": (),
    "quire_linear_has_variant": (_INT,),
    "quire_linear_packed_bytes": (_INT, _INT, _INT, _INT),
    "quire_linear_pack": (_INT, _INT, _Data, _INT, _INT, _Data),
    "quire_linear": (_POINTER, _INT, _Data, _INT, _Data),
    "quire_quantize_groups": (_INT, _Data, _INT, _INT, _INT, _Data, _INT, _Data, _Data),
    "quire_rms_norm": (_INT, *[_Data] * 4, _INT, _INT, _INT, _FLOAT, _FLOAT, _INT),
    "quire_shared_norm": (_INT, _POINTER, _Data, _INT, _INT, _Data),
    "quire_layer_norm": (_INT, *[_Data] * 5, _INT, _INT, _FLOAT),
    "quire_gated_activation": (_INT, _INT, _Data, _Data, _INT, _INT),
    "quire_xielu": (_INT, _Data, _LONG, _POINTER),
    "quire_product": (_INT, _INT, _Data, _INT, _INT, _Data, _LONG),
    "quire_delta_rule": (_INT, _POINTER, _POINTER, *[_Data, _LONG] * 3, _Data),
    "quire_mamba2": (_INT, _POINTER, _POINTER, _Data, _Data, _LONG, _Data),
    "quire_causal_conv": (_INT, _POINTER, _POINTER, _Data, _LONG, _Data),
    "quire_pool_rows": (_INT, _Data, _INT, _INT, *[_Data] * 3, _INT, _Data, _Data),
    "quire_soft_cap": (_Data, _LONG, _FLOAT),
    "quire_route": (_INT, _Data, _INT, _POINTER, _Data, _Data),
    "quire_experts": (_INT, _INT, _Data, _INT, _Data, _Data, *[_INT] * 3, *[_POINTER] * 3, _Data),
    "quire_rotate_and_write": (
        _INT,
        _Data,
        _INT,
        _LONG,
        *[_Data] * 4,
        _FLOAT,
        _INT,
        *[_Data] * 3,
        *[_INT] * 5,
    ),
    "quire_rotate_latent": (_INT, *[_Data] * 3, _INT, *[_Data] * 4, *[_INT] * 6),
    "quire_multiply_heads": (_POINTER, _INT, _INT, _POINTER, _LONG, _INT, _INT, _POINTER, _LONG, _INT),
    "quire_paged_attention": (
        *(_INT, _Data, _LONG, _Data, _Data, _Data, _Data, _LONG, _Data, _Data),
        *[_INT] * 7,
        *(_FLOAT, _FLOAT, _Data, _INT),
    ),
    "quire_encoder_attention": (
        *(_INT, _Data, _Data, _Data, _INT, _INT, _INT, _Data),
        *[_INT] * 5,
        *[_FLOAT] * 2,
    ),
    "quire_attention_variant": (_INT,),
    "quire_sample": (_POINTER, _INT, _INT, *[_POINTER] * 8),
    "quire_logprobs": (_POINTER, _INT, _INT, _POINTER, _POINTER, _INT, *[_POINTER] * 3),
    "quire_penalize": (_POINTER, _LONG, _POINTER, _POINTER, _INT),
    "quire_force_attention_variant": (_INT,),
    "quire_token_bitmask": (_Data, _LONG, _Data, _Data, _INT),
    "quire_group_join": (_INT, _INT, _POINTER, _INT),
    "quire_group_send": (_POINTER, _Data, _LONG),
    "quire_group_receive": (_POINTER, _Data, _LONG),
    "quire_group_note_step": (_POINTER,),
    "quire_group_leave": (_POINTER,),
    "quire_all_reduce": (_POINTER, _Data, _LONG, _INT),
    "quire_gather_slices": (_POINTER, _Data, _LONG, _LONG, _Data),
    "quire_broadcast": (_POINTER, _Data, _LONG),
    "quire_group_abort": (_POINTER, _POINTER, _INT),
    "quire_group_status": (_POINTER,),
    "quire_group_abort_text": (_POINTER, _POINTER, _INT),
    "quire_group_reset": (_POINTER,),
}
# What they return, where it is not nothing.
_RESULTS = {
    "quire_group_join": _POINTER,
    "quire_all_reduce": _INT,
    "quire_gather_slices": _INT,
    "quire_broadcast": _INT,
    "quire_group_send": _INT,
    "quire_group_receive": _INT,
    "quire_group_status": _INT,
    "quire_group_abort_text": _INT,
    "quire_group_reset": _INT,
    "quire_attention_variant": _INT,
    "quire_gather_step": _INT,
    "quire_program_layout": _INT,
    "quire_program_run": _INT,
    "quire_program_workspace": _LONG,
    "quire_shared_norm": _INT,
    "quire_linear_best_variant": _INT,
    "quire_linear_has_variant": _INT,
    "quire_linear_packed_bytes": _LONG,
}


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled kernels, None where they cannot be had or are switched off.

    A machine's first use compiles for seconds. Raises ValueError as `is_switched_off`.
    """
    try:
        if is_switched_off():
            raise RuntimeError(f"{SWITCH}=0")
        library = ctypes.CDLL(str(build_library()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        _LOGGER.warning("native CPU kernels are off, torch operations take their place: %s", error)
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = _RESULTS.get(name)
    library.quire_set_num_threads(torch.get_num_threads())
    return library


def set_num_threads(count: int) -> None:
    """Threads of torch's operations and of the native kernels, the caller's included."""
    torch.set_num_threads(count)
    library = load_library() if load_library.cache_info().currsize else None
    if library is not None:
        library.quire_set_num_threads(count)


def find_library(dtype: torch.dtype, device: torch.device) -> ctypes.CDLL | None:
    """The compiled kernels if they compute this type on this device."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return None
    return load_library()


def is_switched_off() -> bool:
    """Whether QUIRE_NATIVE_KERNELS=0. Raises ValueError for another value than 0 and 1."""
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH}={value!r}: expected {SWITCH_ALLOWED}")
    return value == "0"
