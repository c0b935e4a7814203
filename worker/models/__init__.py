"""Models: built from a spec with their weights on a device, run layer by layer or as one native call."""

from __future__ import annotations

import torch

from ...ipc.config import EngineConfig
from .builder import load_decoder
from .causal_lm import CausalLM

__all__ = ["CausalLM", "load_model"]


def load_model(config: EngineConfig, device: torch.device) -> CausalLM:
    """Build what `config.model.spec` says and load its weights (or random ones).

    Raises ModelError: a field of the spec that nothing here computes, or weights that are missing, corrupt or
    of a wrong shape.
    """
    return load_decoder(config, device)
