"""One part in this process: `python -m quire.tools.gpu NAME FILE` appends what it finds to FILE."""

from __future__ import annotations

import sys
from pathlib import Path

from .rows import RowFile, Say


def run_part(name: str, say: Say) -> None:
    """Run a part; each loads only what it needs."""
    if name == "environment":
        from .correctness import check_environment as part
    elif name == "first answer":
        from .correctness import check_first_answer as part
    elif name == "crowds":
        from .correctness import check_crowds as part
    elif name == "kernel tests":
        from .correctness import check_kernel_tests as part
    elif name == "golden":
        from .correctness import check_golden as part
    elif name == "graphs":
        from .correctness import check_graphs as part
    elif name == "ranks":
        from .ranks import check_ranks as part
    elif name == "kernels":
        from .kernels import bench_kernels as part
    elif name == "small engine":
        from .engine import bench_small_engine as part
    elif name == "large engine":
        from .engine import bench_large_engine as part
    else:
        raise SystemExit(f"part={name!r}: no such part")
    part(say)


if __name__ == "__main__":
    run_part(sys.argv[1], RowFile(Path(sys.argv[2])).append)
