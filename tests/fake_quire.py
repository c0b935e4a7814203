"""`python -m fake_quire ...`: the command `quire`, whose engines have fake workers (fake_process.py)."""

from __future__ import annotations

import sys

from fake_process import MODULE
from forked import patch_process
from quire.frontend import daemon
from quire.frontend.cli.entry import run_command
from quire.frontend.client import engines

if __name__ == "__main__":
    patch_process()
    daemon.CORE_MODULE = engines.CORE_MODULE = MODULE
    sys.exit(run_command())
