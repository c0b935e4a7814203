"""The C library's heap of this process."""

import ctypes


def trim_heap() -> None:
    """Give its free pages back to the kernel; nothing where the C library has no such call (musl)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
