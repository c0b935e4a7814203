import ctypes
import subprocess
import sys

import pytest

# A large piece that is freed raises glibc's thresholds; then a thread takes 48 MB in pieces, and frees all.
_PROGRAM = """
import os, sys, threading
from quire.ipc.processes.heap import limit_kept_heap

if sys.argv[1] == "limited":
    limit_kept_heap()

def read_rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

def take():
    pieces = [bytes(16_000) for _ in range(3_000)]
    pieces.reverse()

bytearray(30_000_000)
before = read_rss()
thread = threading.Thread(target=take)
thread.start()
thread.join()
print(read_rss() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc's malloc")
def test_what_a_thread_frees_goes_back_to_the_kernel() -> None:
    kept = {kind: _run(kind) for kind in ("limited", "as it is")}
    assert kept["limited"] < 8_000_000 < kept["as it is"]


def _run(kind: str) -> int:
    return int(subprocess.check_output([sys.executable, "-P", "-c", _PROGRAM, kind]))
