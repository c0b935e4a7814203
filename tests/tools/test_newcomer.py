"""What a newcomer's run types, leaves out and compares; the slow test is the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from quire.tools.newcomer.answers import compare
from quire.tools.newcomer.pages import BEFORE, ENDLESS, INSTALL, UNRUNNABLE, list_pages, read_blocks
from quire.tools.newcomer.typist import find_refusal, wait_for_servers

ROOT = Path(__file__).parents[2]
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


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_command_of_readme_and_docs_does_what_they_say(tmp_path: Path) -> None:
    """In a clone of what is committed, with this interpreter's packages in its environment."""
    if not (ROOT / ".git").exists():
        pytest.skip("a clone is made of a checkout")
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    command = [sys.executable, "-P", "-m", "quire.tools.newcomer", "--packages", packages]
    done = subprocess.run(command, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
