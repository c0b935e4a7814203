"""Prepares Triton's interpreter, if it is what runs the GPU kernels here."""

from __future__ import annotations

import importlib.util
import os

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from triton_interpreter import make_bfloat16_exact

    make_bfloat16_exact()
