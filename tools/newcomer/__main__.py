"""`python -m quire.tools.newcomer [PAGE ...]`: a fresh clone, the README's install, then every block.

Blocks run in a network namespace of their own, where there is one to be had, so that ports are free whatever
else runs here. Exit code 1 if a block did not do what its page says.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .pages import BEFORE, INSTALL, ROOT, Block, list_pages, read_blocks
from .typist import Typist

_INSIDE = "QUIRE_NEWCOMER_INSIDE"
_UNSHARE = ("unshare", "--net", "--map-root-user")


def main(argv: list[str]) -> int:
    """Run the pages; prints a line for each block."""
    parser = argparse.ArgumentParser(prog="python -m quire.tools.newcomer")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="such as docs/http.md (all)")
    parser.add_argument(
        "--packages",
        type=Path,
        metavar="FOLDER",
        help="site-packages that the fresh environment sees, for a quick install",
    )
    parser.add_argument(
        "--clone", type=Path, metavar="FOLDER", help="one that a run before has left with --keep"
    )
    parser.add_argument("--keep", action="store_true", help="leave the clone, and say where it is")
    options = parser.parse_args(argv)
    unknown = set(options.pages) - set(list_pages())
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: of {', '.join(list_pages())}")
    scratch = Path(tempfile.mkdtemp(prefix="quire-newcomer-"))
    clone = options.clone or scratch / "quire"
    try:
        if options.clone is None:
            make_clone(clone, options.packages)
        return run_inside(clone, options.pages or list_pages())
    finally:
        if options.keep:
            print(f"the clone is in {clone}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)


def make_clone(clone: Path, packages: Path | None) -> None:
    """What is committed, with the environment of the README's first command."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    command = read_blocks("README.md", clone)[0].text
    assert command.startswith(INSTALL), f"README.md begins with {INSTALL}, not with {command!r}"
    if packages is not None:
        subprocess.run([sys.executable, "-m", "venv", str(clone / ".venv")], check=True)
        (own,) = (clone / ".venv" / "lib").glob("python3*/site-packages")
        (own / "packages.pth").write_text(f"{packages}\n")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))
    }
    subprocess.run(["bash", "-euo", "pipefail", "-c", INSTALL], cwd=clone, env=environment, check=True)


def run_inside(clone: Path, pages: list[str]) -> int:
    """Type the pages' blocks, in a network of their own if the kernel lets us have one."""
    probe = subprocess.run([*_UNSHARE, "true"], capture_output=True)
    command = [
        sys.executable,
        "-P",
        "-c",
        "from quire.tools.newcomer.__main__ import type_pages; type_pages()",
    ]
    if probe.returncode == 0:
        up = 'ip link set lo up && exec "$@"'
        command = [*_UNSHARE, "bash", "-c", up, "bash", *command]
    else:
        print("no network namespace: the ports of the pages must be free here", file=sys.stderr)
    environment = os.environ | {_INSIDE: os.pathsep.join([str(clone), *pages])}
    return subprocess.run(command, env=environment).returncode


def type_pages() -> None:
    """In the namespace: every block of the pages, and the exit code."""
    clone, *pages = os.environ.pop(_INSIDE).split(os.pathsep)
    failed = sum(type_page(Path(clone), page) for page in pages)
    print(f"{failed} blocks failed" if failed else "every block did what its page says")
    sys.exit(1 if failed else 0)


def type_page(clone: Path, page: str) -> int:
    """How many of its blocks failed."""
    blocks = read_blocks(page, clone)
    if not blocks:
        return 0
    failed = 0
    with tempfile.TemporaryDirectory(prefix="quire-home-") as home:
        typist = Typist(clone, Path(home))
        try:
            if page in BEFORE:
                typist.type(BEFORE[page])
            for block in blocks:
                failed += type_block(typist, block)
        finally:
            typist.close()
    return failed


def type_block(typist: Typist, block: Block) -> bool:
    """Whether it failed."""
    name, began = f"{block.page}:{block.line} {block.text.splitlines()[0][:60]}", time.monotonic()
    if block.reason is not None:
        print(f"skipped {name}: {block.reason}", flush=True)
        return False
    wrong = typist.run(block)
    print(f"{'ok' if wrong is None else 'FAILED'} {name} ({time.monotonic() - began:.1f} s)", flush=True)
    if wrong is not None:
        print(f"    {wrong}", flush=True)
    return wrong is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
