"""`quire bench performance`: runs the benches of docs/performance.md and writes their tables into it.

A part of the page is what one command printed: its tables, the notes below them, and what it was measured on.
A part whose command fails, or whose peers are not installed, stays as it is.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...frontend.cli.parser import ExitCode
from ...ipc.errors import InputError
from ..markdown import format_table, replace_part
from .peers import LLAMA, default_peer_folder, default_peer_python

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
FACTS = ("date", "cpu", "load", "versions", "quire", "command")  # of the machine, those that the page shows
_RULER = re.compile(r"-+(?:  -+)*")
_FACT = re.compile(r"(\w+)  +(\S.*)")


@dataclass(frozen=True, slots=True)
class Part:
    """A table of the page. arguments: of `quire bench`; quick: those with --quick, for a first look."""

    arguments: str
    quick: str
    peers: tuple[str, ...] = ()


PARTS = {
    "offline_tiny": Part(
        "offline --model tiny --rounds 3",
        "offline --model tiny --rounds 1 --workload W1",
        ("vllm", "transformers"),
    ),
    "offline_small": Part(
        "offline --model small --rounds 3", "offline --model small --rounds 1 --workload W1", ("vllm",)
    ),
    "offline_q4_0": Part(
        "offline --model small-q4_0 --rounds 2 --workload W1 W2",
        "offline --model small-q4_0 --rounds 1 --workload W1",
        ("llama.cpp",),
    ),
    "embed": Part(
        "embed --rounds 3", "embed --rounds 1 --model minilm --dtype bfloat16", ("sentence-transformers",)
    ),
    "embed_http": Part(
        "embed --http --rounds 3 --model tiny-encoder --dtype bfloat16",
        "embed --http --rounds 1 --model tiny-encoder --dtype bfloat16",
        ("vllm",),
    ),
    "embed_http_models": Part(
        "embed --http --rounds 2 --model minilm bge-small",
        "embed --http --rounds 1 --model minilm --dtype bfloat16",
        ("vllm", "infinity"),
    ),
    "startup": Part("startup", "startup --rounds 1 --idle 1"),
    "attach": Part("attach", "attach --rounds 1"),
    "http": Part("http", "http --streams 16 --chunks 50"),
    "core": Part("core", "core --steps 20"),
}


def run_performance(names: Sequence[str], page: Path, is_quick: bool, has_peers: bool) -> int:
    """Measure these parts one after the other, and write each as soon as it is there; 1 if one was not."""
    if not page.is_file():
        raise InputError("page", str(page), "a page with the parts of docs/performance.md")
    missed = 0
    for name in names:
        part = PARTS[name]
        missing = [peer for peer in part.peers if has_peers and not _is_installed(peer)]
        if missing:
            print(
                f"{name}: left as it is: {', '.join(missing)} is not installed (--without-peers)",
                file=sys.stderr,
            )
            missed += 1
            continue
        command = shlex.split(part.quick if is_quick else part.arguments)
        if has_peers and part.peers:
            command += ["--peer", *part.peers]
        elif part.peers:
            command += ["--peer", "none"]
        print(f"{name}: quire bench {shlex.join(command)}", file=sys.stderr)
        done = subprocess.run(
            [sys.executable, "-P", "-m", "quire", "bench", *command], stdout=subprocess.PIPE, text=True
        )
        if done.returncode != 0:
            print(f"{name}: left as it is: its command ended with code {done.returncode}", file=sys.stderr)
            missed += 1
            continue
        text = render(done.stdout)
        page.write_text(replace_part(page.read_text(encoding="utf-8"), name, text), encoding="utf-8")
    return ExitCode.FAILED if missed else ExitCode.OK


def render(printed: str) -> str:
    """What a bench has printed, as a part of the page. ValueError if it has no table or no machine."""
    lines = printed.strip().splitlines()
    end = lines.index("") if "" in lines else 0
    facts = {found[1]: found[2] for line in lines[:end] if (found := _FACT.fullmatch(line))}
    if not facts.keys() >= set(FACTS):
        raise ValueError(f"a bench that prints {', '.join(FACTS)} first, not {printed[:200]!r}")
    body = list(_render_body(lines[end:]))
    if not any(line.startswith("| --- ") for line in body):
        raise ValueError(f"a bench that prints a table, not {printed[-200:]!r}")
    measured = "; ".join(f"{name} {facts[name]}" for name in FACTS if name != "command")
    return "\n".join([*body[1:], "", f"Measured by `{facts['command']}`: {measured}."]) + "\n"


def _render_body(lines: Sequence[str]) -> Iterator[str]:
    """Tables become Markdown's, every other line a paragraph of its own."""
    place = 0
    while place < len(lines):
        if place + 1 < len(lines) and _RULER.fullmatch(lines[place + 1]) and lines[place]:
            ruler = lines[place + 1]
            end = place + 2
            while end < len(lines) and lines[end]:
                if not _fits(lines[end], ruler):
                    break
                end += 1
            rows = [_cut(line, ruler) for line in [lines[place], *lines[place + 2 : end]]]
            yield ""
            yield from format_table(rows[0], rows[1:]).splitlines()
            place = end
            continue
        if lines[place].strip():
            yield ""
            yield f"{lines[place].strip()}"
        place += 1


def _fits(line: str, ruler: str) -> bool:
    """Whether a line is a row of the table with this ruler: cut by it, and as long."""
    gaps = [match.start() for match in re.finditer("  ", ruler)]
    return len(line) == len(ruler) and all(line[gap : gap + 2].strip() == "" for gap in gaps)


def _cut(line: str, ruler: str) -> list[str]:
    return [line[match.start() : match.end()].strip() for match in re.finditer("-+", ruler)]


def _is_installed(peer: str) -> bool:
    if peer == "transformers":
        return (
            subprocess.run([sys.executable, "-c", "import transformers"], capture_output=True).returncode == 0
        )
    if peer == LLAMA:
        return default_peer_folder(LLAMA).is_dir()
    return os.access(default_peer_python(peer), os.X_OK)
