"""The bench's models as config.json has them (models.json). Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

_CONFIGS: dict[str, dict[str, Any]] = msgspec.json.decode(
    Path(__file__).with_name("models.json").read_bytes()
)

# tiny is so small that a step is call overhead: it measures the engine, not the matrix kernels. small has the
# shape of Qwen3-0.6B: 1.19 GB are read a decode step, so it measures bandwidth and matrix kernels. moe has
# the layers of Qwen3-30B-A3B at a width of 1,024: 0.92 billion parameters, 0.22 of them for a token. hybrid
# has the layers of Qwen3.5-0.8B: 1.3 GB of weights, and states of 19.8 MB a request.
BENCH_MODELS = {name: _CONFIGS[name] for name in ("tiny", "small", "moe", "hybrid")}
# Only a config.json and a tokenizer: their weights are made up by the engine (load_format="dummy"). llama-8b
# has the shape of Llama-3.1-8B, 16.1 GB in bfloat16.
DUMMY_MODELS = {"qwen3-0.6b": _CONFIGS["small"], "llama-8b": _CONFIGS["llama-8b"]}
# Shapes whose kernels are compiled; no checkpoint is made of them. Gemma 2 has heads of 256, which need other
# tiles, caps, and windows on every other layer.
COMPILED_MODELS = DUMMY_MODELS | {"gemma2-2b": _CONFIGS["gemma2-2b"]}
# tiny-encoder is so small that a text is call overhead; the others have the shapes of all-MiniLM-L6-v2 and
# bge-small-en-v1.5.
ENCODERS = {name: _CONFIGS[name] for name in ("tiny-encoder", "minilm", "bge-small")}


def is_encoder(config: dict[str, Any]) -> bool:
    """Whether it is one of ENCODERS."""
    return config["model_type"] == "bert"
