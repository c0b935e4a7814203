"""Models: built from a spec with their weights on a device, run layer by layer or as one native call."""

from .builder import load_model
from .decoder import Decoder

__all__ = ["Decoder", "load_model"]
