"""`python -m quire.core ROLE`: started by a frontend or a supervisor, never by hand."""

import sys

from ..ipc.processes.collector import paused_collector

with paused_collector():
    from ..ipc.daemon.daemon_state import SUPERVISOR_ROLE

    if SUPERVISOR_ROLE in sys.argv[1:]:
        from .supervision.supervisor import run_supervisor as main
    else:
        from .engine.engine_process import main

main()
