"""`python -m quire.core`: started by a frontend or a supervisor, never by hand."""

from .engine_process import main

main()
