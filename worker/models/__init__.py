"""The native model families."""
