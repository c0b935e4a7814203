"""The smallest pool with which an engine starts: of models with windows another than that of others."""

from __future__ import annotations

from typing import Any

from quire.frontend.options.engine_args import EngineArgs

NUM_BLOCKS = 16  # of models whose layers keep everything


def fit_pool(**fields: Any) -> dict[str, Any]:
    """These engine arguments, whose pool of NUM_BLOCKS is fitted to a model with windows."""
    if fields.get("num_gpu_blocks_override") != NUM_BLOCKS:
        return fields
    config = EngineArgs(**fields).create_engine_config()
    if any(config.model.spec.kv_windows):
        fields["num_gpu_blocks_override"] = config.max_blocks_per_request
    return fields
