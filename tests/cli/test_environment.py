"""Environment variables are for secrets and paths, and docs/environment.md lists each that is read."""

from __future__ import annotations

import re
from pathlib import Path

from quire.frontend.cli.serve_options import make_parser

ROOT = Path(__file__).parents[2]
PACKAGES = ("ipc", "frontend", "core", "worker", "kernels")
READ = re.compile(r"""(?:environ(?:\.get\(|\[)|getenv\()\s*["']([A-Z_]+)|["'](QUIRE_[A-Z_]+)["']""")


def test_each_variable_that_is_read_is_listed() -> None:
    sources = [file.read_text() for name in PACKAGES for file in (ROOT / name).rglob("*.py")]
    read = {one or other for source in sources for one, other in READ.findall(source)}
    assert {"QUIRE_API_KEY", "QUIRE_NATIVE_KERNELS", "XDG_STATE_HOME", "NO_COLOR"} <= read
    listed = set(re.findall(r"`([A-Z_]+)(?:=0)?`", (ROOT / "docs" / "environment.md").read_text()))
    assert read <= listed
    assert {name for name in listed if name.startswith("QUIRE_")} <= read


def test_the_board_is_where_help_says_it_is() -> None:
    found = re.search(r"Grafana board .*: (\S+)$", make_parser().format_help(), re.M)
    assert found
    assert Path(found[1]).is_file()
