"""Lets every test import the shared fakes (`from fakes import FakeWorker`), wherever it lies."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
