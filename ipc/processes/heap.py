"""The C library's heap of this process. glibc's calls; where there are none (musl), nothing is done."""

import ctypes

# Sizes from which glibc maps memory by itself, and gives the end of an arena back: its own first ones.
_MAX_KEPT_BYTES = 2**17
_M_TRIM_THRESHOLD = -1  # from malloc.h
_M_MMAP_THRESHOLD = -3


def trim_heap() -> None:
    """Give free pages back to the kernel, but for those at the ends of threads' arenas: glibc keeps these."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def limit_kept_heap() -> None:
    """Have what is freed at the end of an arena go back to the kernel at once. For a process's start.

    glibc raises both thresholds, up to 32 and 64 MB, with every large piece that is freed; after large
    requests each thread's arena then kept some 15 MB that `trim_heap` could not give back.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MAX_KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _MAX_KEPT_BYTES)
