"""The page's one document: its policy, and that it neither loads anything nor makes markup of text."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from openai_fakes import AsgiClient
from quire.frontend import http
from quire.frontend.http.observe.live import load_page, make_content_security_policy


def test_the_policy_allows_the_pages_own_script_and_nothing_else():
    page = "<style>a{}</style><script>let x = 1;</script>"
    policy = dict(part.split(" ", 1) for part in make_content_security_policy(page).split("; "))
    digest = base64.b64encode(hashlib.sha256(b"let x = 1;").digest()).decode()
    assert policy["script-src"] == f"'sha256-{digest}'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy)


async def test_the_policy_names_the_libraries_and_nothing_else_makes_a_script(client: AsgiClient):
    response = await client.call("GET", "/", b"", {"accept": "text/html"})
    policy = response.headers["content-security-policy"]
    assert policy.endswith("require-trusted-types-for 'script'; trusted-types quire-library")
    for name in ("highlight", "katex"):
        library = await client.get(f"/vendor/{name}.min.js")
        digest = "sha256-" + base64.b64encode(hashlib.sha256(library.body).digest()).decode()
        assert f"'{digest}'" in policy.split("style-src")[0]
        assert f'<meta name="{name}" content="{digest}">' in response.body.decode()
        assert "immutable" in library.headers["cache-control"]
        assert library.headers["content-type"].startswith("text/javascript")


def test_the_page_loads_nothing_and_writes_no_markup():
    page = "".join(path.read_text() for path in (Path(http.__path__[0]) / "page").glob("*.*"))
    page = page.replace("http://www.w3.org/2000/svg", "")  # the name of a kind of node
    for word in (
        "http://",
        "https://",
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
    ):
        assert word not in page
    for word in (" onclick=", " style=", "EventSource"):
        assert word not in page
    assert " src=" not in re.sub("<script>.*?</script>", "", load_page(), flags=re.S)


def test_the_page_has_a_cell_for_every_heading_and_shows_what_a_request_holds():
    page = load_page()
    for table in ("requests", "clients"):
        headings = re.findall(
            r'<th scope="col">([^<]+)</th>', page.split(f'<table id="{table}"')[1].split("</table>")[0]
        )
        width = re.search(rf'fill\(byId\("{table}"\), [a-z.]+, (\d+),', page)
        assert width is not None
        assert int(width[1]) == len(headings)
        if table == "requests":
            assert f"cells[{headings.index('holds')}].textContent = size(request.held_bytes)" in page


def test_no_script_ends_early_or_begins_another():
    page = load_page()
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert len(scripts) == page.count("<script") == page.count("</script>") >= 5
    assert not any("<!--" in script for script in scripts)
    assert page.count("<style>") == 1
