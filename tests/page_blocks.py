"""Pages -> the blocks that a newcomer would type, and those that nobody can type here, with the reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```\n(?:\n```json\n(.*?)^```\n)?", re.M | re.S)

# How the README's first block begins: it wants the network, which the others lack, and is typed before.
INSTALL = "python3 -m venv .venv && .venv/bin/pip install ."
# Page and a block's beginning -> why it is not run. Commands for a machine of its own, such as systemd's and
# Docker's, are in `text` blocks.
UNRUNNABLE = {
    (
        "README.md",
        "python3 -m venv .venv && .venv/bin/pip install -e",
    ): "the whole suite, which .ci/run runs so",
    ("docs/cluster.md", "pip install 'quire[ray]'"): "several machines with ray",
    ("docs/cluster.md", "ray start --head --num-cpus 0"): "ray is not among Quire's packages",
    (
        "docs/coming-from.md",
        "quire generate --model ./model.gguf",
    ): "a GGUF file of yours, and one of the hub",
    ("docs/http.md", "curl http://127.0.0.1:8001/classify"): "neither model of the package has classes",
    ("docs/performance.md", "P=~/.cache/quire/peers/vllm"): "vLLM's packages, gigabytes of them",
}
# What a page's commands need that the page says in words: typed before its first block.
BEFORE = {
    "docs/http.md": "quire serve --enable-tokenizer-info-endpoint\nquire serve pocket-encoder --port 8001",
    "docs/tuning.md": "quire serve",
}
# Blocks whose command ends only when it is ended.
ENDLESS = ("curl http://127.0.0.1:8000/stats/stream",)


@dataclass(frozen=True, slots=True)
class Block:
    """What is typed, and the JSON that is shown below it, "" where none is."""

    page: str
    line: int
    language: str
    text: str
    shown: str = ""

    @property
    def reason(self) -> str | None:
        """Why it cannot be run; None: it can."""
        found = (
            why
            for (page, begin), why in UNRUNNABLE.items()
            if page == self.page and self.text.startswith(begin)
        )
        return next(found, None)


def list_pages(root: Path = ROOT) -> list[str]:
    """README.md and the pages of docs/, by their paths below `root`. The log is history: nothing to type."""
    return [
        "README.md",
        *sorted(f"docs/{path.name}" for path in (root / "docs").glob("*.md") if path.name != "log.md"),
    ]


def read_blocks(page: str, root: Path = ROOT) -> list[Block]:
    """The page's blocks in their order."""
    text = (root / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2], found[3] or "")
        for found in _BLOCK.finditer(text)
    ]
