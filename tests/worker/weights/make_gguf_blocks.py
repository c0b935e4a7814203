"""Makes gguf_blocks.safetensors: blocks of every type, and what llama.cpp's own package makes of them.

pip install gguf==0.19.0 && python tests/worker/weights/make_gguf_blocks.py
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.numpy import save_file

TYPES = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"),
    *("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
_SCALES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)},
}


def main() -> None:
    """Three rows of two superblocks a type: random bytes, and every float16 scale finite."""
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for name in TYPES:
        type_ = GGMLQuantizationType[name]
        numbers, size_bytes = GGML_QUANT_SIZES[type_]
        blocks = rng.integers(0, 256, (3 * 512 // numbers, size_bytes), dtype=np.uint8)
        if name == "MXFP4":  # exponents that leave numbers finite
            blocks[:, 0] = rng.integers(0, 200, len(blocks))
        for place in () if name == "MXFP4" else _SCALES.get(name, (0,)):
            scales = rng.normal(0, 0.3, len(blocks)).astype(np.float16)
            scales[:2] = 0, 6e-8  # nothing, and the smallest number
            blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
        rows = blocks.reshape(3, -1)
        arrays[name] = rows
        arrays[f"{name} numbers"] = gguf.dequantize(rows, type_)
    save_file(arrays, Path(__file__).with_name("gguf_blocks.safetensors"))


if __name__ == "__main__":
    main()
