"""What README.md and docs/ show to type does what they say: the slow test types it in a fresh clone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import BEFORE, ENDLESS, INSTALL, ROOT, UNRUNNABLE, list_pages, read_blocks
from typist import Typist, compare, find_refusal, wait_for_servers

BLOCKS = [block for page in list_pages() for block in read_blocks(page)]


def test_every_block_of_commands_is_found_with_what_it_shows() -> None:
    for page in list_pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        fences = text.count("\n```bash\n") + text.count("\n```python\n")
        assert len([block for block in BLOCKS if block.page == page]) == fences
    assert len([block for block in BLOCKS if block.shown]) > 20
    assert read_blocks("README.md")[0].text.startswith(INSTALL)


def test_what_is_left_out_waited_for_or_typed_before_is_still_there() -> None:
    for page, begin in UNRUNNABLE:
        assert any(block.page == page and block.text.startswith(begin) for block in BLOCKS), (page, begin)
    for text in ENDLESS:
        assert any(block.text.strip() == text for block in BLOCKS)
    assert BEFORE.keys() <= set(list_pages())


@pytest.mark.parametrize(
    ("shown", "came", "wrong"),
    [
        ('{"a": 1, "b": [1, "..."]}', '{"a": 2.5, "b": [3, 4, 5]}', ""),
        ('{"a": null}', '{"a": "x"}', ""),
        ('{"a": 1}', '{"a": 1, "b": 2}', "fields ['a', 'b']"),
        ('{"a": {"b": [{"c": "x"}]}}', '{"a": {"b": [{"c": 1}]}}', "answer.a.b[0].c"),
        ('{"a": [1]}', '{"a": []}', "answer.a"),
        ('{"a": true}', '{"a": 1}', "answer.a"),
        ('{"a": 1}', '{"error": {"message": "no"}}', "fields ['error']"),
        ("[1]", "{}", "a list"),
        ("{}", "quire: error", "no JSON"),
    ],
)
def test_answers_are_compared_by_their_fields_and_kinds(shown: str, came: str, wrong: str) -> None:
    found = compare(shown, came)
    assert (found is None) == (wrong == ""), found
    assert wrong in (found or "")


def test_a_server_in_the_foreground_is_waited_for_and_one_in_the_background_is_as_it_was() -> None:
    own = "quire serve --port 9 &  # beside\ncurl -f http://127.0.0.1:9/health\n"
    assert wait_for_servers(own) == own
    text = wait_for_servers("quire keys make ./keys\nquire serve --attach x --port 8001   # HTTP\n")
    assert "quire serve --attach x --port 8001 &\n" in text
    assert text.rstrip().endswith("http://127.0.0.1:8001/health")
    assert "127.0.0.1:8000" in wait_for_servers("quire serve")


def test_a_refusal_is_seen_where_the_page_shows_no_answer() -> None:
    assert find_refusal('{"error": {"message": "no"}}') is not None
    for fine in ("", "text", '{"id": "x", "error": null}', "[]"):
        assert find_refusal(fine) is None


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of what is committed, after the README's first command, with this interpreter's packages."""
    if not (ROOT / ".git").exists():
        pytest.skip("a clone is made of a checkout")
    clone = tmp_path_factory.mktemp("newcomer") / "quire"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(clone / ".venv")], check=True)
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    (own,) = (clone / ".venv" / "lib").glob("python3*/site-packages")
    (own / "packages.pth").write_text(f"{packages}\n")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))
    }
    subprocess.run(["bash", "-euo", "pipefail", "-c", INSTALL], cwd=clone, env=environment, check=True)
    return clone


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", [page for page in list_pages() if read_blocks(page)])
def test_every_block_of_a_page_does_what_it_says(page: str, clone: Path, tmp_path: Path) -> None:
    typist = Typist(clone, tmp_path)
    wrong: list[str] = []
    try:
        if page in BEFORE:
            typist.type(BEFORE[page])
        for block in read_blocks(page, clone):
            fault = None if block.reason else typist.run(block)
            wrong += [] if fault is None else [f"{page}:{block.line} {block.text}: {fault}"]
    finally:
        typist.close()
    assert wrong == []
