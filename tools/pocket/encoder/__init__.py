"""The pocket encoder: a small sentence encoder, trained from scratch on texts that this folder draws.

It ships in `model/` and is what `quire embed` and `quire rerank` run when no model is named.
"""

from pathlib import Path

ENCODER_DIR = Path(__file__).parent / "model"
