"""`python -m quire.worker`: started by the engine core, never by hand."""

from .worker_process import main

main()
