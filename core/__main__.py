"""`python -m quire.core ROLE`: started by a frontend or a supervisor, never by hand."""

import sys

from ..ipc.daemon.daemon_state import SUPERVISOR_ROLE

if SUPERVISOR_ROLE in sys.argv[1:]:
    from .supervisor import run_supervisor

    run_supervisor()
else:
    from .engine_process import main

    main()
