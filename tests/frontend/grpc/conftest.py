"""Lets the tests beside it import the helpers of the server's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "http"))
