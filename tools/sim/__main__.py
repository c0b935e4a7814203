"""`python -m quire.tools.sim`: the simulator from the command line."""

from __future__ import annotations

import argparse
import logging
import sys

from .simulate import simulate


def main() -> int:
    """Parse and play; exit code 1 when something that must hold does not."""
    parser = argparse.ArgumentParser(prog="quire.tools.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many (default 1000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first one (default 0)")
    parser.add_argument("--groups", action="store_true", help="over two or three engines")
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f"--seeds {args.seeds}: at least 1")
    logging.disable()  # steps that fail and workers that die are what it is about
    return simulate(range(args.first, args.first + args.seeds), args.groups)


if __name__ == "__main__":
    sys.exit(main())
