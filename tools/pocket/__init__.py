"""The pocket model: a small chat model trained from scratch on text that this folder writes.

It ships in `model/`, is what `quire` serves when no model is named, and is what the end-to-end tests run.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
