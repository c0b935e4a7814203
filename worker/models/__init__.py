"""The chooser: from an EngineConfig to a model with its weights on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .causal_lm import CausalLM

if TYPE_CHECKING:
    import torch

    from ...ipc.config import EngineConfig

__all__ = ["CausalLM", "load_model"]


def load_model(config: EngineConfig, device: torch.device) -> CausalLM:
    """Build the architecture of `config.model.shape` and load its weights (or random ones).

    Raises ModelError: an unsupported architecture, or weights that are missing, corrupt or of a wrong shape.
    """
    from .decoder import load_decoder

    return load_decoder(config, device)
